"""A step's rollout on one GPU whose cache is too small, on virtual time, with and without turns that wait for room.

The rule is the real one (`rollout/cache/need.py`), evaluated at most twice a second; a conversation whose tool takes
long does not count (`AWAY_S`). Nothing is fitted. The inputs are:

- Qwen2.5-7B (its config: 28 layers, 4 key-value heads of 128, 7.6 B parameters, 16 bits) on one H100 (data sheet: 989
  TFLOP/s, 3.35 TB/s): decoding reads weights and cache at 70 % of the bandwidth and a step costs 2 ms more; prompts are
  read at half of the peak, with their attention; 50 GB remain for the cache;
- a conversation: a prompt of 2,000 tokens; then turns of 150 tokens and answers of 500; 15 to 35 turns; a tool that
  takes 2 s on average (exponential).

The engine is SGLang as far as its cache goes: a turn is let in, first come, first served, when its tokens fit beside
those of the running ones; it reads tokens that are not cached, before decoding; tokens used least recently are thrown
out, from their end on.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from verl_multiturn.rollout.cache.holding import STAYS
from verl_multiturn.rollout.cache.need import AWAY_S, CacheNeed

PARAMETERS, KV_BYTES, LAYERS, WIDTH = 7.6e9, 57_344, 28, 3584
BYTES_PER_S, FLOPS, STEP_S = 3.35e12 * 0.7, 989e12 * 0.5, 0.002
CACHE = int(50e9 / KV_BYTES)
PROMPT, SAMPLED, ANSWER, TURNS, TOOL_S = 2_000, 150, 500, (15, 35), 2.0
MEAN_WHOLE = PROMPT + sum(TURNS) // 2 * (SAMPLED + ANSWER) - ANSWER
"""Tokens of a conversation at its end, on average."""
EVERY_S, FULL = 0.5, 0.9
NEEDS = (0.8, 1.8, 3.6)
LEAST_FASTER = {0.8: 0.99, 3.6: 1.6}
"""How many times as fast it has to be, by need: no slower where the cache suffices."""


@dataclass(eq=False)
class Conversation:
    """A conversation of the step."""

    number: int
    turns: int
    tokens: int = PROMPT
    left: float = 0.0
    """Tokens that its turn still has to sample."""
    cached: float = 0.0
    used: float = 0.0
    """When the engine last had it."""


class Rollout:
    """The conversations of one step, all of which begin at once.

    Args:
        need: Their need together at their ends, as a share of the cache.
        holds: Whether turns of the younger ones wait while the cache is full.
        seed: Of the draws.
        tool_s: Seconds of a call, on average.
    """

    def __init__(self, need: float, holds: bool, seed: int = 0, tool_s: float = TOOL_S) -> None:
        self.now = 0.0
        self.read = 0.0
        """Tokens that were read."""
        self._rng, self._tool_s = random.Random(seed), tool_s
        count = max(1, round(need * CACHE / MEAN_WHOLE))
        self._live = [Conversation(number, self._rng.randint(*TURNS)) for number in range(count)]
        self._all = list(self._live)
        self._queue: list[Conversation] = []
        self._held: list[Conversation] = []
        self._running: list[Conversation] = []
        self._tools: list[tuple[float, int, Conversation]] = []
        self._need = CacheNeed(CACHE, lambda: self.now) if holds else None
        self._youngest, self._asked = math.inf, -math.inf

    def run(self) -> float:
        """Return the seconds until the last conversation has ended."""
        for each in self._live:
            self._come(each)
        while self._live:
            while self._tools and self._tools[0][0] <= self.now:
                self._come(heapq.heappop(self._tools)[2])
            self._ask()
            self._admit()
            if self._running:
                self._decode()
            else:  # all wait for their tools, or for the next question
                self.now = min([*(at for at, *_ in self._tools[:1]), *([self._asked + EVERY_S] if self._held else [])])
        return self.now

    def _come(self, one: Conversation) -> None:
        """Let a turn come."""
        self._ask()
        one.left = SAMPLED
        (self._held if one.number > self._youngest else self._queue).append(one)

    def _ask(self) -> None:
        if self._need is None or self.now < self._asked + EVERY_S:
            return
        self._asked = self.now
        away = {each.number for _, _, each in self._tools if self.now - each.used > AWAY_S}
        told = [(float(each.number), self._needs(each)) for each in self._live if each.number not in away]
        self._youngest = self._need.tell("client", told, FULL).youngest
        come = sorted((each for each in self._held if each.number <= self._youngest), key=lambda each: each.number)
        self._queue += come
        self._held = [each for each in self._held if each.number > self._youngest]

    def _needs(self, one: Conversation) -> int:
        """Return the tokens that a conversation needs, as `Holding` counts them."""
        growth = 0 if one.tokens == PROMPT else SAMPLED + ANSWER
        return one.tokens + growth * (STAYS if one.number > self._youngest else 1)

    def _admit(self) -> None:
        """Let in turns that fit beside the running ones, and read tokens that are not cached."""
        locked = sum(each.tokens + each.left for each in self._running)
        while self._queue and (not self._running or locked + self._queue[0].tokens + SAMPLED <= CACHE):
            one = self._queue.pop(0)
            locked += one.tokens + SAMPLED
            fresh = one.tokens - one.cached
            self.read += fresh
            attended = 4 * LAYERS * WIDTH * fresh * (one.tokens + one.cached) / 2
            self.now += (2 * PARAMETERS * fresh + attended) / FLOPS
            one.cached, one.used = one.tokens, self.now
            self._running.append(one)
            self._throw_out()

    def _throw_out(self) -> None:
        """Throw out tokens used least recently, until the rest fits."""
        over = sum(each.cached for each in self._all) - CACHE
        idle = {id(each) for each in self._running}
        for each in sorted(self._all, key=lambda each: each.used):
            if over <= 0:
                return
            if id(each) not in idle:
                out = min(over, each.cached)
                each.cached -= out
                over -= out

    def _decode(self) -> None:
        """Sample until a turn ends or the next one comes."""
        running = self._running
        context = sum(each.tokens for each in running)
        step_s = STEP_S + (2 * PARAMETERS + KV_BYTES * context) / BYTES_PER_S
        until = [at for at, *_ in self._tools[:1]] + ([self._asked + EVERY_S] if self._held else [])
        steps = min(each.left for each in running)
        if until:
            steps = min(steps, max(1.0, math.ceil((min(until) - self.now) / step_s)))
        self.now += steps * step_s
        for each in running:
            each.left -= steps
            each.tokens += int(steps)
            each.cached, each.used = each.tokens, self.now
        for each in [each for each in running if each.left <= 0]:
            running.remove(each)
            each.turns -= 1
            if each.turns:
                each.tokens += ANSWER
                heapq.heappush(self._tools, (self.now + self._rng.expovariate(1 / self._tool_s), each.number, each))
            else:
                self._live.remove(each)
        self._throw_out()


def faster(needs: Sequence[float] = NEEDS, seeds: int = 1, tool_s: float = TOOL_S) -> dict[str, dict[str, float]]:
    """Return, by need, how many times as fast a step's rollout is when younger turns wait, and the read tokens."""
    found = {}
    for need in needs:
        seconds, read = [0.0, 0.0], [0.0, 0.0]
        for seed in range(seeds):
            for holds in (False, True):
                rollout = Rollout(need, holds, seed, tool_s)
                seconds[holds] += rollout.run()
                read[holds] += rollout.read
        found[f"{need:g}"] = {"faster": round(seconds[0] / seconds[1], 2), "read": round(read[1] / read[0], 2)}
    return found


def failures(found: dict[str, dict[str, float]]) -> list[str]:
    """Return the claims that do not hold."""
    return [
        f"at {need:g} times the cache a step is {found[f'{need:g}']['faster']} times as fast, at least {least}"
        for need, least in LEAST_FASTER.items()
        if f"{need:g}" in found and found[f"{need:g}"]["faster"] < least
    ]

"""A training run on virtual time: the real replay buffers, with simulated groups and a simulated trainer.

In each step the trainer does the work of verl's trainers and of our hooks: late groups are begun anew, a batch of fresh
prompts is submitted, batches are sampled and trained, the weights are published.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

from verl.trainer.ppo.v1 import replay_buffer as verls_module
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from benchmarks.async_world import Draw, Engine, Group, World
from verl_multiturn.rollout.groups.staleness import MOST_REROLLS, StalenessBound, to_reroll
from verl_multiturn.verl_bridge.trainer.groups import replay_buffer as our_module
from verl_multiturn.verl_bridge.trainer.groups.replay_buffer import replay_buffer_from

RULE, VERL_DROP, VERL_WAIT, NO_BOUND = "capacity rule", "verl drop", "verl wait", "no bound"
OURS = ("drop", "wait", "mask", "reroll")
POLICIES = (RULE, VERL_DROP, VERL_WAIT, NO_BOUND, *OURS)
"""The capacity rule alone and verl's two strategies, in verl's buffer with its poll every 2 s. Then our buffer, which
wakes up when a group has finished: without a bound, and with each of our strategies."""


@dataclass(frozen=True)
class Prompt:
    """A prompt: its number, and the logarithm of how slow its tools are."""

    number: int
    slowness: float


@dataclass(frozen=True)
class Workload:
    """A kind of prompts to train on. The functions draw a prompt's slowness, and its conversations."""

    slowness: Callable[[random.Random], float]
    conversations: Callable[[Prompt, random.Random], Sequence[Draw]]
    batch_size: int = 16
    training_s: float = 6.0
    """Seconds that a step trains, in all its updates."""
    sync_s: float = 0.0
    """Seconds in which new weights are given to the engine, which pauses."""
    engine: Engine = field(default_factory=Engine)


@dataclass(frozen=True)
class Setting:
    """How a run bounds the age of trained tokens.

    The last two are variants of `reroll` that were tried and not taken: `early` begins late groups anew right after a
    step's last sample; `finished_too` also those that have finished too late.
    """

    policy: str
    eta: int
    warmup: int
    mode: Literal["separate", "colocated"] = "separate"
    updates: int = 1
    """Updates of a step, each with a sample of its own."""
    early: bool = False
    finished_too: bool = False

    def __str__(self) -> str:
        return f"{self.policy}, eta={self.eta}, warmup={self.warmup}"


@dataclass
class Result:
    """The measurements of a run. Its token counts are of trained tokens."""

    steps: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    """Seconds in which the trainer waited for groups."""
    consumed: int = 0
    """Groups that were trained."""
    lost: int = 0
    """Prompts that were begun and never trained."""
    rerolled: int = 0
    tokens: float = 0.0
    masked: float = 0.0
    """Tokens of trained groups that do not count in the loss."""
    over_age: float = 0.0
    max_age: int = 0
    by_prompt: list[tuple[Prompt, float]] = field(default_factory=list)
    """Each trained prompt with its trained tokens."""
    tool_seconds: float = 0.0
    """Tool seconds of the trained conversations, weighted by their trained tokens."""
    ends: list[float] = field(default_factory=list)
    """When each step had ended, its new weights included."""


class Training:
    """A training run whose groups are simulated."""

    def __init__(self, setting: Setting, workload: Workload, seed: int = 0) -> None:
        self.setting, self.workload = setting, workload
        self.world = World(workload.engine)
        self.result = Result()
        self.step = 1
        self.prompts: list[Prompt] = []
        self._rng = random.Random(seed)
        self._drawn: dict[int, list[float]] = {}
        self._bound = StalenessBound(setting.eta, setting.policy) if setting.policy in OURS else None  # type: ignore[arg-type]
        self._buffer = self._make_buffer()

    def run(self, groups: int) -> Result:
        """Train until so many groups are consumed."""
        with _virtual(self.world):
            self._run(groups)
        return self.result

    def duration_ratio(self) -> float:
        """Return the mean tool time of trained tokens, divided by that of all draws of prompts that are over."""
        alive = {self.world.groups[uid].prompt.number for uid in self._tags()}
        drawn = [seconds for number, times in self._drawn.items() if number not in alive for seconds in times]
        return self.result.tool_seconds / self.result.tokens / (sum(drawn) / len(drawn))

    def _make_buffer(self) -> Any:
        policy, eta = self.setting.policy, self.setting.eta
        threshold = eta + 1 if policy in (VERL_DROP, VERL_WAIT) else None
        strategy = "wait" if policy == VERL_WAIT else "drop"
        buffer = ReplayBufferAsync("separate_async", {}, threshold, strategy, {}, refill_fn=self._refill)
        if policy not in (RULE, VERL_DROP, VERL_WAIT):
            buffer = replay_buffer_from(buffer, self._bound, self.workload.batch_size)
            buffer.waiter = self.world
        return buffer

    def _run(self, groups: int) -> None:
        setting, result, size = self.setting, self.result, self.workload.batch_size
        # Our trainer's `_add_async_warmup_batches` does the same.
        warmup = setting.warmup if self._bound is None else min(setting.warmup, self._bound.max_staleness)
        self._refill(warmup * size)
        while result.consumed < groups:
            if not setting.early:
                self._reroll(self.step)
            self._refill(size)
            for update in range(setting.updates):
                began = self.world.now
                batch, metrics = self._buffer.sample(self.step, "train", size // setting.updates)
                result.waited_s += self.world.now - began
                result.lost += metrics.get("training/off_policy/evicted_samples", 0)
                for uid in dict.fromkeys(key.split("_")[0] for key in batch.keys):
                    self._train(self.world.groups.pop(uid))
                self.world.kv_clear("train", batch.keys)
                if setting.mode == "colocated":
                    self.world.pause()
                if setting.early and update + 1 == setting.updates:
                    self._reroll(self.step + 1)
                self.world.sleep(self.workload.training_s / setting.updates)
            self.world.pause()
            self.world.sleep(self.workload.sync_s)
            self.world.publish()
            self.world.resume()
            result.ends.append(self.world.now)
            self.step += 1
        result.steps, result.seconds = self.step - 1, self.world.now

    def _refill(self, count: int) -> None:
        """Submit fresh prompts."""
        for _ in range(count):
            prompt = Prompt(len(self.prompts), self.workload.slowness(self._rng))
            self.prompts.append(prompt)
            self._begin(prompt, 0)

    def _begin(self, prompt: Prompt, rerolls: int) -> None:
        draws = self.workload.conversations(prompt, self._rng)
        self._drawn.setdefault(prompt.number, []).extend(draw.tools_s for draw in draws)
        self.world.submit(f"{prompt.number}r{rerolls}", prompt, draws, self.step, rerolls=rerolls)

    def _tags(self) -> dict[str, dict[str, Any]]:
        """Return the tags of all prompts, by uid."""
        return {key: tag for key, tag in self.world.partitions["train"].items() if tag.get("is_prompt")}

    def _reroll(self, step: int) -> None:
        """Begin groups anew that are too late for a step, as our trainer does."""
        if self._bound is None or self._bound.strategy != "reroll":
            return
        tags = self._tags()
        late = to_reroll(tags, step, self._bound)
        if self.setting.finished_too:
            for uid, tag in tags.items():
                versions = [min(session.tokens, default=0) for session in self.world.groups[uid].sessions]
                over = self._bound.deadline(tag["global_steps"], min(versions)) < step
                late += [uid] if tag["status"] == "finished" and over and tag["rerolls"] < MOST_REROLLS else []
        for uid in late:
            self._begin(self.world.cancel(uid).prompt, tags[uid]["rerolls"] + 1)
        self.result.rerolled += len(late)

    def _train(self, group: Group) -> None:
        """Count a group as trained. With a bound the trainer leaves old tokens out."""
        result, before = self.result, self.result.tokens
        for session in group.sessions:
            for version, tokens in session.tokens.items():
                age = self.step - 1 - version
                if self._bound is not None and version < self._bound.oldest_trained(self.step):
                    result.masked += tokens
                    continue
                result.tokens += tokens
                result.max_age = max(result.max_age, age)
                result.over_age += tokens if age > self.setting.eta else 0.0
                result.tool_seconds += session.draw.tools_s * tokens
        result.consumed += 1
        result.by_prompt.append((group.prompt, result.tokens - before))


@contextmanager
def _virtual(world: World) -> Iterator[None]:
    """Give the buffers the world's clock and its TransferQueue."""
    with (
        mock.patch.object(verls_module, "tq", world),
        mock.patch.object(verls_module, "time", world),
        mock.patch.object(our_module, "time", world),
    ):
        yield

"""An engine, tools, conversations and TransferQueue on virtual time, for a trainer's real replay buffer.

Nothing sleeps: `World.advance` moves the clock from event to event. A conversation alternates turns, which share the
engine, and tool calls:

    turn · call · turn · call · … · turn        a group is over when all its conversations are

Each token has the version of the weights that were in the engine when it was sampled.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Engine:
    """Speed of the simulated engine. Each of its steps gives every running request one token."""

    token_s: float = 0.01
    """Seconds of a step, without the part of its requests."""
    token_s_each: float = 0.0
    """Seconds that each running request adds to a step."""
    most: int | None = None
    """Most requests that it samples at once; the others wait. None: all."""
    prefill_s: float = 0.0
    """Seconds in which it samples nothing, for each request whose tokens are not in its cache."""

    @property
    def interrupts(self) -> bool:
        """Whether a pause matters to a request: it loses its place, or its cache."""
        return self.most is not None or self.prefill_s > 0


@dataclass(frozen=True)
class Draw:
    """One conversation as it would go: the tokens of each turn, and the seconds of the call after it."""

    turns: Sequence[int]
    calls_s: Sequence[float]
    """One fewer than the turns."""

    @property
    def tools_s(self) -> float:
        """Seconds of all its calls."""
        return sum(self.calls_s)


@dataclass(eq=False)
class Session:
    """A conversation that runs."""

    group: Group
    draw: Draw
    number: int
    turn: int = 0
    left: float = 0.0
    """Tokens that its turn still lacked when it came to the engine."""
    cached: int = -1
    """Number of pauses when the engine had its tokens last."""
    generating_since: float | None = None
    """Value of `World.work` when its turn began; None while it does not generate."""
    tokens: dict[int, float] = field(default_factory=dict)
    """Sampled tokens by weight version."""


@dataclass(eq=False)
class Group:
    """The conversations of one attempt at a prompt."""

    uid: str
    prompt: Any
    dispatched: int
    sessions: list[Session] = field(default_factory=list)
    running: int = 0
    cancelled: bool = False


class World:
    """Clock, engine and tools, and the part of TransferQueue's client that a replay buffer calls."""

    def __init__(self, engine: Engine) -> None:
        self.now = 0.0
        self.work = 0.0
        """Tokens that a request would have sampled that had run all the time."""
        self.finished_groups = 0
        self.listings = 0
        self.partitions: dict[str, dict[str, dict[str, Any]]] = {"train": {}}
        self.groups: dict[str, Group] = {}
        self._engine = engine
        self._published = [0.0]
        """Value of `work` when version v arrived in the engine."""
        self._paused = False
        self._pauses = 0
        self._filled_at = 0.0
        """When the engine has prefilled all that it has let in."""
        self._active = 0
        self._waiting: list[Session] = []
        self._turns: list[tuple[float, int, Session]] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    # The clock.

    def time(self) -> float:
        """Return the seconds since the beginning, like `time.time`."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass, like `time.sleep`."""
        self.advance(self.now + seconds)

    def wait(self, timeout_s: float) -> None:
        """Let time pass until a group finishes, or for `timeout_s`, like the waiter of a replay buffer."""
        self.advance(self.now + timeout_s, until_a_group_finishes=True)

    def end_of(self, uids: Collection[str]) -> None:
        """Return None: no part here measures how late the trainer wakes up."""
        return

    def advance(self, until: float, until_a_group_finishes: bool = False) -> None:
        """Run all events up to a time; stop before it when a group has finished, if that is requested."""
        finished = self.finished_groups
        while True:
            rate = self._rate()
            turn_at = timer_at = float("inf")
            if self._turns and rate:
                turn_at = max(self._samples_from(), self._samples_from() + (self._turns[0][0] - self.work) / rate)
            if self._timers:
                timer_at = self._timers[0][0]
            at = min(turn_at, timer_at)
            if at > until:
                self.work += max(until - self._samples_from(), 0.0) * rate
                self.now = until
                return
            self.work += max(at - self._samples_from(), 0.0) * rate
            self.now = at
            if timer_at <= turn_at:
                heapq.heappop(self._timers)[2]()
            else:
                self._end_turn(heapq.heappop(self._turns)[2])
            if until_a_group_finishes and self.finished_groups > finished:
                return

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Call `event` at a time."""
        self._count += 1
        heapq.heappush(self._timers, (time, self._count, event))

    # The engine.

    def publish(self) -> None:
        """Give the engine the next version of the weights."""
        self._published.append(self.work)

    def pause(self) -> None:
        """Stop the engine, as a trainer does that needs its GPUs. Tools go on."""
        if self._engine.interrupts and not self._paused:
            self._put_back()
        self._paused = True

    def resume(self) -> None:
        """Start the engine again."""
        self._paused = False
        self._admit()

    def _put_back(self) -> None:
        """Let all requests come back after a pause.

        SGLang gives up those that wait from the last to the first, then those that it samples. Its cache is flushed.
        """
        running = [session for _, _, session in sorted(self._turns, key=lambda turn: turn[1])]
        left = {session: at - self.work for at, _, session in self._turns}
        self._waiting.reverse()
        for session in running:
            if not session.group.cancelled:
                self._sampled(session)
                session.left = max(left[session], 0.0)
                self._waiting.append(session)
        self._turns.clear()
        self._pauses += 1
        self._filled_at = self.now

    def _admit(self) -> None:
        """Let requests in, first come, first served; the engine prefills them before it samples again."""
        engine = self._engine
        while self._waiting and (engine.most is None or self._active < engine.most):
            session = self._waiting.pop(0)
            if session.group.cancelled:
                continue
            if session.cached != self._pauses:
                self._filled_at = self._samples_from() + engine.prefill_s
            session.cached = self._pauses
            self._active += 1
            self._count += 1
            session.generating_since = self.work
            heapq.heappush(self._turns, (self.work + session.left, self._count, session))

    def _samples_from(self) -> float:
        """Return the time from which the engine samples."""
        return max(self.now, self._filled_at)

    def _rate(self) -> float:
        """Return the tokens per second of one request."""
        if self._paused or not self._active:
            return 0.0
        return 1 / (self._engine.token_s + self._engine.token_s_each * self._active)

    # Groups.

    def submit(self, uid: str, prompt: Any, draws: Iterable[Draw], step: int, **tags: Any) -> Group:
        """Begin the conversations of a prompt, as verl's trainer and agent loops do."""
        group = self.groups[uid] = Group(uid, prompt, step)
        tag = {"is_prompt": True, "status": "running", "global_steps": step, **tags}
        self.partitions["train"][uid] = tag
        group.sessions = [Session(group, draw, i) for i, draw in enumerate(draws)]
        group.running = len(group.sessions)
        for session in group.sessions:
            self._begin_turn(session)
        return group

    def cancel(self, uid: str) -> Group:
        """End a group at once; no row and no tag of it remains, or will be written."""
        group = self.groups[uid]
        group.cancelled = True
        for session in group.sessions:
            if session.generating_since is not None:
                self._sampled(session)
        self._admit()
        self.kv_clear("train", [key for key in self.partitions["train"] if key.split("_")[0] == uid])
        return group

    def _begin_turn(self, session: Session) -> None:
        session.left = session.draw.turns[session.turn]
        self._waiting.append(session)
        if not (self._paused and self._engine.interrupts):
            self._admit()

    def _sampled(self, session: Session) -> None:
        """Enter the tokens of a turn that ends, by version."""
        start, session.generating_since = session.generating_since, None
        assert start is not None
        self._active -= 1
        version = bisect_right(self._published, start) - 1
        while start < self.work:
            last = version + 1 == len(self._published)
            end = self.work if last else min(self.work, self._published[version + 1])
            session.tokens[version] = session.tokens.get(version, 0.0) + end - start
            start, version = end, version + 1

    def _end_turn(self, session: Session) -> None:
        if session.group.cancelled:
            return
        self._sampled(session)
        self._admit()
        session.turn += 1
        if session.turn < len(session.draw.turns):
            self.at(self.now + session.draw.calls_s[session.turn - 1], lambda: self._end_call(session))
            return
        group = session.group
        self.partitions["train"][f"{group.uid}_{session.number}_0"] = {
            "min_global_steps": min(session.tokens),
            "max_global_steps": max(session.tokens),
        }
        group.running -= 1
        if not group.running:
            self.partitions["train"][group.uid]["status"] = "finished"
            self.finished_groups += 1

    def _end_call(self, session: Session) -> None:
        if not session.group.cancelled:
            self._begin_turn(session)

    # TransferQueue.

    def kv_list(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return all tags, by partition and key."""
        self.listings += 1
        return self.partitions

    def kv_clear(self, partition_id: str, keys: Iterable[str]) -> None:
        """Forget keys."""
        for key in keys:
            self.partitions[partition_id].pop(key, None)

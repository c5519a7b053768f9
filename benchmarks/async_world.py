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
    """Seconds of a step, without what its requests add."""
    token_s_each: float = 0.0
    """Seconds that each running request adds to a step."""


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
        self._active = 0
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
        """Return None: nobody asks here how late the trainer wakes up."""
        return

    def advance(self, until: float, until_a_group_finishes: bool = False) -> None:
        """Run all events up to a time; stop before it when a group has finished, if that is asked for."""
        finished = self.finished_groups
        while True:
            rate = self._rate()
            turn_at = timer_at = float("inf")
            if self._turns and rate:
                turn_at = max(self.now, self.now + (self._turns[0][0] - self.work) / rate)
            if self._timers:
                timer_at = self._timers[0][0]
            at = min(turn_at, timer_at)
            if at > until:
                self.work += (until - self.now) * rate
                self.now = until
                return
            self.work += (at - self.now) * rate
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
        self._paused = True

    def resume(self) -> None:
        """Start the engine again."""
        self._paused = False

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
        """End a group at once; no row and no tag of it is left, or will be written."""
        group = self.groups[uid]
        group.cancelled = True
        for session in group.sessions:
            if session.generating_since is not None:
                self._sampled(session)
        self.kv_clear("train", [key for key in self.partitions["train"] if key.split("_")[0] == uid])
        return group

    def _begin_turn(self, session: Session) -> None:
        self._active += 1
        self._count += 1
        session.generating_since = self.work
        heapq.heappush(self._turns, (self.work + session.draw.turns[session.turn], self._count, session))

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

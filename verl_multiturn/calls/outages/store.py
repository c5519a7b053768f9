"""`OutageStore`: the breakers of a run, kept in one place. It uses asyncio and no Ray.

    worker  `report`   sums of calls, twice a second, and at once at an outage  ──▶  the epochs of the breakers
    worker  `changes`  long poll                                                ──▶  epochs and affected conversations
    worker  `enter`    a call, or a new conversation, waits at an open breaker  ──▶  it is closed; be the probe; come in
    trainer `touched`, `outages`

In a run it is part of the actor that keeps the slots (`verl_bridge/run_keeper.py`). A process without Ray has one of
its own.

A conversation is known by its request id, which no other has, also when a group is begun again. Its rows carry it as
`request_id` in their statistics, beside `outages`, the names whose outage it hit.

Invariants:
- only this object's clock counts: a report is as old as its arrival;
- a report of an outage is answered after the decision on it, so a conversation that waits for the answer is known here
  before its row is;
- a waiting call that is cancelled leaves no place behind, and no probe under way; nor does one whose process has died:
  a process polls every `POLL_S`, and after `SILENT_S` of silence its calls wait and probe no more. One that was only
  busy enters again;
- after its death workers send a new one the epochs that they know (`recall`), and the affected conversations.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal
from uuid import uuid4

from verl_multiturn.calls.outages.breaker import Breaker
from verl_multiturn.calls.outages.messages import CallAdmission, OutageState, StoreAnswer, Sums, Waiting

logger = logging.getLogger(__name__)

IDLE_S = 60.0
"""Seconds after which an open breaker lasts no more: no call waits, and none has failed since."""
POLL_S = 4.0
"""Seconds after which a poll is answered, also without a change: the next one shows that its process lives."""
SILENT_S = 10.0
"""Seconds without a word after which a process counts as dead."""
MOST_JUDGED = 100_000
"""How many affected conversations are remembered; the oldest are forgotten."""


@dataclass
class _QueuedCall:
    kind: Waiting
    lease_s: float
    process: str
    admitted: asyncio.Future[CallAdmission]


@dataclass
class _Name:
    breaker: Breaker = field(default_factory=Breaker)
    calls: int = 0
    outages: int = 0
    bugs: int = 0
    error: str = ""
    waiting: dict[str, _QueuedCall] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    probe: tuple[str, str] = ("", "")
    """The last probe, and its process."""
    scouts: int = 1
    """How many new conversations are let in next."""
    asked_since: float = -inf
    asked_at: float = -inf

    def ask(self, now: float) -> None:
        """Note that it is in demand; called before a call begins or ends to wait."""
        if not (self.waiting or self.breaker.is_probed(now)) and now - self.asked_at > IDLE_S:
            self.asked_since = now
        self.asked_at = now

    def lasting_s(self, now: float) -> float:
        """Return the seconds for which it has been open and in demand."""
        is_asked = self.waiting or self.breaker.is_probed(now) or now - self.asked_at <= IDLE_S
        return min(self.breaker.open_s(now), now - self.asked_since) if is_asked else 0.0

    def say(self, name: str, now: float) -> None:
        """Log a change."""
        if self.breaker.is_open:
            logger.error(
                "%s: an outage. Its calls wait until three in a row are answered. The last: %s", name, self.error
            )
        else:
            logger.warning("%s: the outage is over; it was out for %.0f s in all", name, self.breaker.open_total_s(now))


class OutageStore:
    """The breakers of a run; all methods are called on one event loop."""

    def __init__(self) -> None:
        self._id = uuid4().hex
        self._names: dict[str, _Name] = {}
        self._judged: OrderedDict[str, int] = OrderedDict()
        """Affected conversations, with the version at which each was added."""
        self._version = 0
        self._polls: set[asyncio.Future[None]] = set()
        self._heard: dict[str, float] = {}
        """When a word of each process came last."""

    async def report(self, sums: Mapping[str, Sums], process: str = "") -> StoreAnswer:
        """Note calls that have ended in one process, and judge.

        Args:
            sums: The calls, by the name of the service.
            process: Id of the process.

        Returns:
            The epochs of these names, and the conversations that this report affects.
        """
        now, version = asyncio.get_running_loop().time(), self._version
        judged: list[str] = []
        for name, own in sums.items():
            kept = self._of(name)
            kept.calls += own.answered + own.mistakes + len(own.outages) + own.masked
            kept.outages += len(own.outages) + own.masked
            kept.bugs += own.bugs
            kept.error = own.error or kept.error
            if own.outages or own.probe:
                kept.ask(now)
            if own.outages or (own.probe and own.probe_good is False):
                kept.scouts = 1
            epoch = kept.breaker.epoch
            judged += kept.breaker.report(
                now, own.answered, own.outages, own.hung, process, own.beside, mistakes=own.mistakes
            )
            if own.probe:
                kept.breaker.end_probe(now, own.probe, own.probe_good, mistaken=own.probe_good is None)
            if own.next_try_s is not None:
                kept.breaker.put_off(now, own.next_try_s)
            if kept.breaker.epoch != epoch:
                self._note(True)
                kept.say(name, now)
            self._admit(kept)
        self._judge(judged)
        epochs = {name: self._of(name).breaker.epoch for name in sums}
        return StoreAnswer(self._id, version, epochs, tuple(judged))

    async def changes(self, keeper: str, seen: int, process: str = "") -> StoreAnswer:
        """Wait until there is a change, at most for `POLL_S`, and return the changes, the oldest first.

        Args:
            keeper: Id of the keeper in the last answer; "" for none.
            seen: Version of the last answer.
            process: Id of the process.
        """
        self._hear(process)
        if keeper != self._id:
            seen = -1
        if self._version <= seen:
            poll: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._polls.add(poll)
            try:
                await asyncio.wait({poll}, timeout=POLL_S)
            finally:
                self._polls.discard(poll)
        judged = []
        for conversation, version in reversed(self._judged.items()):
            if version <= seen:
                break
            judged.append(conversation)
        epochs = {name: kept.breaker.epoch for name, kept in self._names.items()}
        return StoreAnswer(self._id, self._version, epochs, tuple(reversed(judged)))

    async def enter(self, name: str, waiter: str, kind: Waiting, lease_s: float, process: str = "") -> CallAdmission:
        """Wait at a breaker until it is closed, or the caller is let through.

        A call that has not failed yet is the next probe. Without one, new conversations are let in: 1, 2, 4, …, and 1
        again after each failure. And a call that has failed as a probe is one again.

        Args:
            name: Name of the service to call.
            waiter: The caller's unique id; a probe is reported under it.
            kind: Who waits.
            lease_s: Seconds after which a probe counts as failed.
            process: Id of the process, which polls `changes`; "": the keeper's own.
        """
        self._hear(process)
        kept = self._of(name)
        if not kept.breaker.is_open:
            return CallAdmission("closed", kept.breaker.epoch)
        loop = asyncio.get_running_loop()
        admitted: asyncio.Future[CallAdmission] = loop.create_future()
        kept.ask(loop.time())
        kept.waiting[waiter] = _QueuedCall(kind, lease_s, process, admitted)
        self._admit(kept)
        try:
            return await admitted
        except asyncio.CancelledError:
            await self.leave(name, waiter)
            raise

    async def leave(self, name: str, waiter: str) -> None:
        """Wait no longer, and be no probe any more: the caller was cancelled."""
        kept, now = self._of(name), asyncio.get_running_loop().time()
        kept.ask(now)
        left = kept.waiting.pop(waiter, None)
        if left is not None and not left.admitted.done():
            left.admitted.set_result(CallAdmission("closed", kept.breaker.epoch))  # no call waits for it any more
        kept.breaker.end_probe(now, waiter, None)
        self._admit(kept)

    async def recall(self, epochs: Mapping[str, tuple[int, float]], judged: Collection[str]) -> None:
        """Take over a process's state of a keeper that has died.

        Args:
            epochs: The epochs of the breakers, and for how many seconds each has been open, by name.
            judged: Conversations that were affected.
        """
        now = asyncio.get_running_loop().time()
        self._judge([conversation for conversation in judged if conversation not in self._judged])
        for name, (epoch, open_s) in epochs.items():
            kept = self._of(name)
            self._note(kept.breaker.recall(now, epoch, open_s))
            if kept.breaker.is_open:
                kept.asked_since, kept.asked_at = kept.breaker.opened_at, now
            self._admit(kept)

    async def touched(self, ids: Collection[str]) -> set[str]:
        """Return which of these conversations hit a confirmed outage.

        A conversation also counts whose outage was among the last calls of a name, of two conversations or more, after
        which none was answered: there may be no call any more until the step ends.

        Args:
            ids: Request ids.
        """
        late = {conversation for kept in self._names.values() for conversation in kept.breaker.unjudged()}
        return {conversation for conversation in ids if conversation in self._judged or conversation in late}

    async def outages(self) -> dict[str, OutageState]:
        """Return the state of each name of which a call was reported."""
        now = asyncio.get_running_loop().time()
        return {
            name: OutageState(
                kept.breaker.is_open,
                kept.breaker.open_s(now),
                kept.lasting_s(now),
                kept.breaker.open_total_s(now),
                kept.breaker.trips,
                kept.calls,
                kept.outages,
                kept.bugs,
                len(kept.waiting),
                kept.error,
            )
            for name, kept in self._names.items()
        }

    def _hear(self, process: str) -> None:
        self._heard[process] = asyncio.get_running_loop().time()

    def _is_silent(self, process: str, now: float) -> bool:
        return bool(process) and now - self._heard.get(process, -inf) > SILENT_S

    def _of(self, name: str) -> _Name:
        return self._names.setdefault(name, _Name())

    def _judge(self, conversations: Collection[str]) -> None:
        self._note(bool(conversations))
        for conversation in conversations:
            self._judged[conversation] = self._version
            self._judged.move_to_end(conversation)
        while len(self._judged) > MOST_JUDGED:
            self._judged.popitem(last=False)

    def _note(self, is_new: bool) -> None:
        if is_new:
            self._version += 1
            for poll in self._polls:
                if not poll.done():
                    poll.set_result(None)

    def _admit(self, kept: _Name) -> None:
        """Let through who may go now, and look again when the next one may, or a process may have died."""
        if kept.timer is not None:
            kept.timer.cancel()
            kept.timer = None
        loop, breaker = asyncio.get_running_loop(), kept.breaker
        now = loop.time()
        for waiter in [key for key, each in kept.waiting.items() if self._is_silent(each.process, now)]:
            self._let(kept, waiter, "again")
        probe, process = kept.probe
        if self._is_silent(process, now):
            breaker.end_probe(now, probe, None)
        while kept.waiting and (not breaker.is_open or breaker.next_probe_s(now) <= 0):
            if breaker.is_open:
                self._take_turn(kept, now)
            else:
                self._let(kept, next(iter(kept.waiting)), "closed")
        if kept.waiting or breaker.is_probed(now):
            kept.timer = loop.call_later(min(breaker.next_probe_s(now), POLL_S), self._admit, kept)

    def _take_turn(self, kept: _Name, now: float) -> None:
        """Let the next probe begin, and new conversations come in."""
        first: dict[Waiting, str] = {}
        for waiter, each in kept.waiting.items():
            first.setdefault(each.kind, waiter)
        if "call" not in first and "conversation" in first:
            scouts = [waiter for waiter, each in kept.waiting.items() if each.kind == "conversation"][: kept.scouts]
            kept.scouts *= 2
            kept.breaker.let_in(now)
            for waiter in scouts:
                self._let(kept, waiter, "scout")
        if (call := first.get("call") or first.get("failed")) is not None:
            kept.probe = call, kept.waiting[call].process
            kept.breaker.begin_probe(now, call, kept.waiting[call].lease_s, "call" not in first)
            self._let(kept, call, "probe")

    def _let(self, kept: _Name, waiter: str, why: Literal["closed", "probe", "scout", "again"]) -> None:
        kept.ask(asyncio.get_running_loop().time())
        admitted = kept.waiting.pop(waiter).admitted
        if not admitted.done():
            admitted.set_result(CallAdmission(why, kept.breaker.epoch))

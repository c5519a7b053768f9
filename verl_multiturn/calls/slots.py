"""`Slots` of an author's object, and `Gates`: the state of all such objects that one worker's conversations share.

A slot is the right to run one call: of a tool's `execute`, or of an interaction's `start` or `reply`.

Invariants:
- at most `concurrency` calls run at the same time, with those that were given up and have not ended;
- a slot that was taken is given back exactly once, whatever happens to the call;
- waiting for a slot is not run time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from verl_multiturn.calls.invocation import BusyError
from verl_multiturn.calls.limits import outage_rules
from verl_multiturn.calls.outages.authorship import NOTHING, WrittenTexts
from verl_multiturn.calls.outages.guarded_call import GuardedCall
from verl_multiturn.calls.outages.process import Outages, Watch
from verl_multiturn.calls.owner import Owner
from verl_multiturn.calls.tasks import Alarms, done_within, keep
from verl_multiturn.calls.timeline import during


class SharedSlots(Protocol):
    """Slots that all workers of a run share."""

    async def acquire(self, tool: str, limit: int, wait_s: float, lease_s: float) -> str | None:
        """Wait for one of a tool's slots.

        Args:
            tool: Name of the tool.
            limit: Number of the tool's slots in the whole run.
            wait_s: Seconds to wait for a free slot.
            lease_s: Seconds after which the slot counts as free again, since its worker must have died.

        Returns:
            A lease, to be handed to `release`; None when no slot was free within `wait_s`.
        """

    async def release(self, tool: str, lease: str) -> None:
        """Give back a slot of a tool, by its lease."""


class Slots:
    """Slots of an author's object in one worker.

    Args:
        owner: The object.
        timeout_s: Seconds for a call of a method, where the object's limits have none.
        shared: Slots of all workers, for `concurrency_total`; None: that limit holds in this process only.
        outages: The process's state of outages; None: they are not tracked.

    Attributes:
        alarms: The time limit of its calls.
    """

    def __init__(
        self, owner: Owner, timeout_s: float, shared: SharedSlots | None = None, outages: Outages | None = None
    ) -> None:
        limits = owner.limits
        self.owner = owner
        self.name = owner.name
        self.timeout_s = limits.timeout_s or timeout_s
        self.alarms = Alarms(self.timeout_s)
        self._queue_s = limits.queue_timeout_s
        self._total = limits.concurrency_total
        here = limits.concurrency
        self._shared = shared if self._total is not None else None
        # A tool and an interaction may have one name, and share no slots.
        self._shared_name = self.name if owner.kind == "tool" else f"{owner.kind} {self.name}"
        self._free = here if self._total is None or shared is not None else min(here, self._total)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._queue_alarms = Alarms(self._queue_s)
        # On a busy event loop a call may last for twice its limit (`Alarms`).
        self._lease_s = 2 * self.timeout_s + 60
        self._watch: Watch | None = None
        self._begin_watch: Watch | None = None
        if outages is not None:
            rules = outage_rules(owner.made, limits, f"{owner.kind} {owner.name!r}")
            name, lease_s = f"{owner.kind} {owner.name}", self._lease_s + self._queue_s
            self._watch = outages.of(name, rules, lease_s)
            # The begin of a conversation may need no service where a call does, or the other way round. So neither is
            # evidence about the other.
            if owner.begin not in owner.inherited:
                self._begin_watch = outages.of(f"{name} {owner.begin}", rules, lease_s)

    def watched(self, conversation: str, method: str, written: WrittenTexts = NOTHING) -> GuardedCall:
        """Return the guard of one call of a conversation.

        Args:
            conversation: Id of the conversation.
            method: Name of the method that is called.
            written: Texts for the call by others than the service and the author.
        """
        watch = self._begin_watch if method == self.owner.begin else self._watch
        return GuardedCall(watch, conversation, self.owner.roles[method], written)

    def is_judged(self, conversation: str) -> bool:
        """Return whether a conversation hit a confirmed outage."""
        return self._watch is not None and self._watch.outages.is_judged(conversation)

    @property
    def judges_lateness(self) -> bool:
        """Return whether a call that comes too late is an outage."""
        return self._watch is not None and self._watch.rules.timeouts == "outage"

    async def admit(self) -> None:
        """Let a new conversation wait while there is an outage.

        Raises:
            OutageEndError: It has waited for too long.
        """
        if self._watch is not None:
            await self._watch.admit()

    def try_enter(self) -> bool:
        """Take a slot if that needs no waiting, and return whether it was taken; such a slot has no lease."""
        if self._shared is not None or self._free == 0:
            return False
        self._free -= 1
        return True

    async def enter(self) -> str | None:
        """Wait for a slot and take it.

        Returns:
            The lease, to be handed to `leave`; None where the slot is of this process only.

        Raises:
            BusyError: No slot was free within `queue_timeout_s`.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._queue_s
        busy = BusyError(
            f"the {self.owner.kind} is busy, no call could start within {self._queue_s:g} s; call it again"
        )
        if not await self._wait():
            raise busy
        if self._shared is None:
            return None
        limit, lease = self._total or 1, None
        try:
            lease = await self._shared.acquire(self._shared_name, limit, max(0.0, until - loop.time()), self._lease_s)
            if lease is None:
                raise busy
            return lease
        finally:
            if lease is None:
                self._hand_on()

    async def _wait(self) -> bool:
        """Wait for a slot of this process, first come, first served; return whether one was free in time."""
        if self._free > 0:
            self._free -= 1
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await done_within(turn, self._queue_alarms)
        except asyncio.CancelledError:
            if turn.done():  # the slot came together with the cancellation
                self._hand_on()
            raise
        finally:
            turn.cancel()  # does nothing if the slot came

    def _hand_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def leave(self, lease: str | None) -> None:
        """Give back a slot.

        Args:
            lease: The value that `enter` returned; None after `try_enter`.
        """
        if self._waiting:
            self._hand_on()
        else:
            self._free += 1
        if lease is not None and self._shared is not None:
            # No caller waits for this: if the actor is dead, its leases have ended with it.
            keep(asyncio.ensure_future(self._shared.release(self._shared_name, lease)))


class Slot:
    """The slot of one call, as a context manager in which `take` takes it.

    It is given back once all that runs of the call has ended, which may be after leaving.

    Args:
        slots: The slots, one of which is taken.

    Attributes:
        asked: Time of the event loop's clock at which the call requested a slot.
        started: Time at which it had one, or was refused.
        ended: Time at which the call released it.
        left: Tasks and threads of a call that was given up, as far as they still run.
    """

    __slots__ = ("_is_taken", "_lease", "_slots", "asked", "ended", "left", "started")

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._lease: str | None = None
        self._is_taken = False
        self.asked = self.started = self.ended = 0.0
        self.left: Sequence[asyncio.Future[Any]] = ()

    def __enter__(self) -> Slot:
        return self

    async def take(self) -> None:
        """Take a slot, which is given back on leaving.

        Raises:
            BusyError: No slot was free in time.
        """
        self.asked = self.started = asyncio.get_running_loop().time()
        if not self._slots.try_enter():
            try:
                with during("wait", self._slots.name):
                    self._lease = await self._slots.enter()
            finally:
                self.started = asyncio.get_running_loop().time()
        self._is_taken = True

    def give_back(self) -> None:
        """Give the slot back before the call begins: it waits once more."""
        self._slots.leave(self._lease)
        self._is_taken, self._lease = False, None

    def __exit__(self, *exc_info: object) -> None:
        self.ended = asyncio.get_running_loop().time()
        if self.left:
            ended = asyncio.gather(*self.left, return_exceptions=True)
            ended.add_done_callback(lambda _: self._slots.leave(self._lease))
        elif self._is_taken:
            self._slots.leave(self._lease)


Shared = TypeVar("Shared", bound=Slots)


class Gates(Generic[Shared]):
    """Shared states of a worker's tools, or of its interactions, each made when its object is first seen.

    Args:
        make: Makes the state of an object, from the object and the two other arguments.
        timeout_s: As in `Slots`.
        shared: As in `Slots`.
        outages: As in `Slots`.
    """

    def __init__(
        self,
        make: Callable[[Any, float, SharedSlots | None, Outages | None], Shared],
        timeout_s: float,
        shared: SharedSlots | None = None,
        outages: Outages | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._shared = shared
        self._outages = outages
        self._make = make
        self._gates: dict[str, Shared] = {}

    def of(self, made: Any) -> Shared:
        """Return the state of an object. Another object with the same name gets a new one, which replaces the old."""
        gate = self._gates.get(made.name)
        if gate is None or gate.owner.made is not made:
            gate = self._gates[made.name] = self._make(made, self._timeout_s, self._shared, self._outages)
        return gate

"""`Slots` of an author's object, and `Gates`: what the conversations of one worker share of all such objects.

A slot is the right to run one call: of a tool's `execute`, or of an interaction's `start` or `reply`.

Invariants:
- at most `concurrency` calls run at the same time, with those that were given up and have not ended;
- a slot that was taken is given back exactly once, whatever happens to the call;
- waiting for a slot is not run time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from verl_multiturn.calls.limits import CallLimits
from verl_multiturn.tasks import Alarms, done_within, keep


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


class BusyError(Exception):
    """No slot was free within `queue_timeout_s`; the text is for the model."""


class Slots:
    """Slots of a tool or an interaction in one worker.

    Args:
        owner: The tool or interaction; it has a `name`.
        kind: `tool` or `interaction`, for messages.
        limits: Its limits.
        timeout_s: Seconds for a call of a method, where the limits do not say.
        shared: Slots of all workers, for `concurrency_total`; None: that limit holds in this process only.
    """

    def __init__(
        self, owner: Any, kind: str, limits: CallLimits, timeout_s: float, shared: SharedSlots | None = None
    ) -> None:
        self.owner = owner
        self.name: str = owner.name
        self.kind = kind
        self.timeout_s = limits.timeout_s or timeout_s
        self.alarms = Alarms(self.timeout_s)
        self._queue_s = limits.queue_timeout_s
        self._total = limits.concurrency_total
        here = limits.concurrency
        self._shared = shared if self._total is not None else None
        # A tool and an interaction may have one name, and share no slots.
        self._shared_name = self.name if kind == "tool" else f"{kind} {self.name}"
        self._free = here if self._total is None or shared is not None else min(here, self._total)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._queue_alarms = Alarms(self._queue_s)

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
        busy = BusyError(f"the {self.kind} is busy, no call could start within {self._queue_s:g} s; call it again")
        if not await self._wait():
            raise busy
        if self._shared is None:
            return None
        limit, lease = self._total or 1, None
        try:
            # On a busy event loop a call may last for twice its limit (`Alarms`).
            lease = await self._shared.acquire(
                self._shared_name, limit, max(0.0, until - loop.time()), 2 * self.timeout_s + 60
            )
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
            lease: What `enter` returned; None after `try_enter`.
        """
        if self._waiting:
            self._hand_on()
        else:
            self._free += 1
        if lease is not None and self._shared is not None:
            # Nobody waits for this: if the actor is dead, its leases have ended with it.
            keep(asyncio.ensure_future(self._shared.release(self._shared_name, lease)))


Shared = TypeVar("Shared", bound=Slots)


class Gates(Generic[Shared]):
    """Shared states of a worker's tools, or of its interactions, each made when its owner is first seen.

    Args:
        make: Makes the state of an owner, from the owner and the two other arguments.
        timeout_s: As in `Slots`.
        shared: As in `Slots`.
    """

    def __init__(
        self,
        make: Callable[[Any, float, SharedSlots | None], Shared],
        timeout_s: float,
        shared: SharedSlots | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._shared = shared
        self._make = make
        self._gates: dict[str, Shared] = {}

    def of(self, owner: Any) -> Shared:
        """Return the state of an owner. Another object with the same name gets a new one, which replaces the old."""
        gate = self._gates.get(owner.name)
        if gate is None or gate.owner is not owner:
            gate = self._gates[owner.name] = self._make(owner, self._timeout_s, self._shared)
        return gate

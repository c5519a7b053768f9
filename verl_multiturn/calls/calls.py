"""`Calls`: the calls of one author's object in one conversation, from its beginning to its end.

    begin → call → call → … → end       once each but for the calls; the end also after a failure or a cancellation

Invariants:
- the end is called exactly once for every conversation that began, and nothing is called after it;
- each call gets a copy of the row's kwargs, so that changes by the author's code are seen nowhere else;
- a call that was given up keeps its slot until it has really ended. The end waits for it, but not without a limit.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from verl_multiturn.calls.invocation import Invocation, TimedOutError
from verl_multiturn.calls.slots import Slot, Slots
from verl_multiturn.calls.tasks import Alarms, finish, keep
from verl_multiturn.calls.timeline import during
from verl_multiturn.describe import describe, place_of

logger = logging.getLogger(__name__)

# Seconds beyond a request's budget: for calls that were given up to end, and for the method that ends.
_ABANDONED_S = 5.0
_END_S = 5.0


class Calls:
    """Calls of one author's object in one conversation.

    Args:
        slots: The slots that all conversations share.
        instance_id: Id of the conversation, the first argument of every method.
        kwargs: The row's kwargs, by method.
        uncopied: More kwargs, by method: objects that the conversation shares with the author's code.
        wait: Waits for the end of a call, at most until its alarms.

    Attributes:
        instance_id: As given. A method that begins may choose another one for the later calls.
        kwargs: As given.
    """

    def __init__(
        self,
        slots: Slots,
        instance_id: str,
        kwargs: Mapping[str, Mapping[str, Any]],
        uncopied: Mapping[str, Mapping[str, Any]] | None = None,
        wait: Callable[[Invocation, Alarms], Awaitable[None]] = Invocation.ended,
    ) -> None:
        self.instance_id = instance_id
        self.kwargs = kwargs
        self._slots = slots
        self._owner = slots.owner
        self._uncopied = uncopied or {}
        self._wait = wait
        self._began = False
        self._ended = False
        self._given_up: list[asyncio.Future[Any]] = []

    def begin(self) -> None:
        """Note that the conversation begins, before its first call: whatever comes then, it is ended."""
        self._began = True

    async def call(self, method: str, *arguments: Any, slot: Slot | None = None, alarms: Alarms | None = None) -> Any:
        """Call a method, and return its result; None where the object has none of its own.

        Args:
            method: Name of the method.
            arguments: Its arguments after the conversation's id.
            slot: The slot of the call; None where it needs none.
            alarms: The time limit; None for that of all calls.

        Raises:
            TimedOutError: The method did not return in time. It is cancelled, and abandoned.
            MultiTurnError: The conversation has ended (the owner's `contract_error`).
            Exception: The method raised it.
        """
        owner = self._owner
        if self._ended and method != owner.end:
            raise owner.contract_error(f"{owner.kind} {owner.name!r}: {method} after {owner.end}")
        if method in owner.inherited:
            return None
        row = self.kwargs.get(method)
        kwargs = copy.deepcopy(row) if row else {}
        if method in self._uncopied:
            kwargs = {**kwargs, **self._uncopied[method]}
        invocation = owner.invoke(method, (self.instance_id, *arguments), kwargs)
        try:
            with during(owner.spans[method], owner.name):
                await self._wait(invocation, alarms or self._slots.alarms)
            return invocation.result()
        except (TimedOutError, asyncio.CancelledError):
            left = invocation.stop()
            self._given_up += left
            for remaining in left:
                keep(remaining)
            if slot is not None:
                slot.left = left
            raise

    async def _end(self) -> None:
        owner = self._owner
        if left := [remaining for remaining in self._given_up if not remaining.done()]:
            await asyncio.wait(left, timeout=_ABANDONED_S)
        try:
            await self.call(owner.end, alarms=Alarms(_END_S, is_fair=False))
        except Exception as error:  # the author's own code: log it, nothing depends on it any more
            said = f"{describe(error)}{place_of(error)}"
            logger.warning("%s %r: %s raised %s", owner.kind, owner.name, owner.end, said)

    @staticmethod
    async def end(conversation: Iterable[Calls]) -> None:
        """End all objects of a conversation that began, at the same time; also a cancelled conversation waits for it.

        Args:
            conversation: The calls of each object. Nothing is called for one that has ended before.
        """
        ending = []
        for calls in conversation:
            owner, is_due = calls._owner, calls._began and not calls._ended
            calls._ended = True
            if is_due and (owner.end not in owner.inherited or calls._given_up):
                ending.append(calls._end())
        if ending:
            await finish(asyncio.gather(*ending))

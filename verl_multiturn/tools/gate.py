"""`Gate`: what the conversations of one worker share about a tool: its slots, its cache, its schema.

Invariants:
- at most `concurrency` calls of `execute` are at work at once, those that were given up included;
- a slot that was taken is given back exactly once, whatever happens to the call;
- waiting for a slot is not run time.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any, Protocol

from verl_multiturn.tasks import Alarms, done_within, keep
from verl_multiturn.tools.base import BaseTool, is_foreign
from verl_multiturn.tools.invoke import TASK_PREFIX, CallAnswer, is_coroutine_method
from verl_multiturn.tools.limits import limits_of
from verl_multiturn.tools.registry import METHODS, schema_of


class SharedSlots(Protocol):
    """Slots over all workers of a run."""

    async def acquire(self, tool: str, limit: int, wait_s: float, lease_s: float) -> str | None:
        """A lease of one of `limit` slots; None when there was none within `wait_s`.

        Args:
            lease_s: after which the slot counts as free, since its worker must have died.
        """

    async def release(self, tool: str, lease: str) -> None:
        """Give a lease back."""


class BusyError(Exception):
    """No slot within the queue-time budget."""


class Gate:
    """One tool as its worker's conversations see it.

    Args:
        timeout_s: for each method, where the tool's own limits name none.
        shared: keeps `concurrency_total`; None: that limit holds in this process only.
    """

    def __init__(self, tool: Any, timeout_s: float, shared: SharedSlots | None = None) -> None:
        self.tool = tool
        self.name: str = tool.name
        self.limits = limits_of(tool)
        self.timeout_s = self.limits.timeout_s or timeout_s
        self.alarms = Alarms(self.timeout_s)
        self.schema = schema_of(tool)
        self.ends_conversation = bool(getattr(tool, "ends_conversation", False))
        self.is_foreign = is_foreign(tool)
        self.inherited = {name for name in METHODS if getattr(type(tool), name, None) is getattr(BaseTool, name)}
        """Methods that the author did not write."""
        self.is_coroutine = {method: is_coroutine_method(getattr(tool, method)) for method in METHODS}
        self.task_names = {method: f"{TASK_PREFIX}{self.name!r}: {method}" for method in METHODS}
        total = self.limits.concurrency_total
        here = self.limits.concurrency
        self._shared = shared if total is not None else None
        self._free = here if total is None or shared is not None else min(here, total)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._queue_alarms = Alarms(self.limits.queue_timeout_s)
        self._answers: OrderedDict[str, CallAnswer] = OrderedDict()

    def try_enter(self) -> bool:
        """Take a slot, where that needs no waiting; it has no lease."""
        if self._shared is not None or self._free == 0:
            return False
        self._free -= 1
        return True

    async def enter(self) -> str | None:
        """Wait for a slot; its lease, to be handed to `leave`.

        Raises:
            BusyError: none was free within the queue-time budget.
        """
        loop = asyncio.get_running_loop()
        budget = self.limits.queue_timeout_s
        until = loop.time() + budget
        busy = BusyError(f"the tool is busy, no call could start within {budget:g} s; call it again")
        if not await self._wait():
            raise busy
        if self._shared is None:
            return None
        limit, lease = self.limits.concurrency_total or 1, None
        try:
            # On a busy loop a call lasts for twice its limit (`Alarms`).
            lease = await self._shared.acquire(self.name, limit, max(0.0, until - loop.time()), 2 * self.timeout_s + 60)
            if lease is None:
                raise busy
            return lease
        finally:
            if lease is None:
                self._hand_on()

    async def _wait(self) -> bool:
        """Take a slot of this process, first come, first served; whether there was one in time."""
        if self._free > 0:
            self._free -= 1
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await done_within(turn, self._queue_alarms)
        except asyncio.CancelledError:
            if turn.done():  # it came together with the cancellation
                self._hand_on()
            raise
        finally:
            turn.cancel()  # nothing, where it came

    def _hand_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def leave(self, lease: str | None) -> None:
        """Give a slot back."""
        if self._waiting:
            self._hand_on()
        else:
            self._free += 1
        if lease is not None and self._shared is not None:
            # Of a dead actor: its leases end by themselves.
            keep(asyncio.ensure_future(self._shared.release(self.name, lease)))

    def cache_key(self, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]) -> str | None:
        """Where the answer to a call is kept; None: it cannot be."""
        try:
            return json.dumps([arguments, kwargs], sort_keys=True)
        except (TypeError, ValueError):
            return None

    def cached(self, key: str | None) -> CallAnswer | None:
        """An answer given before."""
        if key is None or key not in self._answers:
            return None
        self._answers.move_to_end(key)
        return self._answers[key]

    def remember(self, key: str | None, answer: CallAnswer) -> None:
        """Keep an answer."""
        if key is None:
            return
        self._answers[key] = answer
        if len(self._answers) > self.limits.cache:
            self._answers.popitem(last=False)


class Gates:
    """The gates of one worker, made when a tool is first seen."""

    def __init__(self, timeout_s: float, shared: SharedSlots | None = None) -> None:
        self._timeout_s = timeout_s
        self._shared = shared
        self._gates: dict[str, Gate] = {}

    def of(self, tool: Any) -> Gate:
        """The gate of a tool; another object of the same name gets another gate."""
        gate = self._gates.get(tool.name)
        if gate is None or gate.tool is not tool:
            gate = self._gates[tool.name] = Gate(tool, self._timeout_s, self._shared)
        return gate

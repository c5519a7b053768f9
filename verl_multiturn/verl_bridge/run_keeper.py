"""`RunKeeper`: one Ray actor with the state of calls that all workers of a run share.

It keeps the slots of a tool's `concurrency_total` (`calls/shared_slots.py`), and the breakers of outages
(`calls/outages/store.py`). The first process that needs the actor creates it; it ends with the run. When it dies, the
next call makes a new one: its slots are free then, and workers report their knowledge of outages to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError

from verl_multiturn.calls.outages.messages import CallAdmission, StoreAnswer, StoreLostError, Sums, Waiting
from verl_multiturn.calls.outages.store import OutageStore
from verl_multiturn.calls.shared_slots import SlotKeeper

logger = logging.getLogger(__name__)

KEEPER = "verl_multiturn_slots"
"""Name of the actor."""


class RunKeeper(SlotKeeper, OutageStore):
    """The code of the actor: the slots and the breakers of a run."""

    def __init__(self) -> None:
        SlotKeeper.__init__(self)
        OutageStore.__init__(self)


def run_keeper() -> Any:
    """Return the actor of the run, which is created where there is none.

    Raises:
        RayError: It cannot be reached.
    """
    remote = ray.remote(num_cpus=0, max_concurrency=100_000)(RunKeeper)
    return remote.options(name=KEEPER, get_if_exists=True).remote()


class RayKeeper:
    """`RemoteOutageStore` of outages for a worker, kept by the actor of the run.

    Raises:
        StoreLostError: The actor has died, or cannot be reached; each method raises it, too.
    """

    def __init__(self) -> None:
        try:
            self._actor = run_keeper()
        except (RayError, ValueError) as error:  # a ValueError: the name's old owner is just ending
            raise StoreLostError(str(error)) from error

    async def report(self, sums: Mapping[str, Sums], process: str = "") -> StoreAnswer:
        """Report calls that have ended."""
        told: StoreAnswer = await self._ask(self._actor.report, dict(sums), process)
        return told

    async def changes(self, keeper: str, seen: int, process: str = "") -> StoreAnswer:
        """Wait for a change."""
        told: StoreAnswer = await self._ask(self._actor.changes, keeper, seen, process)
        return told

    async def enter(self, name: str, waiter: str, kind: Waiting, lease_s: float, process: str = "") -> CallAdmission:
        """Wait at a breaker."""
        admitted: CallAdmission = await self._ask(self._actor.enter, name, waiter, kind, lease_s, process)
        return admitted

    async def leave(self, name: str, waiter: str) -> None:
        """Wait no longer."""
        await self._ask(self._actor.leave, name, waiter)

    async def recall(self, epochs: Mapping[str, tuple[int, float]], judged: Collection[str]) -> None:
        """Send a new actor this process's knowledge of outages."""
        await self._ask(self._actor.recall, dict(epochs), list(judged))

    async def _ask(self, method: Any, *args: Any) -> Any:
        try:
            return await method.remote(*args)
        except RayError as error:
            raise StoreLostError(str(error)) from error


class RaySlots:
    """`SharedSlots` for a worker, kept by the actor of the run."""

    def __init__(self) -> None:
        self._actor: Any = None

    async def acquire(self, tool: str, limit: int, wait_s: float, lease_s: float) -> str | None:
        """Take a slot and return its lease; None when none is free within `wait_s` seconds, or the actor fails."""
        lease = uuid4().hex
        try:
            keeper = self._keeper()
            asked = keeper.acquire.remote(tool, limit, lease, wait_s, lease_s)
            try:
                return lease if await asked else None
            except asyncio.CancelledError:
                keeper.release.remote(tool, lease)
                raise
        except RayError as error:
            # The limit cannot be kept without the actor, so the model's answer is that the tool is busy.
            logger.error(
                "tool %r: a call is answered as busy, since the slots of all workers cannot be asked for: %s",
                tool,
                error,
            )
            self._actor = None
            return None

    async def release(self, tool: str, lease: str) -> None:
        """Give a lease back."""
        await self._keeper().release.remote(tool, lease)

    def _keeper(self) -> Any:
        if self._actor is None:
            self._actor = run_keeper()
        return self._actor

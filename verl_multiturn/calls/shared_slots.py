"""`SlotKeeper`: the slots of tools that all workers of a run share (`concurrency_total`).

Invariants:
- at most `limit` leases of a tool are out that have not expired;
- when a worker dies, its slots become free once its leases expire;
- a caller that is cancelled while it waits leaves neither a lease nor a place in the queue behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict


class SlotKeeper:
    """The slots of tools over all workers of a run; the actor of the run has it (`verl_bridge/run_keeper.py`)."""

    def __init__(self) -> None:
        self._leases: defaultdict[str, dict[str, float]] = defaultdict(dict)
        """Leases of each tool, with the time (`time.monotonic`) when each expires."""
        self._changed: defaultdict[str, asyncio.Condition] = defaultdict(asyncio.Condition)
        self._waiting: set[str] = set()

    async def acquire(self, tool: str, limit: int, lease: str, wait_s: float, lease_s: float) -> bool:
        """Wait for a slot of a tool and take it.

        Args:
            tool: Name of the tool.
            limit: Most slots of the tool that may be taken at once.
            lease: The caller's unique id for this slot.
            wait_s: Seconds to wait for a free slot.
            lease_s: Seconds after which the slot counts as free again, since its worker must have died.

        Returns:
            True when the slot was taken; False when none became free in time, or `release` was called meanwhile.
        """
        leases, changed = self._leases[tool], self._changed[tool]
        until = time.monotonic() + wait_s
        self._waiting.add(lease)
        try:
            async with changed:
                while lease in self._waiting:
                    now = time.monotonic()
                    for expired in [key for key, end in leases.items() if end <= now]:
                        del leases[expired]
                    if len(leases) < limit:
                        leases[lease] = now + lease_s
                        return True
                    if now >= until:
                        return False
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(min(until, *leases.values()) - now):
                            await changed.wait()
                return False
        finally:
            self._waiting.discard(lease)

    async def release(self, tool: str, lease: str) -> None:
        """Give the slot of a lease back, or take the lease out of the queue."""
        async with self._changed[tool]:
            self._leases[tool].pop(lease, None)
            self._waiting.discard(lease)
            self._changed[tool].notify_all()

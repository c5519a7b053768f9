"""Watch how long the event loop is blocked, for benchmarks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_TICK_S = 0.002


class LoopWatch:
    """A watch over the event loop.

    Attributes:
        late_ms: The most that the loop came late to a task that looks every 2 ms.
        held_ms: The same without the time for which the machine let this thread wait for a core. It does not depend on
            the machine's other work.
        step_ms: The most processor time that a single step of a task or callback took.
    """

    def __init__(self) -> None:
        self.late_ms = 0.0
        self.held_ms = 0.0
        self.step_ms = 0.0
        self._run = asyncio.Handle._run
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LoopWatch:
        self._task = asyncio.create_task(self._tick())
        asyncio.Handle._run = self._watched()  # type: ignore[method-assign]
        return self

    async def __aexit__(self, *raised: object) -> None:
        asyncio.Handle._run = self._run  # type: ignore[method-assign]
        assert self._task is not None
        self._task.cancel()

    def _watched(self) -> Callable[[asyncio.Handle], None]:
        def run(handle: asyncio.Handle) -> None:
            before = time.thread_time()
            self._run(handle)
            self.step_ms = max(self.step_ms, 1000 * (time.thread_time() - before))

        return run

    async def _tick(self) -> None:
        while True:
            before, waited_s = time.perf_counter(), _waited_s()
            await asyncio.sleep(_TICK_S)
            late_s = time.perf_counter() - before - _TICK_S
            self.late_ms = max(self.late_ms, 1000 * late_s)
            self.held_ms = max(self.held_ms, 1000 * (late_s - (_waited_s() - waited_s)))


def _waited_s() -> float:
    """Return the seconds for which this thread was ready to run and had no core, as Linux counts them."""
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1]) / 1e9

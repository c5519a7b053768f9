"""The event loop of all asynchronous tests, whose clock does not depend on how fast the machine is.

    a callback runs                       the clock stands still, however long it takes
    the loop waits for what comes next    the clock goes on, at most to the next timer
    a test calls `hold_up(0.9)`           the clock goes on by 0.9 s, as if a callback had blocked the loop
    a test calls `skip_waits()`           the clock jumps to the next timer, and nothing is waited for

So no time limit ends a call that is late because the machine is busy, and timers go off in their order. A call that
hangs is waited for, so its time limit still ends it. A thread that must outlast a time limit takes its time from the
same clock (`take`). Other processes have no such clock: wait for their results.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

Result = TypeVar("Result")


class _Selector(selectors.EpollSelector):
    """A selector that counts the seconds for which it waited."""

    def __init__(self) -> None:
        super().__init__()
        # One object, as threads read it, too: seconds so far, when the wait under way began, how long it may take.
        self._state = (0.0, 0.0, 0.0)
        self.skips = False

    def select(self, timeout: float | None = None) -> Any:
        if self.skips and timeout is not None:
            ready = super().select(0)
            if not ready:
                self.hold_up(timeout)
            return ready
        most_s = float("inf") if timeout is None else max(timeout, 0.0005)
        self._state = (self.now(), time.monotonic(), most_s)
        try:
            return super().select(timeout)
        finally:
            self._state = (self.now(), 0.0, 0.0)

    def now(self) -> float:
        waited_s, began, most_s = self._state
        return waited_s + min(time.monotonic() - began, most_s)

    def hold_up(self, seconds: float) -> None:
        waited_s, *under_way = self._state
        self._state = (waited_s + seconds, *under_way)


class IdleLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock goes on only while the loop waits."""

    newest: ClassVar[IdleLoop]

    def __init__(self) -> None:
        self._waits = _Selector()
        super().__init__(self._waits)
        IdleLoop.newest = self

    def time(self) -> float:
        return self._waits.now()

    def hold_up(self, seconds: float) -> None:
        """Let the clock go on, as if a callback had blocked the loop for so long."""
        self._waits.hold_up(seconds)


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on such a loop, like `asyncio.run`, for a test that is not a coroutine itself."""
    with asyncio.Runner(loop_factory=IdleLoop) as runner:
        return runner.run(coroutine)


def hold_up(seconds: float) -> None:
    """Let the clock of the running loop go on, as if this callback had blocked the loop for so long."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, IdleLoop)
    loop.hold_up(seconds)


def skip_waits() -> None:
    """Let the clock of the running loop jump to the next timer wherever the loop would wait for it.

    For tests of minutes, without threads, processes and sockets: these would need the real time.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, IdleLoop)
    loop._waits.skips = True


def take(seconds: float) -> None:
    """Block a thread for so many seconds of the loop's clock: longer than every time limit below, and no other."""
    until = IdleLoop.newest.time() + seconds
    while IdleLoop.newest.time() < until:
        time.sleep(0.002)

"""Watch for code that blocks the event loop, and with it every conversation of the worker.

The event loop notes the time, again and again, and a thread looks at it. When the time grows old, the loop is blocked,
and the task that runs now is the cause. `CallWatch` reports such a task if it is a call of an author's code: the log
names the call and its current line of code. The call goes on: Python has no way to interrupt it.

Code that keeps the interpreter's lock, as a regular expression does, stops the thread, too. So the loop itself measures
how long it was blocked, and the thread, which waits for the lock, looks at once when the code gives it back.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import Counter
from types import FrameType, TracebackType
from typing import Self

from verl_multiturn.calls.invocation import KINDS

logger = logging.getLogger(__name__)


class LoopWatch:
    """A watch over the running event loop, as a context manager or between `start` and `stop`.

    Args:
        blocked_s: Seconds without a callback after which the event loop counts as blocked.
        looks_s: Seconds between two looks at the event loop; a standstill may count for longer by as much.
    """

    def __init__(self, blocked_s: float, looks_s: float) -> None:
        self._blocked_s = blocked_s
        self._looks_s = looks_s
        self._stopped = threading.Event()
        self._beat = float("inf")
        """Time (`time.monotonic`) when the loop last ran its callbacks; infinite while it is not watched."""

    def start(self) -> Self:
        """Start the watch; call it on the event loop that is to be watched."""
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._loop.call_later(self._looks_s, self._on_loop)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="loop watch")
        self._thread.start()
        self._beat = time.monotonic()  # now: on a busy machine the thread takes its time to start
        return self

    def stop(self) -> None:
        """End the watching thread, without waiting for it."""
        self._stopped.set()
        self._beat = float("inf")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._thread.join()

    @property
    def stands_still_s(self) -> float:
        """Seconds since the loop last ran its callbacks."""
        return time.monotonic() - self._beat

    def blocked(self, task: asyncio.Task[object] | None, frame: FrameType) -> None:
        """Note that the loop is blocked; the watching thread calls it once in each standstill.

        Args:
            task: The task that runs now.
            frame: Current frame of the loop's thread.
        """

    def over(self, seconds: float) -> None:
        """Note that a standstill is over; the loop calls it, also for one that the watching thread did not see.

        Args:
            seconds: How long it was.
        """

    def _on_loop(self) -> None:
        if self._stopped.is_set():
            return
        seconds, self._beat = self.stands_still_s, time.monotonic()
        if seconds >= self._blocked_s:
            self.over(seconds)
        self._loop.call_later(self._looks_s, self._on_loop)

    def _watch(self) -> None:
        told_of = 0.0
        while not self._stopped.wait(self._looks_s) and not self._loop.is_closed():
            beat = self._beat
            if beat != told_of and time.monotonic() - beat >= self._blocked_s:
                told_of = beat
                if (frame := sys._current_frames().get(self._thread_id)) is not None:
                    self.blocked(asyncio.current_task(self._loop), frame)


class CallWatch(LoopWatch):
    """A watch that logs which calls of authors' code block the event loop.

    Args:
        blocked_s: As in `LoopWatch`.

    Attributes:
        found: Number of times that each call (`tool 'name': method`) was found blocking.
    """

    def __init__(self, blocked_s: float = 1.0) -> None:
        super().__init__(blocked_s, min(0.05, blocked_s / 20))
        self.found: Counter[str] = Counter()

    def blocked(self, task: asyncio.Task[object] | None, frame: FrameType) -> None:
        """Log the call that blocks the loop, and count it.

        Args:
            task: The task that runs now.
            frame: Current frame of the loop's thread.
        """
        if task is None or task.get_name().partition(" ")[0] not in KINDS:
            return
        call = task.get_name()
        self.found[call] += 1
        where = traceback.extract_stack(frame)[-1]
        logger.error(
            "%s has held up the event loop for over %g s, at %s:%s (%s): all conversations of this worker wait for it; "
            "await what takes time, or make the method a plain `def`, which runs in a thread",
            call,
            self._blocked_s,
            where.filename,
            where.lineno,
            where.line,
        )

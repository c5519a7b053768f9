"""Watch for code that blocks the event loop, and with it every conversation of the worker.

A thread asks the event loop to run a callback, again and again. While the loop does not, it stands still, and the task
that runs now is the cause. `CallWatch` tells of such a task if it is a call of an author's code: the log names the call
and the line of code where it stands. The call goes on: Python has no way to interrupt it.
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
        looks_s: Seconds between two looks at the event loop.
    """

    def __init__(self, blocked_s: float, looks_s: float) -> None:
        self._blocked_s = blocked_s
        self._looks_s = looks_s
        self._stopped = threading.Event()
        self._asked: float | None = None
        """Time (`time.monotonic`) of the request that the loop has not answered yet."""

    def start(self) -> Self:
        """Start the watch; call it on the event loop that is to be watched."""
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="loop watch")
        self._thread.start()
        return self

    def stop(self) -> None:
        """Tell the watching thread to end, without waiting for it."""
        self._stopped.set()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._thread.join()

    @property
    def stands_still_s(self) -> float:
        """Seconds for which the loop has stood still by now."""
        asked = self._asked
        return 0.0 if asked is None else time.monotonic() - asked

    def blocked(self, task: asyncio.Task[object] | None, frame: FrameType) -> None:
        """Note that the loop is blocked; the watching thread calls it once in each standstill.

        Args:
            task: The task that runs now.
            frame: Where the loop's thread stands.
        """

    def over(self, seconds: float) -> None:
        """Note that a standstill is over; the loop calls it, also for one that the watching thread did not see.

        Args:
            seconds: How long it was.
        """

    def _answer(self) -> None:
        seconds, self._asked = self.stands_still_s, None
        if seconds >= self._blocked_s:
            self.over(seconds)

    def _watch(self) -> None:
        is_told = False
        while not self._stopped.wait(self._looks_s):
            if self._asked is None:
                is_told, self._asked = False, time.monotonic()
                try:
                    self._loop.call_soon_threadsafe(self._answer)
                except RuntimeError:  # the loop is closed
                    return
            elif not is_told and self.stands_still_s >= self._blocked_s:
                is_told = True
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
        super().__init__(blocked_s, min(0.25, blocked_s / 4))
        self.found: Counter[str] = Counter()

    def blocked(self, task: asyncio.Task[object] | None, frame: FrameType) -> None:
        """Log the call that blocks the loop, and count it.

        Args:
            task: The task that runs now.
            frame: Where the loop's thread stands.
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

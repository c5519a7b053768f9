"""Watch for tools that block the event loop, and with it every conversation of the worker.

A thread looks whether the event loop still runs its callbacks. When it has not for `blocked_s` seconds, the task that
runs now is the cause. If that task is a tool's call, the log names the call and the line of code where it stands. The
call goes on: Python has no way to interrupt it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import Counter
from types import TracebackType

from verl_multiturn.calls.invocation import KINDS

logger = logging.getLogger(__name__)

_LOOKS_S = 0.25


class LoopWatch:
    """A watch over the running event loop, as a context manager or between `start` and `stop`.

    Args:
        blocked_s: Seconds without a callback after which the event loop counts as blocked.

    Attributes:
        found: Number of times that each call (`tool 'name': method`) was found blocking.
    """

    def __init__(self, blocked_s: float = 1.0) -> None:
        self._blocked_s = blocked_s
        self._stopped = threading.Event()
        self._beat = time.monotonic()
        self.found: Counter[str] = Counter()

    def start(self) -> LoopWatch:
        """Start the watch; call it on the event loop that is to be watched."""
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="loop watch")
        self._thread.start()
        return self

    def stop(self) -> None:
        """Tell the watching thread to end, without waiting for it."""
        self._stopped.set()

    def __enter__(self) -> LoopWatch:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._thread.join()

    def _turned(self) -> None:
        self._beat = time.monotonic()

    def _watch(self) -> None:
        told_of = 0.0
        while not self._stopped.wait(min(_LOOKS_S, self._blocked_s / 4)):
            beat = self._beat
            try:
                self._loop.call_soon_threadsafe(self._turned)
            except RuntimeError:  # the loop is closed
                return
            if time.monotonic() - beat >= self._blocked_s and beat != told_of:
                told_of = beat
                self._tell()

    def _tell(self) -> None:
        task = asyncio.current_task(self._loop)
        frame = sys._current_frames().get(self._thread_id)
        if task is None or frame is None or task.get_name().partition(" ")[0] not in KINDS:
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

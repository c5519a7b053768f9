"""`BackgroundWriter`: a thread that writes, so that neither an event loop nor a step waits for a disk or a backend.

    caller   put(item)       in microseconds
    thread   write(items)    in the order of `put`
    caller   close()         waits until the rest is written, within `close_s`

Records, joins and traces are written by it (`records.py`, `step_writer.py`, `observe/trace_writer.py`).

Invariants:
- `put` neither waits nor raises. An item beyond the limit is refused, counted, and reported once until writing works
  again;
- an error of `write` ends neither the thread nor the run;
- items that were put are written when the process exits, within `close_s`; a kill loses it;
- a fork has no thread. It takes nothing, and has nothing to wait for.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

from verl_multiturn.describe import describe

logger = logging.getLogger(__name__)

CLOSE_S = 30.0
"""Seconds to wait for the end of a writer, where its owner sets no other time."""
_MOST_SMALL = 100_000
"""So many items wait at most, small ones among them."""

Item = TypeVar("Item")


class Losses:
    """A count of the items lost on their way to one place, reported once until that place works again.

    Args:
        what: The items that may be lost, in the plural, such as `traces`.
        where: Where it should be written.
    """

    def __init__(self, what: str, where: object) -> None:
        self.what, self.where = what, where
        self.count = 0
        """How many were lost so far."""
        self._is_reported = False
        self._lock = threading.Lock()

    def add(self, why: str, count: int = 1, has_trace: bool = False) -> None:
        """Count lost items, and report the first one.

        Args:
            why: Why it is lost.
            count: How many are lost; 0: they are late, or it is not known yet.
            has_trace: Whether the traceback of the error that is being handled is shown, since it is a bug of ours.
        """
        with self._lock:
            self.count += count
            was_reported, self._is_reported = self._is_reported, True
        if not was_reported:
            report = "%s are lost: %s: %s; the run goes on (said once)"
            logger.warning(report, self.what, self.where, why, exc_info=has_trace)

    def end(self) -> None:
        """Report that writing works again, where a loss was reported before."""
        with self._lock:
            was_reported, self._is_reported = self._is_reported, False
        if was_reported:
            logger.warning("%s are written again; %d were lost so far: %s", self.what, self.count, self.where)

    def last(self, why: str, count: int) -> None:
        """Count the items lost at the end, and report the total, whatever was reported before.

        Args:
            why: Why it is lost.
            count: How many are lost by that.
        """
        with self._lock:
            self.count += count
        logger.warning("%s are lost, %d in all: %s: %s", self.what, self.count, self.where, why)


class BackgroundWriter(Generic[Item]):
    """A thread that writes its owner's items. It begins with the first item, and never keeps the process alive.

    A large item holds a conversation or a table in memory, and few of them may wait; a small one is a line.

    Args:
        name: Name of the thread.
        write: Writes some items; called in the thread, in order. It reports by itself the items that it cannot write.
        losses: The count of refused items.
        most: The most large items that wait, besides those that are being written.
        enough: The most large items that one call of `write` gets.
        gather_s: Seconds for which the first of them waits for others.
        last: Called in the thread when everything is written.
        close_s: The most seconds for which `close` waits.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[Sequence[Item]], None],
        losses: Losses,
        *,
        most: int,
        enough: int = 1,
        gather_s: float = 0.0,
        last: Callable[[], None] | None = None,
        close_s: float = CLOSE_S,
    ) -> None:
        self._name, self._write, self._losses = name, write, losses
        self._most, self._enough, self._gather_s = most, enough, gather_s
        self._last, self._close_s = last, close_s
        self._queue: deque[tuple[Item, bool]] = deque()
        self._large = 0
        """Large items in the queue."""
        self._underway = 0
        """Items that are being written."""
        self._thread: threading.Thread | None = None
        self._closing = self._is_over = False
        self._at_end: list[Callable[[], object]] = []
        """Called in the thread when it is over."""
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def waiting(self) -> int:
        """Return how many items are not written yet."""
        return len(self._queue) + self._underway

    def put(self, item: Item, large: bool = True) -> str:
        """Hand an item over to the thread.

        Args:
            item: The item; nothing that it refers to may be changed any more.
            large: Whether it counts among the few that may wait.

        Returns:
            Why it is refused, and lost; "" where it is taken.
        """
        if os.getpid() != self._process:  # in a fork a lock may never be free
            self._losses.count += large
            return "this process is a fork"
        with self._lock:
            waiting = len(self._queue)
            if self._thread is None or self._closing or self._large >= self._most or waiting >= _MOST_SMALL:
                why = self._refusal(large) or self._start()
                if why:
                    self._losses.add(why, int(large))
                    return why
            self._queue.append((item, large))
            self._large += large
            if not waiting or self._large >= self._enough:
                self._changed.notify()
        return ""

    def close(self) -> None:
        """Write the waiting items, and stop. A slow disk or a backend that hangs is waited for, but not forever."""
        if os.getpid() != self._process:
            return
        self._close()
        if self._thread is not None:
            self._thread.join(self._close_s)
            self._forget()

    async def aclose(self) -> None:
        """Write the waiting items, and stop, while the event loop goes on. The caller bounds its time."""
        if os.getpid() != self._process:
            return
        ended, loop = asyncio.Event(), asyncio.get_running_loop()

        def end() -> None:
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(ended.set)

        with self._changed:
            self._close()
            if self._thread is None or self._is_over:
                return
            self._at_end.append(end)
        try:
            await ended.wait()
        finally:
            self._forget()

    def _refusal(self, large: bool) -> str:
        if self._closing:
            return "the writer is closed"
        if (large and self._large >= self._most) or len(self._queue) >= _MOST_SMALL:
            return f"{self._large if large else len(self._queue)} wait already, since writing is too slow"
        return ""

    def _start(self) -> str:
        """Start the thread where there is none; return why it cannot be started, else ""."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the machine has no more, or the interpreter is about to exit
                return describe(error)
            self._thread = thread
            atexit.register(self.close)
        return ""

    def _close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _forget(self) -> None:
        """Leave nothing to do for the process's exit, where all is written; else report the late items."""
        if self._is_over:
            atexit.unregister(self.close)
        else:
            what, where = self._losses.what, self._losses.where
            logger.warning("the last %s may be lost: some %d were not written in time: %s", what, self.waiting, where)

    def _run(self) -> None:
        while batch := self._next():
            self._guarded(partial(self._write, [item for item, _ in batch]), sum(large for _, large in batch))
            self._underway = 0
        if self._last is not None:
            self._guarded(self._last)
        with self._changed:
            self._is_over, at_end = True, self._at_end
        for call in at_end:
            call()

    def _next(self) -> list[tuple[Item, bool]]:
        """Wait for items and take them out of the queue: `enough` large ones at most; [] at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if self._gather_s:
                self._changed.wait_for(lambda: self._closing or self._large >= self._enough, self._gather_s)
            batch: list[tuple[Item, bool]] = []
            large = 0
            while self._queue and large + self._queue[0][1] <= self._enough:
                batch.append(self._queue.popleft())
                large += batch[-1][1]
            self._large -= large
            self._underway = len(batch)
            return batch

    def _guarded(self, call: Callable[[], None], large: int = 0) -> None:
        try:
            call()
        except BaseException as error:  # the thread lives as long as the run, also after a panic of a library in Rust
            self._losses.add(f"writing failed: {describe(error)}", large, has_trace=True)

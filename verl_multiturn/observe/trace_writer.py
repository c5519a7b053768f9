"""`TraceWriter`: writes traces in a thread of its own, so that no conversation waits for a backend.

Invariants:
- `put` never waits and never raises: where the backend is slower than the conversations, traces are lost;
- a backend that is down, raises or hangs is told once, and once more when it takes traces again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from verl_multiturn.describe import describe
from verl_multiturn.observe.traces import Decode, Span, trace_of
from verl_multiturn.rollout.life import Life

logger = logging.getLogger(__name__)

_MOST = 256
"""The most conversations that wait for the thread; each keeps its tokens and messages."""
_PAUSE_S = 30.0
"""Seconds after which a backend that could not be opened is tried again."""


class Sink(Protocol):
    """A backend that takes traces. All methods are called in one thread, and may raise."""

    @property
    def name(self) -> str:
        """Return the name that messages have for it."""
        ...

    def open(self) -> None:
        """Connect; called before the first trace, and again after it raised."""
        ...

    def write(self, life: Life, trace: Span) -> None:
        """Write one trace."""
        ...

    def close(self) -> None:
        """Write what it holds back; called once, at the end."""
        ...


class TraceWriter:
    """A writer of traces to one or more backends.

    Args:
        sinks: The backends.
        decode: As in `trace_of`.
        experiment_name: As in `trace_of`.
        pause_s: Seconds after which a backend that could not be opened is tried again.
    """

    name = "rollout.trace"
    """Name of what is closed, in the log."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        decode: Decode | None = None,
        experiment_name: str | None = None,
        pause_s: float = _PAUSE_S,
    ) -> None:
        self._outlets = [_Outlet(sink, pause_s) for sink in sinks]
        self._decode, self._experiment_name = decode, experiment_name
        self._queue: queue.Queue[Life | Callable[[], object]] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._lost = 0
        self._is_closed = False

    @property
    def waiting(self) -> int:
        """Return how many conversations wait for the thread."""
        return self._queue.qsize()

    def put(self, life: Life) -> None:
        """Take a conversation that is over and whose outcome nobody changes any more; none after `aclose`."""
        if self._is_closed:
            return
        if self.waiting >= _MOST:
            self._lost += 1
            if self._lost == 1:
                logger.warning(
                    "traces are lost: %s takes them more slowly than conversations end; the run goes on (said once)",
                    " and ".join(outlet.sink.name for outlet in self._outlets),
                )
            return
        self._queue.put(life)
        if self._thread is None:
            # A daemon: a backend that hangs must not keep the process alive.
            self._thread = threading.Thread(target=self._run, name="rollout.trace", daemon=True)
            self._thread.start()

    async def aclose(self) -> None:
        """Write what is waiting, and what the backends hold back. Whoever calls this bounds its time."""
        if self._thread is None or self._is_closed:
            return
        self._is_closed = True
        ended = asyncio.Event()
        self._queue.put(partial(asyncio.get_running_loop().call_soon_threadsafe, ended.set))
        try:
            await ended.wait()
        except asyncio.CancelledError:
            logger.warning("the last traces are lost: some %d were not written in time", self.waiting)
            raise

    def _run(self) -> None:
        while isinstance(taken := self._queue.get(), Life):
            for outlet in self._outlets:
                outlet.open()
            try:
                trace = trace_of(taken, self._decode, self._experiment_name)
            except Exception as error:  # a bug of ours must not end the thread
                logger.warning("a trace is lost: it could not be made: %s", describe(error), exc_info=True)
                continue
            for outlet in self._outlets:
                outlet.write(taken, trace)
        for outlet in self._outlets:
            outlet.close()
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            taken()


class _Outlet:
    """A backend whose errors are told once."""

    def __init__(self, sink: Sink, pause_s: float) -> None:
        self.sink = sink
        self._pause_s = pause_s
        self._is_open = False
        self._tried: float | None = None
        self._lost = 0

    def open(self) -> None:
        if self._is_open or (self._tried is not None and time.monotonic() < self._tried + self._pause_s):
            return
        try:
            self.sink.open()
            self._is_open = True
        except (Exception, SystemExit) as error:  # some client libraries exit where nobody is logged in
            self._tell(error)
        self._tried = time.monotonic()

    def write(self, life: Life, trace: Span) -> None:
        if not self._is_open:
            self._lost += 1
            return
        try:
            self.sink.write(life, trace)
        except (Exception, SystemExit) as error:
            self._tell(error)
            self._lost += 1
            return
        if self._lost:
            logger.warning("%s takes traces again; %d were lost", self.sink.name, self._lost)
        self._lost = 0
        self._is_told = False

    def close(self) -> None:
        if not self._is_open:
            return
        try:
            self.sink.close()
        except (Exception, SystemExit) as error:
            self._tell(error)

    _is_told = False

    def _tell(self, error: BaseException) -> None:
        if not self._is_told:
            logger.warning("traces are lost: %s: %s; the run goes on (said once)", self.sink.name, describe(error))
        self._is_told = True

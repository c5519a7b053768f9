"""`TraceWriter`: writes traces in a thread (`records.write.background`), so that no conversation waits for a backend.

Invariants:
- where the backend is slower than the conversations, traces are lost;
- a backend that is down, raises or hangs is reported once, and once more when it takes traces again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from verl_multiturn.calls.closing import CLOSE_S
from verl_multiturn.describe import describe
from verl_multiturn.observe.spans import TraceSpan
from verl_multiturn.observe.traces import Decode, trace_of
from verl_multiturn.records.write.background import BackgroundWriter, Losses
from verl_multiturn.rollout.life import Life

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

    def write(self, life: Life, trace: TraceSpan) -> None:
        """Write one trace."""
        ...

    def close(self) -> None:
        """Write the traces that it holds back; called once, at the end."""
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
    """Name of the closed part, in the log."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        decode: Decode | None = None,
        experiment_name: str | None = None,
        pause_s: float = _PAUSE_S,
    ) -> None:
        self._outlets = [_Outlet(sink, pause_s) for sink in sinks]
        self._decode, self._experiment_name = decode, experiment_name
        self._losses = Losses("traces", " and ".join(sink.name for sink in sinks))
        self._background: BackgroundWriter[Life] = BackgroundWriter(
            "rollout.trace", self._write, self._losses, most=_MOST, last=self._close, close_s=CLOSE_S
        )

    @property
    def waiting(self) -> int:
        """Return the number of conversations whose traces are not written yet."""
        return self._background.waiting

    def put(self, life: Life) -> None:
        """Take a conversation that is over and whose outcome is final; none after `aclose`."""
        self._background.put(life)

    async def aclose(self) -> None:
        """Write the waiting traces, and those that the backends hold back. The caller bounds its time."""
        await self._background.aclose()

    def _write(self, lives: Sequence[Life]) -> None:
        for life in lives:
            for outlet in self._outlets:
                outlet.open()
            trace = trace_of(life, self._decode, self._experiment_name)
            for outlet in self._outlets:
                outlet.write(life, trace)
        if self.waiting == len(lives):  # refused ones had no room
            self._losses.end()

    def _close(self) -> None:
        for outlet in self._outlets:
            outlet.close()


class _Outlet:
    """A backend, with its losses."""

    def __init__(self, sink: Sink, pause_s: float) -> None:
        self.sink = sink
        self._pause_s = pause_s
        self._is_open = False
        self._tried: float | None = None
        self._losses = Losses("traces", sink.name)

    def open(self) -> None:
        if self._is_open or (self._tried is not None and time.monotonic() < self._tried + self._pause_s):
            return
        try:
            self.sink.open()
            self._is_open = True
        except (Exception, SystemExit) as error:  # some client libraries exit where no user is logged in
            self._losses.add(describe(error), 0)
        self._tried = time.monotonic()

    def write(self, life: Life, trace: TraceSpan) -> None:
        if not self._is_open:
            self._losses.add("it is not open")
            return
        try:
            self.sink.write(life, trace)
        except (Exception, SystemExit) as error:
            self._losses.add(describe(error))
        else:
            self._losses.end()

    def close(self) -> None:
        if not self._is_open:
            return
        try:
            self.sink.close()
        except (Exception, SystemExit) as error:
            self._losses.add(describe(error), 0)

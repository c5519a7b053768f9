"""`Timeline`: the waits of one conversation, with their times, the current one included.

    life           `with kept(timeline):`   conversation  `with during("generation") as span: …`
                          │                  tools, users  `with during("call", "search"): …`
                          ▼
    the record's `timeline`, and the running conversations in `verl_multiturn view`

Waiting code need not know the conversation: its timeline is a context variable, which every task of the conversation
inherits. It lies here, in the lowest room that waits for others' code; `rollout/life.py` sets it.

A span costs some two microseconds; without a timeline, a look at the context variable.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple

Kind = Literal[
    "generation", "pause", "wait", "call", "interaction", "create", "release", "reward", "teacher", "store", "request"
]
"""`wait` is that for a slot or for an outage's end, `pause` that for an engine that pauses."""

_UNNAMED = ("request",)
"""Kinds that last while something else of the conversation is waited for, or while its agent works."""


class Span(NamedTuple):
    """A stretch of time in a conversation; times are those of `time.time`."""

    kind: Kind
    name: str
    """Name of the tool or interaction; "" without one."""
    turn: int | None
    """Number of the generation that it belongs to; None: to none."""
    start: float
    end: float


class Timeline:
    """The timeline of one conversation."""

    __slots__ = ("_open", "is_over", "spans", "turn", "turns")

    def __init__(self) -> None:
        self.spans: list[Span] = []
        """The spans that have ended, in the order of their ends."""
        self.turn: int | None = None
        """Number of the generation that is under way, or was last; None before the first."""
        self.turns = 0
        """Generations that have ended."""
        self.is_over = False
        """Whether the conversation is over: later spans are not added."""
        self._open: dict[during, None] = {}

    def end(self) -> None:
        """Take no more spans; those that are open never end."""
        self.is_over = True
        self._open.clear()

    def doing(self) -> tuple[str, float] | None:
        """Return the current wait, such as `call search`, and its begin; None without a known one.

        Of several calls at once it is the one that has lasted longest. A pause is named before the generation in it.
        """
        waited = [span for span in self._open if span.kind not in _UNNAMED]
        found = next((span for span in waited if span.kind == "pause"), waited[0] if waited else None)
        return None if found is None else (f"{found.kind} {found.name}".rstrip(), found.start)


_timeline: ContextVar[Timeline | None] = ContextVar("timeline", default=None)


@contextmanager
def kept(timeline: Timeline | None) -> Iterator[None]:
    """Keep a timeline for the running task, and for those that it starts, until the block ends; None: none is kept."""
    token = _timeline.set(timeline)
    try:
        yield
    finally:
        _timeline.reset(token)


def is_kept() -> bool:
    """Return whether somebody keeps the timeline of the running conversation."""
    return _timeline.get() is not None


class during:
    """A span of the running conversation's timeline, as a context manager; nothing without a timeline.

    Args:
        kind: The kind of wait.
        name: Name of the tool or interaction.
        turn: Number of the generation; None: that which is under way. A generation whose number is known at its end
            sets the attribute.
    """

    __slots__ = ("_timeline", "kind", "name", "start", "turn")

    def __init__(self, kind: Kind, name: str = "", turn: int | None = None) -> None:
        self.kind: Kind = kind
        self.name = name
        self.turn = turn
        self._timeline: Timeline | None = None
        self.start = 0.0

    def __enter__(self) -> during:
        timeline = _timeline.get()
        if timeline is not None and not timeline.is_over:
            self._timeline = timeline
            if self.turn is None:
                self.turn = timeline.turn
            elif self.kind == "generation":
                timeline.turn = self.turn
            self.start = time.time()
            timeline._open[self] = None
        return self

    def __exit__(self, *exc_info: object) -> None:
        timeline = self._timeline
        if timeline is not None and self in timeline._open:
            del timeline._open[self]
            timeline.turns += self.kind == "generation"
            timeline.spans.append(Span(self.kind, self.name, self.turn, self.start, time.time()))

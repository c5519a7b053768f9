"""`Resident`: a conversation as the servers' caches see it: whose sibling it is, since when, and when it is over.

    worker  `with residing(uid):`  ──▶  the conversation's task, and those it starts  ──▶  client  `resident()`

The client of the servers need not know the conversation: the resident is a context variable, as its clock is
(`rollout/clock.py`). A conversation that nobody announces has none; its turns neither lead nor wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from verl_multiturn.calls.timeline import during
from verl_multiturn.rollout.clock import stopped


@dataclass(eq=False)
class Resident:
    """A conversation whose tokens lie in a server's cache, or are about to."""

    group: str
    """Name of the prompt that it shares with its siblings."""
    began: float
    """Time (`time.time`) at which it began: the earlier, the sooner its turns are let in."""
    ends: list[Callable[[Resident], None]] = field(default_factory=list)
    """Called when it is over."""
    places: dict[str, str] = field(default_factory=dict)
    """Name of the server of each of its requests."""
    held_s: float = 0.0
    """Seconds for which its turns waited for room."""
    led_s: float = 0.0
    """Seconds for which its turns waited for those that lead them."""
    is_over: bool = False
    """Whether it asks for no more tokens."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold a turn back for want of room: as in a pause, the conversation's clock stands still."""
        since = time.perf_counter()
        try:
            with stopped(), during("pause"):
                yield
        finally:
            self.held_s += time.perf_counter() - since

    @contextmanager
    def led(self) -> Iterator[None]:
        """Let a turn wait for one that leads it, as `held` does for room."""
        since = time.perf_counter()
        try:
            with stopped(), during("pause"):
                yield
        finally:
            self.led_s += time.perf_counter() - since

    def leave(self) -> None:
        """Give up what is kept for it: it asks for no more tokens, whatever else it still waits for."""
        self.is_over = True
        while self.ends:
            self.ends.pop()(self)


_resident: ContextVar[Resident | None] = ContextVar("resident", default=None)


@contextmanager
def residing(group: str) -> Iterator[Resident]:
    """Announce the conversation of the running task until the block ends.

    Args:
        group: Name of its prompt; conversations of the same prompt have the same.
    """
    found = Resident(group, time.time())
    token = _resident.set(found)
    try:
        yield found
    finally:
        _resident.reset(token)
        found.leave()


def resident() -> Resident | None:
    """Return the running conversation; None where nobody announced it."""
    return _resident.get()

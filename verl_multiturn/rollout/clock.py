"""`WallClock`: the wall clock of a conversation, which an engine stops while it is paused.

`life.py` has the functions that find the clock of the running conversation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class WallClock:
    """A deadline that is put off by the time for which it is stopped.

    Args:
        deadline: The deadline, entered.
    """

    def __init__(self, deadline: asyncio.Timeout) -> None:
        self.deadline = deadline
        self.is_over = False
        """Whether the conversation is past the deadline: nothing puts it off any more."""
        self._stops = 0
        """How many blocks of `stopped` are open."""
        self._due: float | None = None
        """When the time would have been up, had it not been stopped; None without a limit, or when it was up before."""
        self._since = 0.0
        """When the first of the open blocks began."""
        self._stopped_s = 0.0
        """Seconds of the blocks that have ended."""

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock until the block ends. A time that is up stays so."""
        if self.is_over:
            yield
            return
        loop = asyncio.get_running_loop()
        if not self._stops:
            self._due, self._since = None if self.deadline.expired() else self.deadline.when(), loop.time()
            if self._due is not None:
                self.deadline.reschedule(None)
        self._stops += 1
        try:
            yield
        finally:
            self._stops -= 1
            if not self._stops:
                stopped_s = loop.time() - self._since
                self._stopped_s += stopped_s
                if self._due is not None and not self.is_over:
                    self.deadline.reschedule(self._due + stopped_s)

    def stood_still_s(self) -> float:
        """Return the seconds for which it has been stopped, up to now."""
        return self._stopped_s + (asyncio.get_running_loop().time() - self._since if self._stops else 0.0)

    def expire(self) -> None:
        """Let the time be up now; once it is up, it stays so."""
        if not self.is_over and not self.deadline.expired():
            self.deadline.reschedule(asyncio.get_running_loop().time())

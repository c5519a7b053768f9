"""The wall clock of a conversation, which an engine stops while it stands still.

    conversation  `async with asyncio.timeout(limit) as deadline, running(deadline):`  …  engine.generate(…)
                                                                                            ↓
    engine                                                     `with stopped(): await …`  the deadline is put off

The engine need not know the conversation: the deadline is a context variable, which every task inherits that the
conversation starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class _Clock:
    """A running deadline."""

    deadline: asyncio.Timeout
    stops: int = 0
    """How many blocks of `stopped` are open."""
    due: float = 0.0
    """When the time would have been up, had it not been stopped."""
    since: float = 0.0
    """When the first of the open blocks began."""
    over: bool = False


_clock: ContextVar[_Clock | None] = ContextVar("clock", default=None)


@asynccontextmanager
async def running(deadline: asyncio.Timeout) -> AsyncIterator[None]:
    """Make an entered timeout the deadline that `stopped` puts off in this task and in those it starts."""
    clock = _Clock(deadline)
    token = _clock.set(clock)
    try:
        yield
    finally:
        clock.over = True
        _clock.reset(token)


@contextmanager
def stopped() -> Iterator[None]:
    """Stop the clock of the conversation that this task works for, until the block ends.

    Nothing happens without a conversation, without a time limit, or when the time has run out already.
    """
    clock = _clock.get()
    when = None if clock is None or clock.over or clock.deadline.expired() else clock.deadline.when()
    if clock is None or (when is None and not clock.stops):
        yield
        return
    loop = asyncio.get_running_loop()
    if when is not None:
        clock.due, clock.since = when, loop.time()
        clock.deadline.reschedule(None)
    clock.stops += 1
    try:
        yield
    finally:
        clock.stops -= 1
        if not clock.stops and not clock.over:
            clock.deadline.reschedule(clock.due + loop.time() - clock.since)

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
from typing import NoReturn


@dataclass
class _Clock:
    """A running deadline."""

    deadline: asyncio.Timeout
    stops: int = 0
    """How many blocks of `stopped` are open."""
    due: float | None = None
    """When the time would have been up, had it not been stopped; None without a limit, or when it was up already."""
    since: float = 0.0
    """When the first of the open blocks began."""
    over: bool = False
    stopped_s: float = 0.0
    """Seconds of the blocks that have ended."""


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

    Nothing happens without a conversation. A time that is up stays so.
    """
    clock = _clock.get()
    if clock is None or clock.over:
        yield
        return
    loop = asyncio.get_running_loop()
    if not clock.stops:
        clock.due, clock.since = None if clock.deadline.expired() else clock.deadline.when(), loop.time()
        if clock.due is not None:
            clock.deadline.reschedule(None)
    clock.stops += 1
    try:
        yield
    finally:
        clock.stops -= 1
        if not clock.stops:
            stopped_s = loop.time() - clock.since
            clock.stopped_s += stopped_s
            if clock.due is not None and not clock.over:
                clock.deadline.reschedule(clock.due + stopped_s)


def stood_still_s() -> float:
    """Return the seconds for which the clock of the conversation has been stopped, up to now."""
    clock = _clock.get()
    if clock is None:
        return 0.0
    return clock.stopped_s + (asyncio.get_running_loop().time() - clock.since if clock.stops else 0.0)


def expire() -> None:
    """Let the time of the conversation that this task works for be up now, as in a replay; once it is up, it stays so.

    Raises:
        RuntimeError: The task works for no conversation.
    """
    clock = _clock.get()
    if clock is None:
        raise RuntimeError("there is no conversation whose time could be up")
    if not clock.over and not clock.deadline.expired():
        clock.deadline.reschedule(asyncio.get_running_loop().time())


async def run_out() -> NoReturn:
    """Let the time be up, as `expire` does, and wait for the cancellation that follows from it."""
    expire()
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nothing ends this future")

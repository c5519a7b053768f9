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

_deadline: ContextVar[asyncio.Timeout | None] = ContextVar("deadline", default=None)


@asynccontextmanager
async def running(deadline: asyncio.Timeout) -> AsyncIterator[None]:
    """Make an entered timeout the deadline that `stopped` puts off in this task and in those it starts."""
    token = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(token)


@contextmanager
def stopped() -> Iterator[None]:
    """Stop the clock of the conversation that this task works for, until the block ends.

    Nothing happens without a conversation, without a time limit, or when the time has run out already. At most one
    block may be open at a time for a conversation, as an engine generates one turn at a time.
    """
    deadline = _deadline.get()
    when = deadline.when() if deadline is not None and not deadline.expired() else None
    if deadline is None or when is None:
        yield
        return
    loop = asyncio.get_running_loop()
    since = loop.time()
    deadline.reschedule(None)
    try:
        yield
    finally:
        deadline.reschedule(when + loop.time() - since)

"""What asyncio lacks: waiting for what cannot be cancelled, keeping what nobody waits for, and time limits that leave
out the time for which somebody else held up the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


async def ended(awaited: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait for the end of something that cannot be cancelled; the last cancellation that came meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while not awaited.done():
        try:
            await asyncio.wait({awaited})
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


async def finish(awaited: asyncio.Future[Any]) -> Any:
    """The result of something that cannot be cancelled; a cancellation meanwhile is raised once it has ended."""
    cancelled = await ended(awaited)
    if cancelled is not None:
        if not awaited.cancelled():
            awaited.exception()
        raise cancelled
    return awaited.result()


# The event loop holds its tasks weakly.
_kept: set[asyncio.Future[Any]] = set()


def keep(awaited: asyncio.Future[Any]) -> None:
    """Let something end that nobody waits for."""
    _kept.add(awaited)
    awaited.add_done_callback(_forget)


def _forget(awaited: asyncio.Future[Any]) -> None:
    _kept.discard(awaited)
    if not awaited.cancelled():
        awaited.exception()  # looked at, so that nobody reports it as never retrieved


async def gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results, in order; the first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


_LOOK_S = 0.25
_LATE_S = 0.02


class Alarms:
    """Wakes whoever waits longer than a time that is the same for all: one timer instead of one for each call.

    The loop's own timers are a heap, whose upkeep costs as much as all else that a call of a quick tool needs.

    Time in which the loop stood still is not waiting time: who is awaited could not go on either. It is measured by how
    late the timer rings, four times a second, so that of a longer standstill a quarter of a second is still counted.
    A loop that is always busy stands still for most of the time, so no more than the limit is left out: who has waited
    for twice as long, standstills included, gets a quarter of a second at most, and the loop a turn, to end in.
    Where a time limit is a promise to somebody else, such as the grace of a conversation, it is not `is_fair`.
    """

    def __init__(self, after_s: float, *, is_fair: bool = True) -> None:
        self.after_s = after_s
        self._is_fair = is_fair
        self._look_s = min(_LOOK_S, after_s / 4)
        # When each is due without the time in which the loop stood still, and when with it; both in order.
        self._set: deque[tuple[float, float, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = 0.0
        self._stood_s = 0.0

    def add(self, woken: asyncio.Future[None]) -> None:
        """Wake a future `after_s` from now, unless it is done by then."""
        waiting = self._set
        while waiting and waiting[0][2].done():
            waiting.popleft()
        loop = woken.get_loop()
        now = loop.time()
        waiting.append((now - self._stood_s + self.after_s, now + 2 * self.after_s, woken))
        if self._timer is None:
            self._wind(loop)

    def _wind(self, loop: asyncio.AbstractEventLoop) -> None:
        due, last, _ = self._set[0]
        self._rings_at = min(due + self._stood_s, last, loop.time() + self._look_s)
        self._timer = loop.call_at(self._rings_at, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        if (late_s := now - self._rings_at) > _LATE_S and self._is_fair:
            self._stood_s += late_s
        waiting = self._set
        while waiting:
            due, last, woken = waiting[0]
            if woken.done() or due <= now - self._stood_s:
                wake(woken)
            elif last <= now:
                loop.call_later(self._look_s, wake, woken)
            else:
                break
            waiting.popleft()
        self._timer = None
        if waiting:
            self._wind(loop)


def wake(woken: asyncio.Future[None], _: object = None) -> None:
    """End a future that somebody waits for, unless it has ended."""
    if not woken.done():
        woken.set_result(None)


async def done_within(awaited: asyncio.Future[Any], alarms: Alarms) -> bool:
    """Wait for the end of a future, no longer than the alarms let; whether it has ended."""
    woken: asyncio.Future[None] = awaited.get_loop().create_future()
    awaited.add_done_callback(partial(wake, woken))
    alarms.add(woken)
    await woken
    return awaited.done()

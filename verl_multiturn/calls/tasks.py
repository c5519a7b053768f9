"""Helpers that asyncio lacks.

- Wait for something that must not be cancelled.
- Keep a task alive without a waiter.
- Limit time without counting the time for which other code held up the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


async def ended(awaited: asyncio.Future[Any], *, pass_on: bool = False) -> asyncio.CancelledError | None:
    """Wait until a future has ended, even if the waiting task is cancelled.

    Args:
        awaited: The future.
        pass_on: Whether a cancellation is passed on to the future, which may still end with a result.

    Returns:
        The last cancellation that came meanwhile; None without one.
    """
    cancelled: asyncio.CancelledError | None = None
    while not awaited.done():
        try:
            await asyncio.wait({awaited})
        except asyncio.CancelledError as error:
            cancelled = error
            if pass_on:
                awaited.cancel()
    return cancelled


async def finish(awaited: asyncio.Future[Any]) -> Any:
    """Return the result of a future that must not be cancelled.

    A cancellation that comes meanwhile is raised after the future has ended.
    """
    cancelled = await ended(awaited)
    if cancelled is not None:
        if not awaited.cancelled():
            awaited.exception()
        raise cancelled
    return awaited.result()


# The event loop holds only weak references to its tasks.
_kept: set[asyncio.Future[Any]] = set()


def keep(awaited: asyncio.Future[Any]) -> None:
    """Let a future end without a waiter."""
    _kept.add(awaited)
    awaited.add_done_callback(_forget)


def _forget(awaited: asyncio.Future[Any]) -> None:
    _kept.discard(awaited)
    if not awaited.cancelled():
        awaited.exception()  # retrieved, so that asyncio does not report it


async def gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of coroutines, in order. The first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


# Seconds between two rings of the timer, at most.
_LOOK_S = 0.25
# A ring that is later than this many seconds counts as a standstill.
_LATE_S = 0.02


class Alarms:
    """A timer that wakes everybody who has waited longer than a time limit, the same limit for all.

    One timer serves all, because the loop's own timers are a heap: its upkeep costs as much as everything else that a
    call of a quick tool needs.

    Time in which the loop was blocked does not count as waiting, since the awaited task could not go on either. A
    standstill is measured by how late the timer rings. The timer rings four times a second (for limits below one
    second, four times in the limit), so up to a quarter of a second of a longer standstill still counts.

    A loop that is always busy is blocked most of the time. So at most `after_s` of standstill is deducted: a caller
    that has waited for twice the limit, standstills included, gets one last quarter of a second, and the loop a turn,
    to end in.

    Args:
        after_s: The time limit in seconds.
        is_fair: Whether standstills are deducted. False for a limit that is a promise to somebody else, such as the
            grace of a conversation.
    """

    def __init__(self, after_s: float, *, is_fair: bool = True) -> None:
        self.after_s = after_s
        self._is_fair = is_fair
        self._look_s = min(_LOOK_S, after_s / 4)
        # For each future: when it is due without counting standstills, and when at the latest. Both are in order.
        self._set: deque[tuple[float, float, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = 0.0
        self._stood_s = 0.0

    def add(self, woken: asyncio.Future[None]) -> None:
        """Wake a future `after_s` seconds from now, unless it is done by then."""
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
    """End a future that somebody waits for, unless it has ended already."""
    if not woken.done():
        woken.set_result(None)


async def done_within(awaited: asyncio.Future[Any], alarms: Alarms) -> bool:
    """Wait for a future for as long as the alarms allow, and return whether it has ended.

    The future is not cancelled.
    """
    woken: asyncio.Future[None] = awaited.get_loop().create_future()
    awaited.add_done_callback(partial(wake, woken))
    alarms.add(woken)
    await woken
    return awaited.done()


async def ended_before(task: asyncio.Future[Any], time_up: asyncio.Event) -> bool:
    """Wait for the end of a task, and cancel it if its time is up before; return whether it has ended by itself.

    Also where the caller is cancelled, the task has ended when this returns or raises.

    Args:
        task: The task.
        time_up: Is set when its time is up.
    """
    waiting = asyncio.ensure_future(time_up.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        waiting.cancel()
        task.cancel()
        if (cancelled := await ended(task, pass_on=True)) is not None:
            raise cancelled

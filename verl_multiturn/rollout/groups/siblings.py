"""Siblings: the conversations of one group, which are compared once the last of them has ended.

    begins ──▶ running ──ends──▶ `join`  waits for the others ──nobody is missing──▶ `compared`  waits for the result
                  └──cut, raised, without rows──▶ takes no part

`FirstValid` of `oversampling.py` decides before who stays. `verl_bridge/workers/worker.py` calls both.

Invariants:
- the comparison runs once, in the order of the conversations' numbers, whichever ended first. It runs in the context of
  none of them, so that it is in nobody's timeline;
- a conversation is waited for until it joins, or ends otherwise: none is waited for in vain;
- only a whole group is cancelled. Its comparison ends then, before the cancellation of a conversation goes on, and none
  begins afterwards.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from verl_multiturn.calls.tasks import ended, keep

T = TypeVar("T")


class Siblings(Generic[T]):
    """The siblings of one group.

    Args:
        started: Number of conversations that begin; their numbers are 0 to `started - 1`.
        compare: Compares those that joined, in the order of their numbers. Its second argument is whether another one
            has raised: verl trains nothing of such a group.
    """

    def __init__(self, started: int, compare: Callable[[Sequence[T], bool], Awaitable[None]]) -> None:
        self._missing = set(range(started))
        self._joined: dict[int, T] = {}
        self._compare = compare
        self._all_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._comparison: asyncio.Future[None] | None = None
        self._has_failed = False
        self._is_cancelled = False

    async def join(self, number: int, conversation: T) -> None:
        """Let a conversation take part, and return when no other one is missing.

        Args:
            number: Its number.
            conversation: Its result.
        """
        self._joined[number] = conversation
        self._gone(number)
        await self._until(self._all_ended)

    async def compared(self) -> None:
        """Return when the siblings are compared; called after `join`.

        Raises:
            Exception: The comparison raised it.
        """
        if self._comparison is not None:
            await self._until(self._comparison)
            self._comparison.result()

    async def _until(self, awaited: asyncio.Future[None]) -> None:
        """Wait for a future; with the waiting conversation its group is cancelled, and so is the comparison."""
        try:
            await asyncio.wait({awaited})
        except asyncio.CancelledError:
            if self._comparison is not None:
                self._comparison.cancel()
                await ended(self._comparison, pass_on=True)
            raise

    @contextmanager
    def running(self, number: int) -> Iterator[None]:
        """Follow a conversation until the block ends; one that has not joined by then takes no part.

        Args:
            number: Its number.
        """
        try:
            yield
        except asyncio.CancelledError:
            self._is_cancelled = True
            raise
        except Exception:  # whatever a conversation raises, its group has failed
            self._has_failed = True
            raise
        finally:
            self._gone(number)

    def _gone(self, number: int) -> None:
        self._missing.discard(number)
        if self._missing or self._all_ended.done():
            return
        if self._joined and not self._is_cancelled:
            self._comparison = contextvars.Context().run(asyncio.ensure_future, self._run())
            keep(self._comparison)  # those that joined may be cancelled before they look at it
        self._all_ended.set_result(None)

    async def _run(self) -> None:
        await self._compare([self._joined[number] for number in sorted(self._joined)], self._has_failed)

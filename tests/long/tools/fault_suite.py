"""Shared parts of `tool_faults` and `interaction_faults`: many conversations at once, each with a plan of its faults.

A conversation has to end by itself, within its wall clock plus the stated grace and 2 s.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

GROUP = 8
GRACE_S = 10.0
"""Grace in seconds, as `Limits.wall_clock_s` documents it: 5 s for calls that were given up, 5 s for the last call."""
LATE_S = 2.0
"""Seconds that the loop itself may be late, because the faults hold it up."""


class FaultSuite:
    """All conversations of one run, with their results; a subclass plays one of them, and reports its errors.

    Args:
        plans: Plans of the conversations.
        at_once: Number of conversations that run at a time.
        wall_clock_s: Limit of a conversation in seconds.
    """

    def __init__(self, plans: Sequence[Any], at_once: int, wall_clock_s: float) -> None:
        self.plans = plans
        self._at_once, self._wall_clock_s = at_once, wall_clock_s
        self.stops: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.slowest_s = 0.0
        self.over_budget = 0
        self.complete = [0] * (-(-len(plans) // GROUP))

    async def conversation(self, index: int) -> None:
        """Play one conversation, and pass its end to `end`."""
        raise NotImplementedError

    async def run(self) -> None:
        """Run all conversations, so many at a time."""
        places = asyncio.Semaphore(self._at_once)

        async def one(index: int) -> None:
            async with places:
                await self.conversation(index)

        async with asyncio.TaskGroup() as group:
            for index in range(len(self.plans)):
                group.create_task(one(index))

    async def ended(
        self, playing: Awaitable[Any], cancel_after_s: float | None, cancelled: Callable[[bool], None] = lambda _: None
    ) -> asyncio.Future[Any]:
        """Wait for a conversation, measure it, and return its task.

        Args:
            playing: The conversation.
            cancel_after_s: Seconds after which it is cancelled from outside; None: never.
            cancelled: Records whether the cancellation met a task that had not ended.
        """
        loop, began = asyncio.get_running_loop(), time.monotonic()
        started, task = loop.time(), asyncio.ensure_future(playing)
        if cancel_after_s is not None:
            loop.call_later(cancel_after_s, lambda: cancelled(task.cancel()))
        await asyncio.wait({task})
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        # By the loop's clock: the tests have one that stops while the machine is busy.
        self.over_budget += loop.time() - started > self._wall_clock_s + GRACE_S + LATE_S
        return task

    def end(self, index: int, how: str, wrong: str = "") -> None:
        """Note how a conversation ended, and its errors, if any."""
        self.stops[how] += 1
        if wrong:
            self.is_wrong(index, wrong)
        else:
            self.complete[index // GROUP] += 1

    def is_wrong(self, index: int, text: str) -> None:
        """Record an error in a conversation."""
        self.wrong.append(f"conversation {index}: {text}")

    def groups_incomplete(self) -> int:
        """Return how many groups lack a conversation that ended as it has to."""
        sizes = Counter(index // GROUP for index in range(len(self.plans)))
        return sum(count != sizes[group] for group, count in enumerate(self.complete))

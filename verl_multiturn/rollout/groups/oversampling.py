"""Over-sampling: more samples of a prompt begin than are needed, and the first valid ones stay.

A sample is one conversation of a group. `FirstValid` decides about the samples of one group:

    begins ──▶ running ──ends, valid──▶ stays                              the first `wanted` of them
                  │    ──ends, invalid─▶ waits ──all others have ended──▶ stays, while there are places
                  │                        └────the group is full───────▶ cut
                  └──────the group is full─────────────────────────────▶ cut

Invariants:
- at most `wanted` samples stay, and which ones is decided at the moment when a sample ends;
- a sample that stays is never cut, and a sample that was cut never stays, even if it ends by itself meanwhile;
- a sample that fails takes no place. Its error is raised, as without over-sampling; that of a cut sample is logged.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from fractions import Fraction
from typing import Any

from verl_multiturn.describe import describe

logger = logging.getLogger(__name__)


def samples_to_start(wanted: int, rate: float) -> int:
    """Return how many samples begin so that `wanted` of them may stay: ⌈wanted / (1 - rate)⌉.

    The rate is taken as it is written in decimals. Example: 21 / (1 - 0.3) is 30, and a little more in floats.

    Args:
        wanted: Number of samples that stay.
        rate: Share of the started samples that is cut, from 0 to 0.5.
    """
    return math.ceil(wanted / (1 - Fraction(str(rate))))


class FirstValid:
    """The samples of one group, of which the first `wanted` valid ones stay.

    Args:
        wanted: Number of samples that may stay.
        started: Number of samples that begin; their numbers are 0 to `started - 1`.
    """

    def __init__(self, wanted: int, started: int) -> None:
        self._places = wanted
        self._running: dict[int, asyncio.Task[Any] | None] = dict.fromkeys(range(started))
        """The task of each sample that is neither over nor cut; None before it begins."""
        self._waiting: dict[int, asyncio.Future[bool]] = {}
        """Samples that ended invalid, in the order of their ends."""
        self._cut: set[int] = set()
        self._ended_at: dict[int, float] = {}
        self.cut_samples = 0
        """Number of samples that were cut and are over."""
        self.cut_s = 0.0
        """Seconds that these samples took from their beginnings to their ends."""

    async def run(self, number: int, sample: Callable[[], Awaitable[Any]]) -> None:
        """Run a sample; return when it is over, also when it was cut.

        Args:
            number: Number of the sample.
            sample: The sample's work, which asks `stays` once it has a result.

        Raises:
            Exception: The sample failed, and was not cut before.
            CancelledError: The caller cancelled.
        """
        began = time.monotonic()
        try:
            if number not in self._cut:
                self._running[number] = asyncio.current_task()
                await sample()
        except (asyncio.CancelledError, Exception) as error:
            if number not in self._cut:
                raise
            if isinstance(error, Exception):
                logger.error("sample %d failed after it was cut: %s", number, describe(error))
        finally:
            if number in self._cut:
                self.cut_samples += 1
                self.cut_s += self._ended_at.get(number, time.monotonic()) - began
            elif number in self._running:  # it ended without a result
                del self._running[number]
                self._settle()

    def was_cut(self, number: int) -> bool:
        """Return whether a sample was cut."""
        return number in self._cut

    async def stays(self, number: int, valid: bool) -> bool:
        """Return whether a sample that has a result stays. An invalid one waits until that is known.

        Args:
            number: Number of the sample.
            valid: Whether its result is valid.
        """
        self._ended_at[number] = time.monotonic()
        if number in self._cut:
            return False
        del self._running[number]
        if valid:
            self._places -= 1
            self._settle()
            return True
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        self._settle()
        return await waiting

    def _settle(self) -> None:
        """Make each decision that is possible now."""
        if self._places and self._running:
            return
        for number, waiting in self._waiting.items():
            if waiting.done():  # decided before, or cancelled
                continue
            waiting.set_result(self._places > 0)
            if self._places:
                self._places -= 1
            else:
                self._cut.add(number)
        self._cut |= self._running.keys()
        for task in self._running.values():
            if task is not None:
                task.cancel()
        self._running.clear()

"""`Course`: how a share developed over a run, in windows of as many steps each.

A fault of a service may be over by the end, and still has spoilt the training meanwhile. The model's own early mistakes
are the reason for training: there the last window counts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from verl_multiturn.evaluation.estimates import wilson
from verl_multiturn.observe.explain.facts import ConversationFacts
from verl_multiturn.observe.explain.finding import Kind

WINDOWS = 4
FEWEST = 16
"""Fewest conversations or calls for which a share is evidence."""
SOMETIMES = 2.5
"""A service's fault that is over is an alarm from so many times the share on that is one at the end."""


def windows(talks: Iterable[ConversationFacts], most: int = WINDOWS) -> list[list[ConversationFacts]]:
    """Return conversations in up to `most` windows of about as many steps each, in order.

    Args:
        talks: The conversations.
        most: The most windows.
    """
    by_step: dict[int, list[ConversationFacts]] = defaultdict(list)
    for talk in talks:
        by_step[talk.step].append(talk)
    steps = sorted(by_step)
    count = min(most, len(steps))
    bounds = [round(number * len(steps) / count) for number in range(count + 1)] if count else []
    return [[talk for step in steps[begin:end] for talk in by_step[step]] for begin, end in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class Course:
    """A share in each window of a run."""

    hits: Sequence[int]
    of: Sequence[int]

    @property
    def enough(self) -> bool:
        """Return whether there was enough evidence."""
        return sum(self.of) >= FEWEST

    @property
    def total(self) -> float:
        """Return the share in the whole run."""
        return sum(self.hits) / max(1, sum(self.of))

    @property
    def shares(self) -> list[float]:
        """Return the shares, rounded."""
        return [round(hits / max(1, of), 4) for hits, of in zip(self.hits, self.of, strict=True)]

    @property
    def last(self) -> float:
        """Return the share in the last window that has enough."""
        return self.shares[self._judged[-1]] if self._judged else self.total

    @property
    def worst(self) -> float:
        """Return the largest share of a window that has enough."""
        return max((self.shares[at] for at in self._judged), default=self.total)

    @property
    def _judged(self) -> list[int]:
        return [at for at, of in enumerate(self.of) if of >= FEWEST]

    def kind(self, note: float, alarm: float, is_service: bool) -> Kind | None:
        """Return its kind by its thresholds; None: nothing.

        Args:
            note: From this share on it is a note.
            alarm: From this share in the last window on it is an alarm.
            is_service: Whether something else than the model causes it, so that an earlier window counts, too.
        """
        if not self.enough:
            return None
        last = self._judged[-1] if self._judged else 0
        sure = surely(self.hits[last], self.of[last]) >= alarm / 2
        if (self.last >= alarm and sure) or (is_service and self.worst >= SOMETIMES * alarm):
            return "alarm"
        return "note" if self.last >= note or self.worst >= alarm else None


def course(talks: Iterable[ConversationFacts], count: Callable[[ConversationFacts], tuple[int, int]]) -> Course:
    """Return the course of a share.

    Args:
        talks: The conversations.
        count: Returns for one how many were hit, and of how many.
    """
    found = [[count(talk) for talk in window] for window in windows(talks)]
    return Course([sum(hits for hits, _ in each) for each in found], [sum(of for _, of in each) for each in found])


def surely(hits: int, of: int, z: float = 2.0) -> float:
    """Return the lower end of the Wilson interval of a share: its least plausible value."""
    return wilson(hits / of, of, z).low if of else 0.0

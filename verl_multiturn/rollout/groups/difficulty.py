"""`Pools`: which data rows are drawn again, and which are passed over: `custom.multiturn.filter=difficulty`.

The last group of a data row decides its pool:

    mixed     it had a signal: the row is drawn again, in the place of every second fresh one
    right     all valid conversations were right: the next time that the data loader gives the row, it is passed over
    wrong     none was right, or fewer than two were valid: so, too

Of the mixed rows that one goes first whose next group has the largest chance of a signal, from its recent right share:

    chance = 1 - p^n - (1 - p)^n,   p = (right + 1) / (conversations + 2)

Each group halves the weight of those before it. Nothing is drawn at random, so that a run that goes on from a
checkpoint draws the same rows as without a stop.

Invariants:
- a row is in at most one group at a time, unless all rows are in one;
- a row is drawn again at most `MOST_AGAIN` times before the data loader has to give it anew;
- a row that is passed over is taken the next time, so that none is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

MOST_AGAIN = 4
_FRESH_EVERY = 2
_OLDER = 0.5
"""Factor of the weight of earlier groups."""


@dataclass
class RowDifficulty:
    """The history of a data row."""

    right: float = 0.0
    """Conversations that were right, those of earlier groups with less weight."""
    of: float = 0.0
    """Valid conversations, with the same weights."""
    signal: bool = False
    """Whether its last group had a signal."""
    step: int = 0
    """Step that took the last group."""
    again: int = 0
    """How often it was drawn again since the data loader gave it."""
    passed: bool = False
    """Whether it was passed over when the data loader gave it last."""

    @property
    def pool(self) -> str:
        """Name of its pool."""
        return "mixed" if self.signal else "right" if self.of and self.right >= self.of / 2 else "wrong"


class Pools:
    """The data rows of a run, by their positions in its data set.

    Args:
        group_size: `rollout.n`.
    """

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._turn = 0
        self.seen: dict[int, RowDifficulty] = {}
        """The history of each row whose group was taken, by position."""
        self.drawn: dict[str, int] = {}
        """Positions of the rows of groups that were not taken yet, by uid."""
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the counts of the step before."""
        self._again = self._passed = 0

    def metrics(self) -> dict[str, float]:
        """Return the step's counts: prompts drawn again, rows passed over, and the size of each pool."""
        sizes = Counter(seen.pool for seen in self.seen.values())
        return {
            "again": self._again,
            "passed_over": self._passed,
            **{f"pool/{name}": sizes[name] for name in ("mixed", "right", "wrong")},
        }

    def chance(self, position: int) -> float:
        """Return the estimated chance that the next group of a row has a signal."""
        seen = self.seen[position]
        right = (seen.right + 1) / (seen.of + 2)
        return float(1 - right**self._group_size - (1 - right) ** self._group_size)

    def again(self) -> int | None:
        """Return the position of the row to draw again next; None: the next one is the data loader's."""
        self._turn += 1
        if self._turn % _FRESH_EVERY == 0:
            return None
        running = set(self.drawn.values())
        mixed = [
            position
            for position, seen in self.seen.items()
            if seen.signal and seen.again < MOST_AGAIN and position not in running
        ]
        if not mixed:
            return None
        first = max(mixed, key=lambda position: (self.chance(position), self.seen[position].step, -position))
        self.seen[first].again += 1
        self._again += 1
        return first

    def passes_over(self, position: int) -> bool:
        """Return whether a row that the data loader gives is not taken this time."""
        seen = self.seen.get(position)
        running = position in self.drawn.values()
        if running or (seen is not None and not seen.signal and not seen.passed):
            if seen is not None and not running:
                seen.passed = True
            self._passed += 1
            return True
        if seen is not None:
            seen.passed, seen.again = False, 0
        return False

    def draw(self, uid: str, position: int) -> None:
        """Note that a group of a row begins."""
        self.drawn[uid] = position

    def rename(self, uids: Mapping[str, str]) -> None:
        """Note that groups are begun anew under other uids."""
        for old, new in uids.items():
            if old in self.drawn:
                self.drawn[new] = self.drawn.pop(old)

    def drop(self, uids: Collection[str]) -> None:
        """Note that groups ended without a judgement."""
        for uid in uids:
            self.drawn.pop(uid, None)

    def judge(self, uid: str, right: int, of: int, signal: bool, step: int) -> None:
        """Note the outcome of a group.

        Args:
            uid: The group.
            right: Number of its valid conversations that were right.
            of: Number of its valid conversations.
            signal: Whether it had a signal.
            step: The step that takes it.
        """
        if (position := self.drawn.pop(uid, None)) is None:
            return
        seen = self.seen.setdefault(position, RowDifficulty())
        seen.right, seen.of = right + _OLDER * seen.right, of + _OLDER * seen.of
        seen.signal, seen.step = signal, step

    def state(self) -> dict[str, Any]:
        """Return all of it, for a checkpoint."""
        seen = {str(position): asdict(each) for position, each in self.seen.items()}
        return {"turn": self._turn, "seen": seen, "drawn": dict(self.drawn)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a value of `state`.

        Raises:
            LookupError, TypeError, ValueError: It is something else.
        """
        seen = {int(position): RowDifficulty(**each) for position, each in state["seen"].items()}
        drawn = {str(uid): int(position) for uid, position in state["drawn"].items()}
        self._turn, self.seen, self.drawn = int(state["turn"]), seen, drawn

    def keep(self, uids: Collection[str], rows: int) -> None:
        """Forget the groups that a checkpoint does not bring back, and the rows that the data set no longer has.

        Args:
            uids: The groups that are there. In `sync` there is none: those of a step that broke off are gone.
            rows: Number of rows of the data set.
        """
        for uid, at in self.drawn.items():
            if uid not in uids and at in self.seen:  # it was drawn again; else `again` is 0 already
                self.seen[at].again = max(0, self.seen[at].again - 1)
        self.drawn = {uid: at for uid, at in self.drawn.items() if uid in uids and at < rows}
        self.seen = {at: seen for at, seen in self.seen.items() if at < rows}

"""Problems that come twice, or that are in the test split; and the count of all that is left out."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_RUN = 13  # words
_ALIKE = 0.5
Words = tuple[str, ...]


@dataclass
class Tally:
    """Count the rows of a split: how many came and were kept, and why the others were not."""

    read: int = 0
    kept: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    tests: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for the report."""
        return {
            "read": self.read,
            "kept": self.kept,
            "left_out": dict(self.left_out.most_common()),
            "tests": dict(self.tests.most_common()),
        }


def words_of(statement: str) -> Words:
    """Return the words and numbers of a statement in lower case, by which problems are compared."""
    return tuple(re.findall(r"[^\W_]+", statement.lower())) or (statement,)


def runs_of(words: Words) -> set[Words]:
    """Return the runs of 13 words of a statement, or all its words where they are fewer."""
    return {words[start : start + _RUN] for start in range(max(1, len(words) - _RUN + 1))}


class KnownStatements:
    """Statements of the test split, against which those for training are compared.

    Two problems are alike if they share half of the runs of 13 words of the shorter one. Common phrases about the input
    are not enough for that, and a statement with other examples or another layout is still found.
    """

    def __init__(self) -> None:
        self._owners: dict[Words, list[int]] = {}
        self._sizes: list[int] = []

    def add(self, words: Words) -> None:
        """Add a statement of the test split."""
        runs = runs_of(words)
        for run in runs:
            self._owners.setdefault(run, []).append(len(self._sizes))
        self._sizes.append(len(runs))

    def has_one_like(self, words: Words) -> bool:
        """Return whether a statement is like one of the test split."""
        runs = runs_of(words)
        shared = Counter(owner for run in runs for owner in self._owners.get(run, ()))
        return any(count >= _ALIKE * min(len(runs), self._sizes[owner]) for owner, count in shared.items())

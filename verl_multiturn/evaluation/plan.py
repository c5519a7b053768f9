"""The conversations of an evaluation: rows × samples; those without a valid, scored conversation remain to be run.

Invariants:
- a conversation has one name forever, `ROW-SAMPLE`, the row's number in its file and the sample's. So the rest after a
  kill is a difference of sets;
- a folder belongs to one question. Another model, other rows or other settings in the same folder are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from verl_multiturn.describe import printable, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.paths import read_regular
from verl_multiturn.records.write.run_file import write_whole

MANIFEST = "evaluation.json"
"""Name of the file that describes a folder's evaluation."""
_ASKED = (
    "recipe", "variant", "overrides", "only", "model", "samples", "temperature", "engine", "rows_digest",
    "reward_digest", "settings_digest",
)  # fmt: skip
"""Entries of that file that must be the same when an evaluation goes on."""


class SampleId(NamedTuple):
    """One conversation of an evaluation."""

    row: int
    """Number of the row in its file, from 0."""
    sample: int
    """Number of the sample, from 0."""

    @property
    def name(self) -> str:
        """Name of the conversation, `ROW-SAMPLE`."""
        return f"{self.row}-{self.sample}"


@dataclass(frozen=True)
class DataRow:
    """A row of the data set."""

    number: int
    """Number of the row in its file, from 0; of several files, in all of them together."""
    digest: str
    """Result of `row_files.row_digest`."""
    data_source: str
    position: int
    """Place in verl's data set, which leaves out prompts that are too long."""


@dataclass(frozen=True)
class Plan:
    """All conversations of an evaluation."""

    rows: tuple[DataRow, ...]
    """The rows, in the order of their file."""
    samples: int
    """Conversations for each row."""

    @property
    def digest(self) -> str:
        """Digest (blake2b-64) of the rows: their numbers and their contents."""
        told = "\n".join(f"{row.number} {row.digest}" for row in self.rows)
        return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()

    def left(self, done: Collection[SampleId]) -> list[tuple[DataRow, int]]:
        """Return the rows and the numbers of the samples that are not done, in the rows' order."""
        return [
            (row, sample)
            for row in self.rows
            for sample in range(self.samples)
            if SampleId(row.number, sample) not in done
        ]


def numbered(digests: Sequence[str], kept: Sequence[str]) -> list[int]:
    """Return the number of each kept row, of which rows that are equal keep their order.

    Args:
        digests: Digests of all rows of the file, in their order.
        kept: Digests of those that a data set has kept, in its order.

    Raises:
        ConfigError: The data set has a row that the file has not.
    """
    places: dict[str, list[int]] = {}
    for number, digest in enumerate(digests):
        places.setdefault(digest, []).append(number)
    used: Counter[str] = Counter()
    found = []
    for digest in kept:
        numbers = places.get(digest, [])
        if used[digest] >= len(numbers):
            raise ConfigError(
                "the data set has a row that its file has not, so that no row can be named; leave the rows as verl's "
                "own data set reads them (data.custom_cls)"
            )
        found.append(numbers[used[digest]])
        used[digest] += 1
    return found


def only_source(rows: Sequence[DataRow], source: str | None) -> tuple[DataRow, ...]:
    """Return the rows of a data source; None: all.

    Raises:
        ConfigError: There are none.
    """
    chosen = tuple(row for row in rows if source is None or row.data_source == source)
    if not chosen:
        known = sorted({row.data_source for row in rows})
        what = "there are no rows" if source is None else f"--only {source!r}: there is no such row"
        raise ConfigError(f"{what}; the file's data sources are {printable(', '.join(known)) or 'none'}")
    return chosen


@dataclass
class EvaluationProgress:
    """The progress of an evaluation, as one line without the results so far.

    Short conversations end first, and are not a sample of all (`results.Results.shown` has the rows to show).
    """

    plan: Plan
    scores: dict[SampleId, float] = field(default_factory=dict)
    invalid: int = 0
    failed: int = 0
    """Conversations whose reward function raised."""

    def line(self) -> str:
        """Return the line, for example `rows 41 of 64 whole, 388 of 512 conversations, 3 invalid`."""
        ended = Counter(asked.row for asked in self.scores)
        whole = [ended[row.number] == self.plan.samples for row in self.plan.rows]
        total = len(whole) * self.plan.samples
        text = f"rows {sum(whole)} of {len(whole)} whole, {len(self.scores)} of {total} conversations"
        text += f", {self.invalid} invalid" if self.invalid else ""
        return text + (f", {self.failed} failed" if self.failed else "")


def begin(folder: Path, told: Mapping[str, Any]) -> dict[str, Any]:
    """Write an evaluation's description into its folder, or go on with the one there; return the file's content.

    Args:
        folder: Folder of the evaluation.
        told: Content of the file.

    Raises:
        ConfigError: The folder holds another evaluation.
    """
    path, wanted = folder / MANIFEST, json.loads(json.dumps(dict(told)))
    if not path.exists():
        write_whole(path, json.dumps(wanted, indent=2) + "\n")
        return dict(wanted)
    try:
        there = json.loads(read_regular(path, within=folder))
        # The same weights may have been moved.
        pairs = [(there[name], wanted[name]) for name in _ASKED]
        pairs = [(old["hash"], new["hash"]) if isinstance(old, dict) else (old, new) for old, new in pairs]
        differing = next((name for name, (old, new) in zip(_ASKED, pairs, strict=True) if old != new), None)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read ({error!r}); name another folder with --out") from None
    if differing is not None:
        raise ConfigError(
            f"{str(folder)!r} holds an evaluation with {differing} {show(there[differing])}, and this one has "
            f"{show(wanted[differing])}; name another folder with --out"
        )
    return dict(there)


def end(folder: Path, ended: float) -> None:
    """Note that all conversations of an evaluation have ended."""
    path = folder / MANIFEST
    told = json.loads(read_regular(path, within=folder))
    write_whole(path, json.dumps({**told, "ended": ended}, indent=2) + "\n")

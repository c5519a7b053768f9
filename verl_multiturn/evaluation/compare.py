"""`compare`: two evaluations of the same rows, row by row.

Invariants:
- rows or rewards that differ between both are refused, never skipped in silence;
- where no `acc` was reported, the rewards of both evaluations together show who is right;
- of evaluations that are not over, rows count that both may show (`Results.shown`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from verl_multiturn.describe import printable, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.estimates import PairedDifference, gain, is_share, paired
from verl_multiturn.evaluation.results import EvaluatedRow, EvaluatedSample, Results
from verl_multiturn.evaluation.tables import ALL, interval_json, interval_notes, interval_text, progress_line

_HALF = 0.5
_LISTED = 20
"""Rows that flipped in the table."""
_SETTINGS = ("recipe", "variant", "overrides", "samples", "temperature", "engine", "settings_digest")
"""Settings that may differ, and are reported: they may cause a difference of rewards."""


class Pair(NamedTuple):
    """A row in two evaluations."""

    first: EvaluatedRow
    second: EvaluatedRow

    @property
    def difference(self) -> float:
        """By how much the second model's mean reward is larger."""
        return gain(self.first.score, self.second.score)

    @property
    def flip(self) -> int:
        """1: mostly wrong, and mostly right of the second; -1: the other way round; 0: neither."""
        before, after = self.first.rate, self.second.rate
        return (before < _HALF < after) - (after < _HALF < before)

    @property
    def shown(self) -> tuple[EvaluatedSample, EvaluatedSample]:
        """A conversation of each that shows how it flipped: a wrong one and a right one."""
        first, second = (
            next(sample for sample in row.samples if sample.right == (row.rate > _HALF))
            for row in (self.first, self.second)
        )
        return first, second


@dataclass(frozen=True)
class Comparison:
    """Two evaluations, row by row."""

    first: Results
    second: Results
    pairs: tuple[Pair, ...]
    """The rows that both show, in their order."""

    @property
    def difference(self) -> PairedDifference:
        """By how much the second model is better."""
        return _difference(self.pairs)

    @property
    def flipped(self) -> list[Pair]:
        """The rows that flipped."""
        return [pair for pair in self.pairs if pair.flip]

    def by_source(self) -> dict[str, list[Pair]]:
        """Return the rows by data source, in their order."""
        groups: dict[str, list[Pair]] = {}
        for pair in self.pairs:
            groups.setdefault(pair.first.data_source, []).append(pair)
        return groups


def compare(first: Results, second: Results) -> Comparison:
    """Compare two evaluations.

    Raises:
        ConfigError: They are of other rows or rewards, or have no row in common that both may show.
    """
    _check_same(first, second)
    both = first.scores | second.scores
    first, second = first.judged(both), second.judged(both)
    others = {row.number: row for row in second.shown}
    pairs = tuple(Pair(row, others[row.number]) for row in first.shown if row.number in others)
    if not pairs:
        raise ConfigError(
            f"{str(first.folder)!r} and {str(second.folder)!r} have no whole row in common yet; let both go on"
        )
    return Comparison(first, second, pairs)


def _check_same(first: Results, second: Results) -> None:
    """Refuse two evaluations that cannot be compared.

    Raises:
        ConfigError: See `compare`.
    """
    names = f"{str(first.folder)!r} and {str(second.folder)!r}"
    known = {row.number: row.digest for row in first.rows}
    for row in second.rows:
        if known.get(row.number, row.digest) != row.digest:
            raise ConfigError(
                f"{names}: row {row.number} is {known[row.number]} in one and {row.digest} in the other; evaluate both "
                "models on the same file of rows"
            )
    one, other = first.evaluation, second.evaluation
    if (one.rows, one.rows_digest) != (other.rows, other.rows_digest):
        raise ConfigError(
            f"{names} are of other rows, {one.rows} ({one.rows_digest}) and {other.rows} ({other.rows_digest}); "
            "evaluate both models on the same rows, with the same --rows and --only"
        )
    if one.reward_digest != other.reward_digest:
        raise ConfigError(
            f"{names} have other reward functions, {show(one.reward_digest)} and {show(other.reward_digest)}; evaluate "
            "both models with the same one"
        )


def _difference(pairs: Sequence[Pair]) -> PairedDifference:
    rewards = [sample.score for pair in pairs for row in pair for sample in row.samples if sample.score is not None]
    scores = [[row.score for row in rows] for rows in zip(*pairs, strict=True)]
    found = paired(scores[0], scores[1], share=is_share(rewards))
    assert found is not None, "a group has a row, and `compare` refuses evaluations without a row in common"
    return found


def comparison_table(comparison: Comparison) -> Group:
    """Return a comparison as a table for a person."""
    first, second = comparison.first, comparison.second
    parts: list[Any] = [
        Text(printable(f"{name}: {each.folder}, model {each.evaluation.model.hash}, {progress_line(each)}"))
        for name, each in (("first", first), ("second", second))
    ]
    parts += [Text(f"{name}: {show(a)} and {show(b)}") for name, a, b in _differing(first, second)]
    differences = {source: _difference(pairs) for source, pairs in _groups(comparison).items()}
    parts.append(_table(comparison, differences))
    parts += interval_notes(differences)
    if flipped := comparison.flipped:
        parts.append(_flipped(flipped))
        if len(flipped) > _LISTED:
            parts.append(Text(f"and {len(flipped) - _LISTED} more rows that flipped"))
        parts.append(Text(f"verl-multiturn view {first.folder} {second.folder}    shows these side by side"))
    return Group(*parts)


def comparison_summary(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON. `gained` and `lost` are the numbers of the rows that flipped.

    `differ` is the number of rows that differ. `no_interval` has the reason why `interval` is null. `other_settings`
    are those that differ, with both values.
    """
    found, pairs = comparison.difference, comparison.pairs
    return {
        "first": comparison.first.evaluation.model.hash,
        "second": comparison.second.evaluation.model.hash,
        "rows": found.rows,
        "asked": comparison.first.evaluation.rows,
        "difference": round(found.mean, 6),
        "interval": interval_json(found),
        "no_interval": found.no_interval or None,
        "p": float(f"{found.p:.4g}"),
        "differ": found.differ,
        "better": sum(pair.difference > 0 for pair in pairs),
        "worse": sum(pair.difference < 0 for pair in pairs),
        "gained": [pair.first.number for pair in pairs if pair.flip > 0],
        "lost": [pair.first.number for pair in pairs if pair.flip < 0],
        "other_settings": {name: [a, b] for name, a, b in _differing(comparison.first, comparison.second)},
    }


def _differing(first: Results, second: Results) -> Iterable[tuple[str, Any, Any]]:
    for name in _SETTINGS:
        values = [getattr(each.evaluation, name) for each in (first, second)]
        if values[0] != values[1]:
            yield name, values[0], values[1]


def _groups(comparison: Comparison) -> dict[str, Sequence[Pair]]:
    """Return the rows of each line of the table: by data source and, of several, all."""
    groups: dict[str, Sequence[Pair]] = dict(comparison.by_source())
    return {**groups, ALL: comparison.pairs} if len(groups) > 1 else groups


def _table(comparison: Comparison, differences: Mapping[str, PairedDifference]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("data_source", overflow="fold")
    for name in ("rows", "first", "second", "difference", "p", "better", "worse", "gained", "lost"):
        table.add_column(name, justify="right", no_wrap=True)
    for source, pairs in _groups(comparison).items():
        found = differences[source]
        means = [sum(row.score for row in rows) / len(rows) for rows in zip(*pairs, strict=True)]
        difference = f"{found.mean:+.3f} {interval_text(found)}"
        counts = [sum(pair.difference > 0 for pair in pairs), sum(pair.difference < 0 for pair in pairs)]
        counts += [sum(pair.flip == way for pair in pairs) for way in (1, -1)]
        cells = [str(found.rows), f"{means[0]:.3f}", f"{means[1]:.3f}", escape(difference), f"{found.p:.2g}"]
        table.add_row(escape(printable(source)), *cells, *map(str, counts))
    return table


def _flipped(pairs: Sequence[Pair]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("flipped row", justify="right")
    table.add_column("data_source", overflow="fold")
    for name in ("first", "second"):
        table.add_column(f"right in the {name}", justify="right")
    for name in ("first", "second"):
        table.add_column(f"such as, of the {name}", overflow="fold")
    for pair in pairs[:_LISTED]:
        rights = [f"{row.right} of {len(row.samples)}" for row in pair]
        ids = [escape(printable(sample.request_id)) for sample in pair.shown]
        table.add_row(str(pair.first.number), escape(printable(pair.first.data_source)), *rights, *ids)
    return table

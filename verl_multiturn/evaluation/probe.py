"""`probe`: whether reinforcement learning can begin with this model, these rows and this reward.

A policy gradient learns from differences inside a group, and only from behaviour that the model already shows now and
then. So two questions decide: do the rewards of a group differ, and does a group hold the way that should be learnt?

    right            share of the conversations that solve their task
    signal           share of the groups whose rewards differ, with roles those of one role
    graded           share of the groups that are all right, and whose rewards differ all the same
    taken            share of the groups in which a tool is called, in a call that can be read

The first of these that holds is the verdict (`MIN_GROUPS` 0.2, `ENOUGH` 0.95):

    nothing left to learn    right >= ENOUGH and graded < MIN_GROUPS
    warm-start               rows offer tools, and taken < MIN_GROUPS
    go                       signal >= MIN_GROUPS
    harder rows              more groups are all right than without a right one
    easier rows              otherwise

With one useful group in five an update costs the sampling of five groups; below that, a warm start or other rows are
cheaper than steps.

Invariant: a verdict is made of rows of `Results.shown` alone, and reports whether an interval makes it uncertain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from verl_multiturn.describe import printable
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.estimates import Estimate, estimate
from verl_multiturn.evaluation.results import EvaluatedRow, EvaluatedSample, Results
from verl_multiturn.evaluation.tables import interval_json, interval_text, progress_line
from verl_multiturn.evaluation.tool_paths import MALFORMED, NO_TOOL
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rows.reward_numbers import have_signal

MIN_GROUPS = 0.2
"""Share of the groups below which a signal, or the call of a tool, is too rare to learn from."""
ENOUGH = 0.95
"""Share of right conversations from which on a model counts as having learnt its task."""
MANY_CUT = 0.25
"""Share of conversations that a limit cut, from which on a verdict names it."""
_CUT = frozenset(
    {
        StopReason.RESPONSE_LENGTH, StopReason.TURN_LENGTH, StopReason.MAX_ASSISTANT_TURNS, StopReason.MAX_USER_TURNS,
        StopReason.MAX_TOOL_CALLS, StopReason.WALL_CLOCK, StopReason.ENVIRONMENT_TRUNCATED,
    }
)  # fmt: skip


class ProbeAdvice(StrEnum):
    """Advice for a model before reinforcement learning."""

    GO = "go"
    WARM_START = "warm-start"
    EASIER = "easier rows"
    HARDER = "harder rows"
    NOTHING_LEFT = "nothing left to learn"


@dataclass(frozen=True)
class Path:
    """One of the ways in which conversations went."""

    name: str
    """Name of a tool, `NO_TOOL` or `MALFORMED`. A conversation that calls two tools counts at both."""
    share: Estimate
    """Share of the conversations that took it."""
    conversations: int
    right: int
    groups: int
    """Number of groups with a conversation that took it."""


@dataclass(frozen=True)
class Probe:
    """The evidence of a model's conversations about learning from them."""

    verdict: ProbeAdvice
    why: str
    """One sentence, with the figures and thresholds that decided."""
    is_sure: bool
    """Whether no interval of a figure that decided holds its threshold."""
    right: Estimate
    signal: Estimate
    graded: Estimate
    """Share of the groups that are all right, and whose rewards differ all the same."""
    taken: Estimate
    """Share of the groups that call a tool; 0 where rows offer none."""
    offered: tuple[str, ...]
    """Names of the tools that the rows offer."""
    paths: tuple[Path, ...]
    all_right: int
    """Number of groups without a signal in which every conversation is right."""
    all_wrong: int
    """Number of the others without a signal."""
    histogram: tuple[int, ...]
    """Number of groups with 0, 1, … n right conversations."""
    cut: dict[str, int]
    """Number of conversations that a limit cut, by its stop reason."""
    conversations: int

    @property
    def cut_share(self) -> float:
        """Share of the conversations that a limit cut."""
        return sum(self.cut.values()) / self.conversations


def probe(results: Results) -> Probe:
    """Return an evaluation's evidence about learning from such conversations.

    Args:
        results: The evaluation, of two samples or more of each row.

    Raises:
        ConfigError: It has one sample of each row, or no whole row.
    """
    rows = results.shown
    if results.evaluation.samples < 2:
        raise ConfigError(f"{str(results.folder)!r} has one sample of each row, and no group; ask for --samples 8")
    if not rows:
        raise ConfigError(f"{str(results.folder)!r} has no whole row ({progress_line(results)}); repeat the command")
    samples = [sample for row in rows for sample in row.samples]
    offered = tuple(sorted({name for sample in samples for name in sample.paths.offered}))
    equal = [row for row in rows if _is_equal(row)]
    all_right = sum(row.right == len(row.samples) for row in equal)
    stops = Counter(sample.stop_reason for sample in samples)
    figures = {
        "right": _share(rows, lambda row: row.rate, len(samples)),
        "signal": _share(rows, lambda row: not _is_equal(row), len(rows)),
        "graded": _share(rows, lambda row: not _is_equal(row) and row.right == len(row.samples), len(rows)),
        "taken": _share(rows, lambda row: any(sample.paths.called for sample in row.samples), len(rows)),
    }
    paths = tuple(_path(name, rows) for name in (NO_TOOL, *offered, MALFORMED))
    cut = {stop: count for stop, count in stops.most_common() if stop in _CUT}
    made = Probe(
        ProbeAdvice.GO, "", True, figures["right"], figures["signal"], figures["graded"], figures["taken"], offered,
        paths, all_right,
        len(equal) - all_right, tuple(Counter(row.right for row in rows)[n] for n in range(_most(rows) + 1)), cut,
        len(samples),
    )  # fmt: skip
    return _judged(made)


def _most(rows: Sequence[EvaluatedRow]) -> int:
    return max(len(row.samples) for row in rows)


def _is_equal(row: EvaluatedRow) -> bool:
    """Return whether a group's rewards do not differ, as the trainer's metrics count it."""
    return not have_signal([sample.by_role for sample in row.scored])


def _share(rows: Sequence[EvaluatedRow], value: Callable[[EvaluatedRow], float], samples: int) -> Estimate:
    found = estimate([float(value(row)) for row in rows], samples)
    assert found is not None, "there are rows"
    return found


def _path(name: str, rows: Sequence[EvaluatedRow]) -> Path:
    def took(row: EvaluatedRow) -> list[EvaluatedSample]:
        return [sample for sample in row.samples if name in sample.paths.taken]

    own = [sample for row in rows for sample in took(row)]
    share = _share(rows, lambda row: len(took(row)) / len(row.samples), sum(len(row.samples) for row in rows))
    return Path(name, share, len(own), sum(sample.right for sample in own), sum(bool(took(row)) for row in rows))


def _judged(found: Probe) -> Probe:
    """Return a probe with its verdict, its reason and how sure it is."""
    signal, right, taken = found.signal, found.right, found.taken
    decided = [(signal, MIN_GROUPS)]
    has_signal = f"{signal.mean:.2f} of the groups have rewards that differ (at least {MIN_GROUPS:g} should)"
    if right.mean >= ENOUGH and found.graded.mean < MIN_GROUPS:
        verdict, decided = ProbeAdvice.NOTHING_LEFT, [(right, ENOUGH), (found.graded, MIN_GROUPS)]
        why = f"{right.mean:.3f} of the conversations are right ({ENOUGH:g} is enough), and {found.graded.mean:.2f} of "
        why += f"the groups are all right and differ in their rewards (less than {MIN_GROUPS:g})"
    elif found.offered and taken.mean < MIN_GROUPS:
        verdict, decided = ProbeAdvice.WARM_START, [(taken, MIN_GROUPS)]
        why = f"{taken.mean:.2f} of the groups call a tool (at least {MIN_GROUPS:g} should), so that calling is never "
        why += f"found to pay, and {_of(found, MALFORMED):.2f} of the conversations wrote a call that cannot be read"
    elif signal.mean >= MIN_GROUPS:
        verdict, why = ProbeAdvice.GO, has_signal
        if found.offered:
            why += f", and {taken.mean:.2f} call a tool (at least {MIN_GROUPS:g} should)"
            decided.append((taken, MIN_GROUPS))
    else:
        is_easy = found.all_right > found.all_wrong
        verdict = ProbeAdvice.HARDER if is_easy else ProbeAdvice.EASIER
        why = f"only {has_signal}; {found.all_right} groups are all right, {found.all_wrong} have no right one"
        why += f" or all the same reward, and {right.mean:.3f} of the conversations are right"
    if found.cut_share >= MANY_CUT and verdict is not ProbeAdvice.NOTHING_LEFT:
        most = next(iter(found.cut))
        why += f"; {found.cut_share:.2f} were cut by a limit, mostly {most} ({MANY_CUT:g} is many): look at it first"
    if verdict is ProbeAdvice.GO and (never := [path.name for path in found.paths if path.name in found.offered
                                           and not path.conversations]):  # fmt: skip
        why += f"; never called: {', '.join(never)}"
    return Probe(**{**found.__dict__, "verdict": verdict, "why": why, "is_sure": not any(_holds(*d) for d in decided)})


def _of(found: Probe, name: str) -> float:
    return next(path.share.mean for path in found.paths if path.name == name)


def _holds(figure: Estimate, threshold: float) -> bool:
    return figure.interval is None or figure.interval.low < threshold < figure.interval.high


def probe_table(results: Results, found: Probe) -> Group:
    """Return a probe as a table for a person."""
    rows = found.signal.rows
    parts: list[Any] = [Text(progress_line(results)), _paths(found)]
    counts = " ".join(f"{right}:{groups}" for right, groups in enumerate(found.histogram) if groups)
    parts.append(Text(f"groups by right of {len(found.histogram) - 1}: {counts}"))
    parts.append(
        Text(
            f"groups with a signal {_text(found.signal)} of {rows}; without: {found.all_right} all right, "
            f"{found.all_wrong} others"
        )
    )
    if found.offered:
        parts.append(Text(f"groups that call a tool {_text(found.taken)}"))
    cut = ", ".join(f"{stop} {count}" for stop, count in found.cut.items())
    parts.append(Text(f"right {_text(found.right)}; cut by a limit {found.cut_share:.3f}{f' ({cut})' if cut else ''}"))
    unsure = "" if found.is_sure else " An interval holds its threshold: more rows would make it sure."
    parts.append(Text(printable(f"{found.verdict}: {found.why}.{unsure}"), style="bold"))
    return Group(*parts)


def probe_summary(results: Results, found: Probe) -> dict[str, Any]:
    """Return a probe as JSON. Intervals are lists of two numbers, or null; `histogram[c]` groups have c right ones."""
    told = {"right": found.right, "signal": found.signal, "graded": found.graded, "taken": found.taken}
    return {
        "verdict": str(found.verdict),
        "why": found.why,
        "sure": found.is_sure,
        "rows": found.signal.rows,
        "asked": results.evaluation.rows,
        "samples": results.evaluation.samples,
        "model": results.evaluation.model.hash,
        **{name: round(each.mean, 6) for name, each in told.items()},
        **{f"{name}_interval": interval_json(each) for name, each in told.items()},
        "all_right": found.all_right,
        "all_wrong": found.all_wrong,
        "histogram": list(found.histogram),
        "cut": found.cut,
        "paths": {
            path.name: {
                "share": round(path.share.mean, 6),
                "interval": interval_json(path.share),
                "conversations": path.conversations,
                "right": path.right,
                "groups": path.groups,
            }
            for path in found.paths
        },
        "thresholds": {"groups": MIN_GROUPS, "right": ENOUGH, "cut": MANY_CUT},
    }


def _paths(found: Probe) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("path", overflow="fold")
    for name in ("conversations", "share", "right", "groups"):
        table.add_column(name, justify="right", no_wrap=True)
    for path in found.paths:
        right = f"{path.right / path.conversations:.3f}" if path.conversations else ""
        cells = (str(path.conversations), escape(_text(path.share)), right, str(path.groups))
        table.add_row(escape(printable(path.name)), *cells)
    return table


def _text(figure: Estimate) -> str:
    return f"{figure.mean:.3f} {interval_text(figure)}"

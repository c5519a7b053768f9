"""The table of an evaluation, and its one line of JSON.

Only rows of `Results.shown` are in the figures. Failures are reported for all conversations that ended.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from verl_multiturn.describe import printable
from verl_multiturn.evaluation.estimates import Estimate, PairedDifference
from verl_multiturn.evaluation.figures import Figures, Price, by_source, figures_of
from verl_multiturn.evaluation.results import Results

_NAMED = 3
"""Conversations that are named for each way to fail."""
ALL = "all"


def table_of(results: Results, price: Price | None = None) -> Group:
    """Return an evaluation as tables for a person; print it with a `rich.console.Console`.

    Args:
        results: The contents of its folder.
        price: The price of tokens; None: not known.
    """
    parts: list[Any] = [Text(printable(line)) for line in _heads(results)]
    found = by_source(results, price)
    if len(found) > 1 and (whole := figures_of(results.shown, results.evaluation.samples, price)) is not None:
        found[ALL] = whole
    if found:
        parts.append(_figures(found, results.evaluation.samples, price is not None))
        parts += interval_notes({source: each.avg for source, each in found.items()})
    if failures := failures_of(results):
        parts.append(_failures(failures))
    parts += [Text(printable(fault)) for fault in results.faults]
    return Group(*parts)


def summary_of(results: Results, price: Price | None = None) -> dict[str, Any]:
    """Return the object of the last line.

    `rows` are those that the figures are made of, `asked` all, `whole` those that are whole. An interval is a list of
    two numbers, or null; then `avg_no_interval` gives the reason. `benchmark` is there for an evaluation by name.
    `rewards_failed` and `rewards_timed_out` count scored conversations whose reward broke or was late.
    """
    evaluation = results.evaluation
    shown = figures_of(results.shown, evaluation.samples, price)
    return {
        "rows": len(results.shown),
        "samples": evaluation.samples,
        "model": evaluation.model.hash,
        **_summed(shown),
        "sources": {source: _summed(figures) for source, figures in by_source(results, price).items()},
        "asked": evaluation.rows,
        "whole": results.whole,
        "conversations": results.count("scored"),
        "invalid": results.count("invalid"),
        "failed": results.count("failed"),
        "rewards_failed": results.failed_rewards,
        "rewards_timed_out": results.late_rewards,
        "faults": len(results.faults),
        **({} if evaluation.benchmark is None else {"benchmark": evaluation.benchmark.model_dump()}),
    }


def failures_of(results: Results) -> dict[tuple[str, str], list[str]]:
    """Return the request ids of conversations that failed, by their kind and their stop reason; most first.

    Their kind is `wrong` (they have a reward, and did not solve their task), `reward failed` (wrong, since it broke or
    was late), `invalid` or `failed`. Those of the first two kinds are of the rows that are shown.
    """
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in results.shown:
        for sample in row.samples:
            if not sample.right:
                has_verdict = not (sample.reward_failed or sample.reward_timed_out)
                found["wrong" if has_verdict else "reward failed", sample.stop_reason].append(sample.request_id)
    for row in results.rows:
        for sample in row.samples:
            if sample.state != "scored":
                found[sample.state, sample.stop_reason].append(sample.request_id)
    return dict(sorted(found.items(), key=lambda entry: (-len(entry[1]), entry[0])))


def interval_text(found: Estimate | PairedDifference) -> str:
    """Return an interval as a table has it. Example: `[0.230 0.317]`."""
    return "[no interval]" if found.interval is None else f"[{found.interval.low:.3f} {found.interval.high:.3f}]"


def interval_json(found: Estimate | PairedDifference) -> list[float] | None:
    """Return an interval as two numbers; None where there is none."""
    return None if found.interval is None else [round(bound, 6) for bound in found.interval]


def interval_notes(named: Mapping[str, Estimate | PairedDifference]) -> list[Text]:
    """Return a line for each figure without an interval, which gives the reason.

    Args:
        named: The figures by the first cell of their line in the table.
    """
    return [
        Text(printable(f"{name}: no interval: {found.no_interval}")) for name, found in named.items()
        if found.interval is None
    ]  # fmt: skip


def progress_line(results: Results) -> str:
    """Return how far it is. Example: `rows 41 of 64 whole, 388 of 512 conversations, 3 invalid`."""
    evaluation = results.evaluation
    text = f"rows {results.whole} of {evaluation.rows} whole, "
    text += f"{results.count('scored')} of {evaluation.rows * evaluation.samples} conversations"
    counts = {state: results.count(state) for state in ("invalid", "failed")}
    return text + "".join(f", {count} {state}" for state, count in counts.items() if count)


def _heads(results: Results) -> list[str]:
    evaluation = results.evaluation
    asked = f"model {evaluation.model.hash}, {evaluation.samples} samples a row at temperature {evaluation.temperature}"
    lines = [f"{asked}, engine {evaluation.engine}", progress_line(results)]
    if (benchmark := evaluation.benchmark) is not None:
        departures = ", ".join(benchmark.departures)
        how = f"; departures from its protocol: {departures}" if departures else ", by its protocol"
        lines.insert(1, f"benchmark {benchmark.name}{how}")
    left_out = results.whole - len(results.shown)
    if left_out:
        lines.append(
            f"figures are of the first {len(results.shown)} of these: {left_out} may be there only because their "
            "conversations were short"
        )
    found = {"broke": results.failed_rewards, "was late": results.late_rewards}
    if told := [f"{how} in {count}" for how, count in found.items() if count]:
        lines.append(
            f"the reward {' and '.join(told)} of {results.count('scored')} conversations, which score 0 whatever their "
            f"answer: verl-multiturn explain {shlex.quote(str(results.folder))}"
        )
    if results.is_over and results.whole < results.evaluation.rows:
        lines.append("rows with an invalid or failed conversation are left out; the same command asks for these again")
    return lines


def _figures(found: dict[str, Figures], samples: int, priced: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("data_source", overflow="fold")
    names = ["rows", f"avg@{samples}", *([f"pass@{samples}"] if samples > 1 else [])]
    names += ["calls", "tokens", "cached", "seconds", *(["price"] if priced else [])]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for source, each in found.items():
        cells = [escape(printable(source)), str(each.rows), _estimate_text(each.avg)]
        cells += [_estimate_text(each.passes[samples])] if samples > 1 else []
        cells += [f"{each.calls:.2f}", f"{each.tokens:.1f}", "" if each.cached is None else f"{each.cached:.0%}"]
        table.add_row(*cells, f"{each.seconds:.1f}", *([f"{each.cost:.4f}"] if each.cost is not None else []))
    return table


def _estimate_text(found: Estimate) -> str:
    return escape(f"{found.mean:.3f} {interval_text(found)}")


def _failures(failures: dict[tuple[str, str], list[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("failure", "stop reason"):
        table.add_column(name)
    table.add_column("conversations", justify="right")
    table.add_column("such as", overflow="fold")
    for (what, stop), ids in failures.items():
        names = printable(" ".join(ids[:_NAMED]))
        table.add_row(what, escape(printable(stop)), str(len(ids)), escape(names))
    return table


def _summed(figures: Figures | None) -> dict[str, Any]:
    if figures is None:
        return {"avg": None}
    cost = {} if figures.cost is None else {"price": round(figures.cost, 6)}
    return {
        "rows": figures.rows,
        "avg": round(figures.avg.mean, 6),
        "avg_interval": interval_json(figures.avg),
        "avg_no_interval": figures.avg.no_interval or None,
        "pass": {str(k): round(each.mean, 6) for k, each in figures.passes.items()},
        "pass_interval": {str(k): interval_json(each) for k, each in figures.passes.items()},
        "calls": round(figures.calls, 4),
        "tokens": round(figures.tokens, 2),
        "cached": None if figures.cached is None else round(figures.cached, 4),
        "seconds": round(figures.seconds, 3),
        **cost,
    }

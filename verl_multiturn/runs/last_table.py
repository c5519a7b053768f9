"""The last table of a run, for the user who trained it: its results, its place, and the next steps.

All other figures of a run are in the JSON object behind it.
"""

from __future__ import annotations

import json
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_multiturn.errors import ConfigError
from verl_multiturn.models.location import find_model
from verl_multiturn.observe.metric_files import REWARD, read_metrics, reward_failures
from verl_multiturn.runs.progress import validation_scores
from verl_multiturn.tools.running.results import CallStatus
from verl_multiturn.trust.settings import read_settings

_CALLS = "rollout/calls/"
_Entry = tuple[int, Mapping[str, Any]]


def print_last(
    out: Path, found: Mapping[str, Any], own: Mapping[str, str] | None = None, console: Console | None = None
) -> None:
    """Print the last table of a run, where its model is, the next commands, and its figures as one JSON object.

    Args:
        out: Folder of the run.
        found: All figures of the run.
        own: Rows of the recipe's own, by their names; they come after the validation.
        console: Console for the table.
    """
    console = Console() if console is None else console
    table = Table(title=escape(out.name), show_header=False)
    for name, value in (*_learned(out), *(own or {}).items(), *_happened(out)):
        table.add_row(escape(name), escape(value))
    console.print(table)
    model = _model_of(out) or "none was kept (trainer.save_freq)"
    # Not in the table, whose width may cut them.
    for line in (f"model: {model}", "next:", *(f"  {command}" for command in _next(out))):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    print(json.dumps(found))


def figure_text(value: float | None) -> str:
    """Return a figure as text; a dash where there is none."""
    return "-" if value is None else f"{value:.3f}"


def change_text(before: float | None, after: float | None) -> str:
    """Return a figure before and after training as text."""
    return f"{figure_text(before)} → {figure_text(after)}"


def recipe_of(out: Path) -> str:
    """Return the name of a run's recipe for the figures of its report; its folder's name where no configuration is.

    Args:
        out: Folder of the run.
    """
    recipe = read_settings(out).get("recipe")
    name = recipe.get("name") if isinstance(recipe, Mapping) else None
    return name if isinstance(name, str) and name else out.name


def tool_error_rate(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of the calls that did not end well, whatever the status, for the figures of a run's report.

    Args:
        steps: Metrics of the training's steps.

    Returns:
        The share, from 0 to 1; None: there was no call.
    """
    total = _summed(steps, f"{_CALLS}total")
    return sum(_failed_calls(steps).values()) / total if total else None


def _failed_calls(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the number of calls by each status but `ok`."""
    failed = (str(status) for status in CallStatus if status != CallStatus.OK)
    return {status: _summed(steps, f"{_CALLS}{status}_rate", f"{_CALLS}total") for status in failed}


def _summed(steps: Sequence[Mapping[str, Any]], key: str, of: str | None = None) -> float:
    """Return the sum of a metric over the steps; `of` names the metric that it is a share of."""
    return float(sum(data.get(key, 0.0) * (1.0 if of is None else data.get(of, 0.0)) for data in steps))


def _learned(out: Path) -> list[tuple[str, str]]:
    """Return the rows about the progress of learning."""
    entries: list[_Entry] = [(entry["step"], entry["data"]) for entry in read_metrics(out)]
    steps = [entry for entry in entries if REWARD in entry[1]]
    rows = [("steps", str(len(steps)))]
    if steps:
        rows.append(_change("reward", [(step, data[REWARD]) for step, data in steps]))
    found: dict[str, list[tuple[int, float]]] = {}
    for step, data in entries:
        for name, value in validation_scores(data):
            found.setdefault(name, []).append((step, value))
    return [*rows, *(_change(name, values) for name, values in found.items())]


def _change(name: str, values: Sequence[tuple[int, float]]) -> tuple[str, str]:
    """Return the row of a figure with its first and last value. The steps are named."""
    (first, before), (last, after) = values[0], values[-1]
    return f"{name}, step {first} → {last}", change_text(before, after)


def _happened(out: Path) -> list[tuple[str, str]]:
    """Return the rows about calls, failures and time."""
    steps = [entry["data"] for entry in read_metrics(out) if REWARD in entry["data"]]

    conversations, total = _summed(steps, "rollout/trajectories"), _summed(steps, f"{_CALLS}total")
    rows = []
    if conversations:
        rows.append(("calls", f"{total:.0f}, {total / conversations:.2f} a conversation"))
        counts = {status: round(count) for status, count in _failed_calls(steps).items()}
        named = ", ".join(f"{status} {count}" for status, count in counts.items() if count)
        rows.append(("failed calls", f"{sum(counts.values())}{f' ({named})' if named else ''}"))
        invalid = round(_summed(steps, "rollout/invalid_share", "rollout/trajectories"))
        raised = _summed(steps, "rollout/raised")
        rows_checked = _summed(steps, "rollout/certificate/rows")
        violations = _summed(steps, "rollout/certificate/violations")
        rows.append(("conversations", f"{conversations:.0f}, {invalid} invalid, {raised:.0f} raised"))
        failures: Counter[str] = Counter()
        for data in steps:
            failures.update(reward_failures(data))
        if told := [f"{round(number)} {name}" for name, number in failures.items()]:
            rows.append(("rewards", f"{', '.join(told)}: they score 0, whatever the answer (verl-multiturn explain)"))
        rows.append(("certificate", f"{rows_checked:.0f} rows, {violations:.0f} violations"))
    seconds = _summed(steps, "timing_s/step")
    rows.append(("time", f"{timedelta(seconds=round(seconds))} in steps{_whole(out)}"))
    return rows


def _whole(out: Path) -> str:
    """Return the time since the last start of the run as the end of a text; empty where it is not known."""
    try:
        started = json.loads((out / "start_up.json").read_text(encoding="utf-8"))["started"]
        return f", {timedelta(seconds=round(time.time() - started))} since its start"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _model_of(out: Path) -> Path | None:
    """Return the folder of the run's newest whole checkpoint; None: it kept none."""
    try:
        return find_model(out).folder
    except ConfigError:
        return None


def _next(out: Path) -> list[str]:
    """Return three commands that a user may want next, as far as the run has the files that they read."""
    place = shlex.quote(str(out))
    commands = []
    if (out / "records").is_dir():
        commands += [f"verl-multiturn show {place}", f"verl-multiturn view {place}"]
    if _model_of(out) is not None:
        commands.append(f"verl-multiturn export {place} --to {shlex.quote(f'{out}-model')}")
    elif commands:
        commands.append(f"verl-multiturn explain {place}")
    settings = "++actor_rollout_ref.rollout.custom.multiturn.record_dir=… trainer.save_freq=…"
    return commands or [f"the same run with {settings}, to read its conversations and to keep its model"]

"""The points of a run's checkpoints, `evaluations/points.jsonl`: a line for each one that was to be evaluated."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from verl_multiturn.evaluation.figures import figures_of
from verl_multiturn.evaluation.results import Results
from verl_multiturn.paths import read_regular

FOLDER = "evaluations"
"""Folder of a run in which its checkpoints are evaluated."""
_POINTS = "points.jsonl"


class Point(BaseModel):
    """The outcome of a checkpoint's evaluation."""

    model_config = ConfigDict(extra="ignore")
    step: int
    """Step of the checkpoint."""
    state: Literal["evaluated", "failed", "skipped"]
    why: str = ""
    """Why it has no figures, or no interval."""
    avg: float | None = None
    """Mean reward."""
    interval: tuple[float, float] | None = None
    """Interval of `avg` (`estimates.estimate`)."""
    rows: int = 0
    """Number of rows that the figures are of."""
    samples: int = 0
    model: str = ""
    """Hash of the weights."""
    folder: str = ""
    """Folder of the evaluation, in that of all."""
    at: float = 0.0
    """Time at which it was over, in seconds since 1970."""
    seconds: float = 0.0
    deployed: bool = False
    """Whether a gateway serves it since then."""
    not_deployed: str = ""
    """Why not, where one was named (`deploy_to`)."""


def point_of(results: Results, step: int) -> Point:
    """Return the figures of a checkpoint's evaluation as a point; a failed one where no row is whole."""
    shown = figures_of(results.shown, results.evaluation.samples)
    if shown is None:
        return Point(step=step, state="failed", why="no row is whole")
    return Point(
        step=step,
        state="evaluated",
        why=shown.avg.no_interval and f"no interval: {shown.avg.no_interval}",
        avg=shown.avg.mean,
        interval=shown.avg.interval,
        rows=shown.rows,
        samples=results.evaluation.samples,
        model=results.evaluation.model.hash,
    )


def add_point(run: Path, point: Point) -> None:
    """Write a point of a run.

    Raises:
        OSError: It cannot be written.
    """
    with (run / FOLDER / _POINTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(point.model_dump(mode="json")) + "\n")


def read_points(run: Path, fault: Callable[[str], None] = lambda what: None) -> list[Point]:
    """Return the points of a run by step, of each step the last one; a torn line costs itself alone.

    Args:
        run: Folder of the run.
        fault: It is called with why there are none, where something is in the place of their file.
    """
    found = {point.step: point for point in all_points(run, fault)}
    return [found[step] for step in sorted(found)]


def all_points(run: Path, fault: Callable[[str], None] = lambda what: None) -> list[Point]:
    """Return the points of a run in the order in which they were written, also those of steps that were trained again.

    Args:
        run: Folder of the run.
        fault: As `read_points` has it.
    """
    try:
        text = read_regular(run / FOLDER / _POINTS, within=run)
    except OSError as error:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            fault(f"no evaluations are shown: {error}")
        return []
    found = []
    for line in text.decode(errors="replace").splitlines():
        with suppress(ValidationError):
            found.append(Point.model_validate_json(line))
    return found

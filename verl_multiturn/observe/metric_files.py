"""The metrics of a run, read from the files of all its starts.

verl's file logger empties the file that it is given, so each start of a run has its own file: `metrics.jsonl`,
`metrics.2.jsonl`, … A start that resumes begins at the last checkpoint. Steps that an earlier start logged beyond that
checkpoint are done again.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from verl_multiturn.paths import open_regular

logger = logging.getLogger(__name__)

REWARD = "critic/score/mean"
"""Name of verl's metric that every training step has and a validation does not have."""
_NAME = re.compile(r"metrics(?:\.(\d+))?\.jsonl")
# A key that verl logs with every training step, and not with a validation before the first step.
_TRAINED = "training/global_step"
_REPORTED = "rollout/reward/"
"""Begin of the means of numbers that a reward function reported."""
_NONE = 1e-6
_LONGEST = 16 << 20
"""Bytes of a line; a longer one was not written by verl."""


def metric_files(folder: Path) -> list[Path]:
    """Return the metric files of a run, in the order of its starts."""
    named = [(found, path) for path in folder.glob("metrics*.jsonl") if (found := _NAME.fullmatch(path.name))]
    matches = [(found, path) for found, path in named if path.is_file()]  # a pipe has no end
    return [path for _, path in sorted((int(found[1] or 1), path) for found, path in matches)]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics that all starts of a run logged, one entry for each step, in the order of the steps.

    A step that was done again counts as it was the last time. The validation with which a resumed start begins is added
    to the entry of its step. NaN, which verl logs as null, is omitted. Example:
        [{"step": 0, "data": {"val-core/acc": 0.1}}, {"step": 1, "data": {"training/global_step": 1}}]

    Args:
        folder: Output folder of the run.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for path in metric_files(folder):
        entries = list(_entries(path))
        if entries:
            begins, data = entries[0]
            redone = begins if _TRAINED in data else begins + 1
            by_step = {step: data for step, data in by_step.items() if step < redone}
        for step, data in entries:
            by_step[step] = by_step.get(step, {}) | data
    return [{"step": step, "data": by_step[step]} for step in sorted(by_step)]


def reward_failures(data: Mapping[str, Any]) -> dict[str, float]:
    """Return how many rewards of a step score 0 since they broke or were late; {} where none did. Outages do not count.

    Args:
        data: The metrics of a training step. Example of the result: `{"failed": 3.0, "timed out": 1.0}`.
    """
    names = ("failed", "outage", "unjudgeable", "timed_out")
    if any(f"{_REPORTED}{name}/mean" not in data for name in names):  # a function of another's may mean something else
        return {}
    numbers = {key: value for key, value in data.items() if isinstance(value, int | float) and math.isfinite(value)}
    most = numbers.get("rollout/trajectories", 0.0)

    def count(name: str) -> float:
        of = numbers.get(f"{_REPORTED}{name}/conversations", most)
        return float(min(numbers.get(f"{_REPORTED}{name}/mean", 0.0) * of, most))

    found = {"failed": count("failed") - count("outage") - count("unjudgeable"), "timed out": count("timed_out")}
    return {name: number for name, number in found.items() if number > _NONE}


def _entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield step and values of each line that can be read, up to one that is not a line of verl's."""
    with open_regular(path) as file:
        for line in iter(partial(file.readline, _LONGEST), b""):
            if len(line) == _LONGEST:
                logger.warning(
                    "%s: a line has %s MiB or more and was not written by verl; from there on the file is not read",
                    path,
                    _LONGEST >> 20,
                )
                return
            if (entry := read_entry(line.decode(errors="replace"))) is not None:
                yield entry


def read_entry(line: str) -> tuple[int, dict[str, Any]] | None:
    """Return step and metrics of a line of verl's file logger, without NaN, which verl logs as null.

    Args:
        line: The line.

    Returns:
        The pair; None for a torn line, which a kill or a full disk leaves.
    """
    try:
        entry = json.loads(line)
        return int(entry["step"]), {key: value for key, value in entry["data"].items() if value is not None}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None

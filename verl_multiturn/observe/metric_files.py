"""The metrics of a run, read from the files of all its starts.

verl's file logger empties the file that it is given, so each start has one of its own: `metrics.jsonl`,
`metrics.2.jsonl`, … A start that resumes begins where the last checkpoint was: what an earlier start logged beyond
that point was done again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAME = re.compile(r"metrics(?:\.(\d+))?\.jsonl")
# In what verl logs of a training step, and not in a validation before the first one.
_TRAINED = "training/global_step"


def metric_files(folder: Path) -> list[Path]:
    """Return the files of a run's starts, the first start's first."""
    matches = [(found, path) for path in folder.glob("metrics*.jsonl") if (found := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted((int(found[1] or 1), path) for found, path in matches)]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return what all starts of a run logged as `{"step": …, "data": {…}}`, one entry for each step, in order.

    A step that was done again counts as it was the last time; the validation that a resumed start begins with is added
    to what was logged of that step. Values that are no numbers (NaN, which verl logs as null) are left out.
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


def _entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Step and values of each whole line; a run that is killed may leave a torn one at the end."""
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        entry = json.loads(line)
        yield entry["step"], {key: value for key, value in entry["data"].items() if value is not None}

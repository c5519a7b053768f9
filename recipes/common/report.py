"""The results of a recipe's run as a table and one JSON object: `python recipes/common/report.py OUT_DIR`."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean
from typing import Any

from verl_multiturn.observe.metric_files import REWARD, read_metrics
from verl_multiturn.runs.last_table import print_last, recipe_of, tool_error_rate

# Name in the report, and the metric whose mean over the run's steps is reported.
_MEANS = {
    "reward": REWARD,
    "response_tokens": "response_length/mean",
    "assistant_turns": "rollout/assistant_turns/mean",
    "calls_per_trajectory": "rollout/calls/per_trajectory/mean",
    "prob_diff_mean": "training/rollout_probs_diff_mean",
    "step_seconds": "timing_s/step",
}
_SUMS = {
    "certificate_rows": "rollout/certificate/rows",
    "certificate_violations": "rollout/certificate/violations",
    "tool_calls": "rollout/calls/total",
    "environment_error": "rollout/interaction/failures",
}


def report(out: Path) -> dict[str, Any]:
    """Return the results of the run in a folder, over all its starts.

    Metrics of validation (`val-core/…`) are those of the last validation that has them.

    Args:
        out: Folder of the run.
    """
    entries = [entry["data"] for entry in read_metrics(out)]
    steps = [entry for entry in entries if REWARD in entry]

    def values(key: str) -> list[float]:
        return [entry[key] for entry in steps if key in entry]

    found: dict[str, Any] = {"recipe": recipe_of(out), "steps": len(steps)}
    found |= {name: mean(values(key)) for name, key in _MEANS.items() if values(key)}
    if (failed := tool_error_rate(steps)) is not None:
        found["tool_error_rate"] = failed
    found |= {name: int(sum(values(key))) for name, key in _SUMS.items()}
    for key in sorted({key for entry in entries for key in entry if key.startswith("val-core/")}):
        found[key] = next(entry[key] for entry in reversed(entries) if key in entry)
    return found


def main() -> None:
    """Print the results of the run in the folder that the command line names."""
    out = Path(sys.argv[1])
    print_last(out, report(out))


if __name__ == "__main__":
    main()

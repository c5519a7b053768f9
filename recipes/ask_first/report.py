"""Report the results of a run of `ask_first`: a table, `summary.json`, and one JSON object as the last line.

python recipes/ask_first/report.py OUT_DIR
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

from verl_multiturn.observe.metric_files import REWARD, read_metrics
from verl_multiturn.runs.last_table import change_text, figure_text, print_last, recipe_of

KINDS = ("missing", "complete")


def validations(out: Path) -> list[dict[str, float]]:
    """Return the greedy results of each validation, in order.

    Args:
        out: Folder of the run.

    Returns:
        `step`, `accuracy` over all held-out tasks, `asked_when_needed` (share of the tasks with a missing number in
        which the model asked for it) and `asked_needlessly` (share of the others in which it wanted any).
    """
    found = []
    for entry in read_metrics(out):
        values = {kind: _of_kind(entry["data"], kind) for kind in KINDS}
        if all(values.values()):
            found.append(
                {
                    "step": entry["step"],
                    # Both kinds have the same number of tasks.
                    "accuracy": mean(values[kind]["acc"] for kind in KINDS),
                    "asked_when_needed": values["missing"]["asked"],
                    "asked_needlessly": values["complete"]["asked"],
                }
            )
    return found


def _of_kind(data: dict[str, float], kind: str) -> dict[str, float]:
    """Return the validation's means of a kind of task, by the name that `reward.py` gives them."""
    found = {}
    for key, value in data.items():
        parts = key.split("/")  # val-core/ask_first/missing/acc/mean@1
        if parts[0] in ("val-core", "val-aux") and parts[1:3] == ["ask_first", kind] and parts[4:] == ["mean@1"]:
            found[parts[3]] = value
    return found


def summarize(out: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Return the results of a run.

    Args:
        out: Folder of the run.
        seconds: How long the run took, its start-up included.
        seed: Its seed.
    """
    curve = validations(out)
    last = curve[-1] if curve else {}
    steps = [entry["data"] for entry in read_metrics(out) if REWARD in entry["data"]]

    def values(key: str) -> list[float]:
        return [data[key] for data in steps if key in data]

    rewards = values(REWARD)
    return {
        "recipe": recipe_of(out),
        "seed": seed,
        "accuracy_before": curve[0]["accuracy"] if curve else None,
        "accuracy_after": last.get("accuracy"),
        "asked_when_needed": last.get("asked_when_needed"),
        "asked_needlessly": last.get("asked_needlessly"),
        "seconds": round(seconds, 1),
        "violations": int(sum(values("rollout/certificate/violations"))),
        "certificate_rows": int(sum(values("rollout/certificate/rows"))),
        "environment_error": int(sum(values("rollout/interaction/failures"))),
        "steps": len(steps),
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "rows_mean": mean(values("rollout/rows/mean") or [1.0]),
        "prob_diff_mean": mean(values("training/rollout_probs_diff_mean") or [0.0]),
        "train_seconds": round(sum(values("timing_s/step")), 1),
        "curve": curve,
    }


def main() -> None:
    """Report the run in the folder that the command line names. The launcher and verl's trainer wrote its files."""
    out = Path(sys.argv[1])
    start_up = json.loads((out / "start_up.json").read_text(encoding="utf-8"))
    summary = summarize(out, time.time() - start_up["started"], start_up["seed"])
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    own = {
        "accuracy on held-out tasks": change_text(summary["accuracy_before"], summary["accuracy_after"]),
        "asked when needed, after": figure_text(summary["asked_when_needed"]),
        "asked needlessly, after": figure_text(summary["asked_needlessly"]),
    }
    print_last(out, summary, own)


if __name__ == "__main__":
    main()

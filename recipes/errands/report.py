"""Report a run as a table and one JSON object: `python recipes/errands/report.py OUT_DIR`.

It counts the verdicts of the user on each turn, in the records of the conversations. The rewards that were
trained on are not: the variant `lottery` draws them. Nor is a conversation that is not valid, but in `invalid`.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

from recipes.errands.errands import FOLDERS, REQUESTS
from verl_multiturn.observe.metric_files import REWARD, read_metrics
from verl_multiturn.records.read.records import read_records
from verl_multiturn.runs.last_table import change_text, print_last, recipe_of


def right(record: dict[str, Any]) -> list[bool]:
    """Return for each request whether the state was right after it; a request without a verdict is wrong."""
    judged = [reply["metrics"]["turn_right"] == 1.0 for reply in record["replies"] if reply["metrics"]]
    return judged + [False] * (REQUESTS - len(judged))


def all_right(records: list[dict[str, Any]]) -> float | None:
    """Return the share of the conversations in which all requests are right; None without any."""
    return round(mean(all(right(record)) for record in records), 4) if records else None


def right_by_folder(records: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return `all_right` for each folder of a first request; one is right in a model that always names it.

    Such a model has learned nothing, and a quarter of all conversations right.
    """
    return {
        folder: all_right(
            [each for each in records if any(f'to "{folder}"' in said["text"] for said in each["replies"])]
        )
        for folder in FOLDERS
    }


def report(out: Path) -> dict[str, Any]:
    """Return the results of the run in a folder.

    Args:
        out: Folder of the run.
    """
    steps = [entry["data"] for entry in read_metrics(out) if REWARD in entry["data"]]
    records = list(read_records(out / "records"))
    greedy: dict[int, list[dict[str, Any]]] = {record["step"]: [] for record in records if record["validation"]}
    sampled: dict[int, list[dict[str, Any]]] = {}
    valid = [record for record in records if record["valid"]]
    for record in valid:
        (greedy if record["validation"] else sampled).setdefault(record["step"], []).append(record)
    last = greedy[max(greedy)]

    def over_steps(key: str) -> list[float]:
        return [entry[key] for entry in steps if entry.get(key) is not None]

    start_up = json.loads((out / "start_up.json").read_text(encoding="utf-8"))
    differences = over_steps("training/rollout_probs_diff_mean")
    return {
        "recipe": recipe_of(out),
        "seed": start_up["seed"],
        "steps": len(steps),
        "held_out": len(last),
        "all_right_before": all_right(greedy[min(greedy)]),
        "all_right_after": all_right(last),
        "all_right_by_step": {step: all_right(each) for step, each in sorted(greedy.items())},
        "right_by_request": [round(mean(each), 4) for each in zip(*map(right, last), strict=True)],
        "right_by_folder": right_by_folder(last),
        "sampled_by_step": [all_right(each) for _, each in sorted(sampled.items())],
        "reward_by_step": [round(value, 3) for value in over_steps(REWARD)],
        "violations": int(sum(over_steps("rollout/certificate/violations"))),
        "certificate_rows": int(sum(over_steps("rollout/certificate/rows"))),
        "invalid": len(records) - len(valid),
        "environment_error": sum(record["stop_reason"] == "environment_error" for record in records),
        "stop_reasons": dict(Counter(record["stop_reason"] for record in records).most_common()),
        "prob_diff_mean": mean(differences) if differences else None,
        "step_seconds": round(mean(over_steps("timing_s/step")), 1) if steps else None,
        "seconds": round(time.time() - start_up["started"], 1),
    }


def main() -> None:
    """Print the results of the run in the folder that the command line names, and write `summary.json` there."""
    out = Path(sys.argv[1])
    found = report(out)
    (out / "summary.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    change = change_text(found["all_right_before"], found["all_right_after"])
    print_last(out, found, {f"all right of {found['held_out']} held-out errands": change})


if __name__ == "__main__":
    main()

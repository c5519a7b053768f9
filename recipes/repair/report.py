"""Report a run as a table and one JSON object: `python recipes/repair/report.py OUT_DIR`.

It counts by the records of the sessions: the agent's verdict on each held-out repository, and the commands
that the model wrote there. A session that could not be scored is not counted, but in `invalid`.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

from recipes.repair.agent import command_of
from recipes.repair.repositories import TESTS
from verl_multiturn.observe.metric_files import REWARD, read_metrics
from verl_multiturn.records.read.records import read_records
from verl_multiturn.runs.last_table import change_text, print_last, recipe_of


def repaired(records: list[dict[str, Any]]) -> float | None:
    """Return the share of the sessions whose verdict is 1; None without any."""
    return round(mean(record["session"]["reward"] == 1.0 for record in records), 4) if records else None


def tested_first(records: list[dict[str, Any]]) -> float | None:
    """Return the share of the sessions whose first command runs the test; None without any."""
    return round(mean(_first_command(record) == TESTS for record in records), 4) if records else None


def _first_command(record: dict[str, Any]) -> str | None:
    said = [message["content"] for message in record["messages"] if message["role"] == "assistant"]
    return command_of(said[0]) if said else None


def report(out: Path) -> dict[str, Any]:
    """Return the results of the run in a folder.

    Args:
        out: Folder of the run.
    """
    steps = [entry["data"] for entry in read_metrics(out) if REWARD in entry["data"]]
    records = list(read_records(out / "records"))
    valid = [record for record in records if record["valid"]]
    sampled = [record for record in valid if not record["validation"]]
    greedy: dict[int, list[dict[str, Any]]] = {record["step"]: [] for record in records if record["validation"]}
    for record in valid:
        if record["validation"]:
            greedy[record["step"]].append(record)
    first, last = greedy[min(greedy)], greedy[max(greedy)]

    def over_steps(key: str) -> list[float]:
        return [entry[key] for entry in steps if entry.get(key) is not None]

    start_up = json.loads((out / "start_up.json").read_text(encoding="utf-8"))
    differences = over_steps("training/rollout_probs_diff_mean")
    return {
        "recipe": recipe_of(out),
        "seed": start_up["seed"],
        "steps": len(steps),
        "held_out": len(last),
        "repaired_before": repaired(first),
        "repaired_after": repaired(last),
        "repaired_by_step": {step: repaired(each) for step, each in sorted(greedy.items())},
        "tested_first_before": tested_first(first),
        "tested_first": tested_first(last),
        "reward_by_step": [round(value, 3) for value in over_steps(REWARD)],
        "rows_per_session": mean(len(record["rows"]) for record in sampled) if sampled else None,
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
    change = change_text(found["repaired_before"], found["repaired_after"])
    print_last(out, found, {f"repaired of {found['held_out']} held-out repositories": change})


if __name__ == "__main__":
    main()

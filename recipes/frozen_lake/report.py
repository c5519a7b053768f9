"""Report a run on the frozen lake as a table and one JSON object: `python recipes/frozen_lake/report.py OUT_DIR`.

The greedy shares are counted in the records of the conversations: the environment's own rewards, not the scores that
were trained on, which the variant `lottery` draws by lot.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

from lake import HELD_OUT, SIZE, SLIPPERY, held_out_maps, random_policy_share

from verl_multiturn.observe.metric_files import REWARD, read_metrics
from verl_multiturn.records.read.records import read_records
from verl_multiturn.runs.last_table import change_text, print_last, recipe_of


def reached(record: dict[str, Any]) -> bool:
    """Return whether the player came to the goal in a recorded conversation."""
    return any(reply["reward"] == 1.0 for reply in record["replies"])


def share(records: list[dict[str, Any]]) -> float | None:
    """Return the share of the valid conversations in which the player came to the goal; None without any."""
    valid = [record for record in records if record["valid"]]
    return round(mean(map(reached, valid)), 4) if valid else None


def report(out: Path) -> dict[str, Any]:
    """Return the results of the run in a folder.

    Args:
        out: Folder of the run.
    """
    metrics = read_metrics(out)
    steps = [entry["data"] for entry in metrics if REWARD in entry["data"]]
    records = list(read_records(out / "records"))
    sampled = [record for record in records if not record["validation"]]
    greedy: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        if record["validation"]:
            greedy.setdefault(record["step"], []).append(record)
    first, last = min(greedy), max(greedy)
    numbers = sorted({record["step"] for record in sampled})
    by_step = [share([record for record in sampled if record["step"] == step]) for step in numbers]

    def over_steps(key: str) -> list[float]:
        return [entry[key] for entry in steps if entry.get(key) is not None]

    start_up = json.loads((out / "start_up.json").read_text(encoding="utf-8"))
    differences = over_steps("training/rollout_probs_diff_mean")
    return {
        "recipe": recipe_of(out),
        "seed": start_up["seed"],
        "steps": len(steps),
        "map_size": f"{SIZE}x{SIZE}",
        "is_slippery": SLIPPERY,
        "held_out_maps": len(greedy[last]),
        "greedy_before": share(greedy[first]),
        "greedy_after": share(greedy[last]),
        "greedy_by_step": {step: share(each) for step, each in sorted(greedy.items())},
        "sampled_by_step": by_step,
        "random_policy": round(mean(map(random_policy_share, held_out_maps())), 4),
        "violations": int(sum(over_steps("rollout/certificate/violations"))),
        "certificate_rows": int(sum(over_steps("rollout/certificate/rows"))),
        "invalid": sum(not record["valid"] for record in records),
        "environment_error": sum(record["stop_reason"] == "environment_error" for record in records),
        "stop_reasons": dict(Counter(record["stop_reason"] for record in sampled).most_common()),
        "prob_diff_mean": mean(differences) if differences else None,
        "step_seconds": round(mean(over_steps("timing_s/step")), 1) if steps else None,
        "seconds": round(time.time() - start_up["started"], 1),
    }


def main() -> None:
    """Print the results of the run in the folder that the command line names, and write `summary.json` there."""
    out = Path(sys.argv[1])
    found = report(out)
    (out / "summary.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    change = change_text(found["greedy_before"], found["greedy_after"])
    print_last(out, found, {f"goal reached on {found['held_out_maps']} of {HELD_OUT} held-out maps": change})


if __name__ == "__main__":
    main()

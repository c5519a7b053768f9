"""Report a run of tic-tac-toe as a table and one JSON object: `python recipes/tictactoe/report.py OUT_DIR`.

The shares are counted in the records of the evaluation's games, from the rewards that the agent gave.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

from recipes.tictactoe.game import DRAW, ROLES
from verl_multiturn.observe.metric_files import REWARD, read_metrics
from verl_multiturn.records.read.records import read_records
from verl_multiturn.runs.last_table import change_text, print_last, recipe_of

SHARES = {"not_lost": lambda reward: reward >= 0, "won": lambda reward: reward > DRAW}


def shares(records: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """Return the shares of the evaluation's games that the model did not lose, and won, as one side.

    Args:
        records: Records of one evaluation.
        role: The side.
    """
    rewards = [
        record["session"]["rewards"][role]
        for record in records
        if record["valid"] and {each["role"] for each in record["generations"]} == {role}
    ]
    found = {name: round(mean(map(holds, rewards)), 4) if rewards else None for name, holds in SHARES.items()}
    return {"games": len(rewards), **found}


def report(out: Path) -> dict[str, Any]:
    """Return the results of the run in a folder.

    Args:
        out: Folder of the run.
    """
    steps = [entry["data"] for entry in read_metrics(out) if REWARD in entry["data"]]
    records = list(read_records(out / "records"))
    sampled = [record for record in records if not record["validation"]]
    evaluations: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        if record["validation"]:
            evaluations.setdefault(record["step"], []).append(record)
    by_step = {step: {role: shares(each, role) for role in ROLES} for step, each in sorted(evaluations.items())}
    first, last = min(by_step), max(by_step)

    def over_steps(key: str) -> list[float]:
        return [entry[key] for entry in steps if entry.get(key) is not None]

    start_up = json.loads((out / "start_up.json").read_text(encoding="utf-8"))
    played = Counter(f"{role}: {name}" for record in sampled for role, name in record["session"]["opponents"].items())
    return {
        "recipe": recipe_of(out),
        "seed": start_up["seed"],
        "steps": len(steps),
        **{
            f"{role}_{when}": by_step[step][role]
            for role in ROLES
            for when, step in (("before", first), ("after", last))
        },
        "by_step": by_step,
        "games": len(sampled),
        "opponents": dict(sorted(played.items())),
        "violations": int(sum(over_steps("rollout/certificate/violations"))),
        "certificate_rows": int(sum(over_steps("rollout/certificate/rows"))),
        "invalid": sum(not record["valid"] for record in records),
        "stop_reasons": dict(Counter(record["stop_reason"] for record in sampled).most_common()),
        "step_seconds": round(mean(over_steps("timing_s/step")), 1) if steps else None,
        "training_seconds": round(sum(over_steps("timing_s/step")), 1),
        "seconds": round(time.time() - start_up["started"], 1),
    }


def main() -> None:
    """Print the results of the run in the folder that the command line names, and write `summary.json` there."""
    out = Path(sys.argv[1])
    found = report(out)
    (out / "summary.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    table = {
        f"not lost as {role}, of {found[f'{role}_after']['games']} games": change_text(
            found[f"{role}_before"]["not_lost"], found[f"{role}_after"]["not_lost"]
        )
        for role in ROLES
    }
    print_last(out, found, table)


if __name__ == "__main__":
    main()

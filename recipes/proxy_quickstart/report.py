"""Report a run as a table and one JSON object: `python recipes/proxy_quickstart/report.py OUT_DIR`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
import torch
from transformers import AutoTokenizer

from recipes.proxy_quickstart import credit_check, same_prompts
from verl_multiturn.certificate.receipts import CAUSES
from verl_multiturn.observe.metric_files import REWARD, read_metrics
from verl_multiturn.records.read.records import read_records
from verl_multiturn.records.summaries import summary_of
from verl_multiturn.runs.last_table import print_last, recipe_of
from verl_multiturn.trust.settings import read_settings

_ACCURACY = re.compile(r"val-core/.*/acc/mean@1")
_PROXY = "rollout/proxy/"


def report(out: Path) -> dict[str, Any]:
    """Return the results of the run in a folder.

    Args:
        out: Folder of the run.
    """
    entries = [entry["data"] for entry in read_metrics(out)]
    steps = [entry for entry in entries if REWARD in entry]
    accuracy = [entry[key] for entry in entries for key in entry if _ACCURACY.fullmatch(key)]

    def over_steps(key: str) -> list[float]:
        return [entry[key] for entry in steps if entry.get(key) is not None]

    records = list(read_records(out / "records"))
    sampled = [record for record in records if not record["validation"]]
    tokens = sum(summary_of(record)["sampled_tokens"] for record in sampled)
    proxy = over_steps(f"{_PROXY}rows/mean")
    found = {
        "recipe": recipe_of(out),
        "seed": json.loads((out / "start_up.json").read_text(encoding="utf-8"))["seed"],
        "steps": len(steps),
        "accuracy_before": accuracy[0] if accuracy else None,
        "accuracy_after": accuracy[-1] if accuracy else None,
        "reward_last_10": mean([entry[REWARD] for entry in steps][-10:]) if steps else None,
        "certificate_share": sum(over_steps("rollout/certificate/tokens")) / tokens if tokens else None,
        "violations": int(sum(over_steps("rollout/certificate/violations"))),
        "sessions": len(sampled),
        "rows_per_session": mean(proxy) if proxy else None,
        "optimizer_steps_per_batch": optimizer_steps_per_batch(out, len(steps)),
        "step_seconds": round(mean(over_steps("timing_s/step")), 2) if steps else None,
        "agent_errors": int(sum(over_steps(f"{_PROXY}agent_errors"))),
        "untrained": {cause: int(sum(over_steps(f"{_PROXY}untrained/{cause}"))) for cause in CAUSES},
    }
    settings = read_settings(out)
    proxy_settings = settings["actor_rollout_ref"]["rollout"]["custom"]["multiturn"]["proxy"]
    agent = proxy_settings.get("agent") or ""  # none where a command is the agent
    if agent.partition(":")[0].endswith(".branches"):
        return found | of_branches(out, sampled, settings, proxy_settings)
    compared = same_prompts.compare(records, out / "data")
    return found | {
        "prompt_ids_equal": compared.equal and all(len(record["rows"]) == 1 for record in records),
        "first_prompts": compared.first,
        "later_prompts": compared.later,
        "other_results": compared.other_results,
    }


def of_branches(
    out: Path, sampled: list[dict[str, Any]], settings: dict[str, Any], proxy: dict[str, Any]
) -> dict[str, Any]:
    """Return the results that only a run of `branches.py` has.

    Args:
        out: Folder of the run.
        sampled: Records of the sampled sessions.
        settings: The run's configuration.
        proxy: Its section about the endpoint.
    """
    data = pd.read_parquet(out / "data" / "train.parquet")
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "quickstart" / "model")
    told = credit_check.Told(
        proxy.get("credit", "session"),
        proxy.get("gamma", 1.0),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        {info["question"]: info["answer"] for info in data["extra_info"]},
    )
    written = credit_check.read_written(out / "records" / "advantages" / "rows.jsonl")
    difference = credit_check.difference(sampled, written, told)
    size, mini_batch = (
        settings["data"]["train_batch_size"],
        settings["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"],
    )
    return {
        "credit": told.credit,
        "rows_of_sessions": sorted({len(record["rows"]) for record in sampled}),
        "optimizer_steps_expected": size / mini_batch,
        "trained_rows": len(written),
        "advantages_max_difference": difference,
        "advantages_equal": difference is not None and difference <= 1e-6,
    }


def optimizer_steps_per_batch(out: Path, steps: int) -> float | None:
    """Return the steps of the optimizer for each batch, as the last checkpoint counts them; None without one."""
    saved = sorted((out / "checkpoints").glob("global_step_*/actor/optim_world_size_1_rank_0.pt"))
    if not saved or not steps:
        return None
    state = torch.load(saved[-1], weights_only=False)["state"]
    made = [float(each["step"]) for each in state.values()]  # none where no session was valid
    return max(made, default=0.0) / steps


def main() -> None:
    """Print the results of the run in the folder that the command line names, and write `summary.json` there."""
    out = Path(sys.argv[1])
    found = report(out)
    (out / "summary.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print_last(out, found)


if __name__ == "__main__":
    main()

"""Report the results of a quickstart run: a table, a plot, `trajectories.jsonl` and `summary.json`.

python recipes/quickstart/report.py OUT_DIR
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
from rich.console import Console

from verl_multiturn.observe.metric_files import REWARD, read_metrics
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.read.fates import count, fates_of
from verl_multiturn.records.read.joins import figures
from verl_multiturn.records.read.records import Records, read_records
from verl_multiturn.runs.last_table import print_last

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # the backend is chosen before pyplot is imported

ACCURACY = re.compile(r"val-core/.*/acc/mean@1")
"""Name of the accuracy of a data set; with several, the first counts."""
PROB_DIFF_MEAN = "training/rollout_probs_diff_mean"
PROB_DIFF_MAX = "training/rollout_probs_diff_max"
CERTIFICATE = "rollout/certificate/"
_ADVANTAGES = tuple(f"critic/advantages/{name}" for name in ("mean", "min", "max"))


def merge_records(out: Path) -> list[dict[str, Any]]:
    """Write the records of all conversations to `trajectories.jsonl`, in order of their steps, and return them.

    Args:
        out: Folder of the run. A run without `record_dir` has none.
    """
    folder = out / "records"
    records = sorted(read_records(folder) if folder.is_dir() else [], key=lambda record: record["step"])
    with (out / "trajectories.jsonl").open("wb") as file:
        file.writelines(map(line_of, records))
    return records


def summarize(
    out: Path,
    metrics: list[dict[str, Any]],
    seed: int,
    started: float,
    start_up_seconds: dict[str, float],
    console: Console,
) -> dict[str, Any]:
    """Write `summary.json`, `trajectories.jsonl` and `curve.png`, print the table, and return the summary.

    Args:
        out: Folder of the run.
        metrics: Entries of verl's file of metrics.
        seed: Seed of the run.
        started: Time when the run was started, in seconds since the epoch.
        start_up_seconds: Duration in seconds of each phase of the start-up.
        console: Console for the table.
    """
    steps = [entry for entry in metrics if REWARD in entry["data"]]
    names = (key for entry in metrics for key in entry["data"] if ACCURACY.fullmatch(key))
    accuracy = next(names, "")
    validations = [(entry["step"], entry["data"][accuracy]) for entry in metrics if accuracy in entry["data"]]
    rewards = [entry["data"][REWARD] for entry in steps]
    trained = [record for record in merge_records(out) if not record["validation"]]
    calls = [call for record in trained for call in record["calls"]]

    def over_steps(key: str) -> list[float]:
        # In the file, null means NaN, for example in a step without a trained token.
        return [entry["data"][key] for entry in steps if entry["data"].get(key) is not None]

    step_seconds = sum(over_steps("timing_s/step"))
    summary = {
        "seed": seed,
        "val_acc_before": validations[0][1] if validations else None,
        "val_acc_after": validations[-1][1] if validations else None,
        "reward_first_10": _mean(rewards[:10]),
        "reward_last_10": _mean(rewards[-10:]),
        "prob_diff_mean": _mean(over_steps(PROB_DIFF_MEAN)),
        "prob_diff_max": max(over_steps(PROB_DIFF_MAX), default=None),
        "tool_calls_per_trajectory": len(calls) / len(trained) if trained else None,
        "tool_calls_per_trajectory_last_10": _calls_of_last(trained, 10),
        "tool_error_rate": sum(call["status"] != "ok" for call in calls) / max(1, len(calls)) if trained else None,
        "calls_not_ok": dict(Counter(call["status"] for call in calls if call["status"] != "ok").most_common()),
        "certificate_rows": int(sum(over_steps(f"{CERTIFICATE}rows"))),
        "certificate_violations": int(sum(over_steps(f"{CERTIFICATE}violations"))),
        "certificate_step_share": sum(over_steps(f"{CERTIFICATE}seconds")) / step_seconds if step_seconds else None,
        **(_of_records(out / "records", steps) if (out / "records").is_dir() else {}),
        "steps": len(steps),
        "start_up_seconds": start_up_seconds,
        "train_seconds": round(step_seconds, 1),
        "total_seconds": round(time.time() - started, 1),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    _plot(out / "curve.png", steps, validations)
    print_last(out, summary, console=console)
    return summary


def main() -> None:
    """Report the run in the folder that the command line names. The launcher and verl's trainer wrote its files."""
    out = Path(sys.argv[1])
    start_up = json.loads((out / "start_up.json").read_text(encoding="utf-8"))
    summarize(out, read_metrics(out), start_up["seed"], start_up["started"], start_up["seconds"], Console())


def _of_records(folder: Path, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the records' join, how far it is from verl's metrics, and the cost of recording.

    Bytes are those of records and joins, and of lines and steps, for each token of the records. The share of the steps'
    time is the seconds that the trainer spent, and the CPU seconds of the workers' writers.

    Args:
        folder: Folder of the records.
        steps: Entries of verl's file of metrics that are of a training step.
    """
    said = {entry["step"]: entry["data"] for entry in steps}
    requests: dict[bool, set[str]] = {False: set(), True: set()}
    score_diffs, advantage_diffs = [], []
    records = Records(folder)
    for name, table in records.joins():
        requests[name.validation].update(table["request_id"].drop_null().to_pylist())
        if name.validation or name.step not in said:
            continue
        found, verls = figures(table), [said[name.step].get(key) for key in (REWARD, *_ADVANTAGES)]
        diffs = [abs(ours - theirs) for ours, theirs in zip(found, verls, strict=True) if theirs is not None]
        score_diffs += diffs[:1]
        advantage_diffs += diffs[1:]
    tokens = sum(len(row["ids"]) for record in records.records() for row in record["rows"])
    kept, lines = _bytes(folder, "*.jsonl.gz", "join/*.parquet"), _bytes(folder, "*.lines.jsonl", "steps.jsonl")
    seconds = sum(entry["data"].get("rollout/records/join_seconds", 0.0) for entry in steps)
    seconds += sum(snapshot["cpu_s"] for snapshot in records.snapshots())
    step_seconds = sum(entry["data"].get("timing_s/step") or 0.0 for entry in steps)
    return {
        "joined_trained": len(requests[False]),
        "joined_validated": len(requests[True]),
        "join_score_diff": max(score_diffs, default=None),
        "join_advantage_diff": max(advantage_diffs, default=None),
        "record_bytes_per_token": kept / tokens if tokens else None,
        "record_lines_bytes_per_token": lines / tokens if tokens else None,
        "record_share_of_step": seconds / step_seconds if step_seconds else None,
        "fates": count(fates_of(records)),
    }


def _bytes(folder: Path, *patterns: str) -> int:
    return sum(path.stat().st_size for pattern in patterns for path in folder.glob(pattern))


def _mean(values: list[float]) -> float | None:
    return mean(values) if values else None


def _calls_of_last(records: list[dict[str, Any]], steps: int) -> float | None:
    last = max((record["step"] for record in records), default=0)
    counts = [len(record["calls"]) for record in records if record["step"] > last - steps]
    return mean(counts) if counts else 0.0


def _plot(path: Path, steps: list[dict[str, Any]], validations: list[tuple[int, float]]) -> None:
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot([entry["step"] for entry in steps], [entry["data"][REWARD] for entry in steps], label="reward (sampled)")
    axes.plot(*zip(*validations, strict=True), "o--", label="validation accuracy (greedy)") if validations else None
    axes.set(xlabel="GRPO step", ylim=(-0.02, 1.02), title="A tiny model learns to call a calculator")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()

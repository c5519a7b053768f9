"""Report the results of a run beside those of the run without the tool: a curve, a table and one JSON object.

    python recipes/smollm2/report.py OUT_DIR [NO_TOOL_OUT_DIR]

The default of NO_TOOL_OUT_DIR is OUT_DIR-no_tool, if there are metrics in it. The script writes `summary.json` and
`curve.png` into OUT_DIR.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
from arithmetic import extract_answer, score_answer
from pyarrow.parquet import read_table
from rich.console import Console
from rich.table import Table

from verl_multiturn.observe.metric_files import REWARD, read_metrics
from verl_multiturn.records.read.records import read_records
from verl_multiturn.runs.last_table import print_last
from verl_multiturn.trust.settings import read_settings

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # the backend is chosen before pyplot is imported


@dataclass(frozen=True)
class Run:
    """The metrics of one run's folder and the records of its conversations."""

    name: str
    seed: int
    metrics: list[dict[str, Any]]
    records: list[dict[str, Any]]
    truths: dict[str, tuple[str, str]]
    """Kind of the task and right answer, by question."""

    @staticmethod
    def read(out: Path) -> Run:
        """Read the metrics, records and rows in the folder of a run."""
        records = list(read_records(out / "records"))
        settings = read_settings(out)
        # Our start-up check moves the run's tools to this setting.
        tools = settings["actor_rollout_ref"]["rollout"]["custom"]["multiturn"]["derived"].get("tool_config_path")
        rows = [row for split in ("train", "test") for row in read_table(out / "data" / f"{split}.parquet").to_pylist()]
        truths = {
            row["prompt"][-1]["content"]: (row["data_source"].split("/")[1], row["reward_model"]["ground_truth"])
            for row in rows
        }
        name = "calculator" if tools else "no tool"
        return Run(name, int(settings["data"]["seed"]), read_metrics(out), records, truths)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return the entries of training steps."""
        return [entry for entry in self.metrics if REWARD in entry["data"]]

    @property
    def validations(self) -> list[tuple[int, dict[str, float]]]:
        """Return the step and the accuracy by kind of each validation."""
        found = []
        for entry in self.metrics:
            by_kind = {
                key.split("/")[2]: value
                for key, value in entry["data"].items()
                if key.startswith("val-core/") and key.endswith("/acc/mean@1")
            }
            if by_kind:
                found.append((entry["step"], by_kind))
        return found

    @property
    def accuracies(self) -> list[tuple[int, float]]:
        """Return the step and the accuracy of each validation."""
        # Each kind has the same number of held-out tasks, so the mean over kinds is the mean over tasks.
        return [(step, mean(by_kind.values())) for step, by_kind in self.validations]

    def over_steps(self, key: str) -> list[float]:
        """Return a metric's values in the training steps that have it."""
        return [entry["data"][key] for entry in self.steps if key in entry["data"]]

    def calls_and_answers(self, steps: Iterable[int], sampled: bool) -> dict[str, float]:
        """Return the share of the conversations of some steps that called the tool, and the share that was right.

        Args:
            steps: Numbers of the steps.
            sampled: Whether to count the sampled conversations of the training, or the greedy ones of the validation.

        Returns:
            `called`: share with a call; `right_when_called` and `right_when_not`: share of right answers among the
            conversations with a call and without one. A share of no conversations is 0.
        """
        chosen = set(steps)
        right: dict[bool, list[float]] = {True: [], False: []}
        for record in self.records:
            if record["step"] in chosen and record["validation"] != sampled:
                kind, truth = self.truths[record["messages"][1]["content"]]
                score = score_answer(kind, extract_answer(record["messages"][-1]["content"]), truth)
                right[bool(record["calls"])].append(score)
        total = max(1, len(right[True]) + len(right[False]))
        return {
            "called": round(len(right[True]) / total, 4),
            "right_when_called": round(mean(right[True] or [0.0]), 4),
            "right_when_not": round(mean(right[False] or [0.0]), 4),
        }

    def summary(self) -> dict[str, Any]:
        """Return the numbers of the run for `summary.json`."""
        (first, before), (last, after) = self.validations[0], self.validations[-1]
        steps = [entry["step"] for entry in self.steps]
        rewards, calls = self.over_steps(REWARD), self.over_steps("rollout/calls/per_trajectory/mean")
        return {
            "seed": self.seed,
            "steps": len(steps),
            "accuracy_before": round(mean(before.values()), 4),
            "accuracy_after": round(mean(after.values()), 4),
            "accuracy_by_kind": {kind: [round(before[kind], 4), round(after[kind], 4)] for kind in before},
            "greedy_before": self.calls_and_answers([first], sampled=False),
            "greedy_after": self.calls_and_answers([last], sampled=False),
            "sampled_first_3": self.calls_and_answers(steps[:3], sampled=True),
            "sampled_last_3": self.calls_and_answers(steps[-3:], sampled=True),
            "reward_by_step": [round(reward, 4) for reward in rewards],
            "reward_first_3": round(mean(rewards[:3]), 4),
            "reward_last_3": round(mean(rewards[-3:]), 4),
            "calls_per_trajectory_first_3": round(mean(calls[:3]), 4),
            "calls_per_trajectory_last_3": round(mean(calls[-3:]), 4),
            "prob_diff_mean": mean(self.over_steps("training/rollout_probs_diff_mean")),
            "prob_diff_max": max(self.over_steps("training/rollout_probs_diff_max")),
            "certificate_rows": int(sum(self.over_steps("rollout/certificate/rows"))),
            "certificate_violations": int(sum(self.over_steps("rollout/certificate/violations"))),
            "step_seconds": round(mean(self.over_steps("timing_s/step")), 1),
        }


def plot(path: Path, runs: list[Run]) -> None:
    """Draw the sampled reward by step and the greedy accuracy on the held-out tasks.

    Args:
        path: File for the picture.
        runs: One or two runs.
    """
    figure, axes = plt.subplots(figsize=(7, 4))
    for run, color in zip(runs, ("C0", "C1"), strict=False):
        axes.plot(
            [entry["step"] for entry in run.steps],
            run.over_steps(REWARD),
            color=color,
            alpha=0.4,
            label=f"{run.name}: reward",
        )
        axes.plot(
            *zip(*run.accuracies, strict=True), "o--", color=color, label=f"{run.name}: held-out accuracy (greedy)"
        )
    axes.set(
        xlabel="GRPO step", ylim=(-0.02, 1.02), title="SmolLM2-135M-Instruct, arithmetic of reasoning_gym, on a CPU"
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Write the summary and the curve, and print the table and the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("no_tool", type=Path, nargs="?")
    args = parser.parse_args()
    beside: Path = args.no_tool or args.out.with_name(f"{args.out.name}-no_tool")
    runs = [Run.read(args.out)]
    if args.no_tool or (beside / "metrics.jsonl").is_file():
        runs.append(Run.read(beside))
    summaries = [run.summary() for run in runs]
    found = summaries[0] if len(runs) == 1 else {**summaries[0], "no_tool": summaries[1]}
    (args.out / "summary.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    plot(args.out / "curve.png", runs)
    table = Table("held-out accuracy", *(f"{run.name}, {when}" for run in runs for when in ("before", "after")))
    for kind in found["accuracy_by_kind"]:
        table.add_row(kind, *(f"{value:.3f}" for each in summaries for value in each["accuracy_by_kind"][kind]))
    table.add_row("all", *(f"{each[f'accuracy_{when}']:.3f}" for each in summaries for when in ("before", "after")))
    Console().print(table)
    print_last(args.out, found)


if __name__ == "__main__":
    main()

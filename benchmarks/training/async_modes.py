"""The quickstart in verl's three trainer modes: it learns in each, and each goes on as soon as a batch is complete.

    python -m benchmarks.async_modes [--modes sync colocate_async separate_async] [--steps 20] [--out FOLDER]

Each mode is one run of `verl-multiturn run quickstart --mode MODE` on the CPU, with the certificate on. The last line
is a JSON object, with an object by mode in each field:

- `accuracy`: of the last validation;
- `seconds_to_0.9`: seconds of training and validation until a validation was at least 0.9; null when none was;
- `wake_ms`: 95th percentile of the milliseconds from the end of a batch's last conversation to the trainer's going on,
  over the steps in which the trainer waited; null when it never did; `wake_p50_ms`: their median;
- `told_ms`: of these, from the time when the batch's last row was in TransferQueue; before it come rewards and rows of
  all the conversations that ended at about the same time;
- `wake_parts_ms`: of `sync`, where it goes, the mean of the steps: to the last reward, from there to the last row in
  TransferQueue, and from there to the trainer's going on; then how many conversations ended together with the last one,
  and the wait of one of them for its reward and for its row (medians). A table on standard error has each step;
- `listings`: listings of TransferQueue in the whole run, and `allowed`: one for each trained group and one for every
  two seconds that the trainer waited;
- `max_age`: the largest age of a trained token;
- `violations`: of the certificate;
- `curve`: seconds and accuracy of every validation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.quickstart_runs import arguments, folder, start
from benchmarks.wake_parts import RowEnd, ends_of, parts_of
from verl_multiturn.records.read.records import Records

_PREFIX = "rollout/async/"
_GROUPS = 16  # of a step
_PARTS = ("wake", "reward", "rows", "told", "together", "reward_each", "rows_each")
_POLL_S = 2.0  # verl's poll


def main() -> None:
    """Run the modes one after another, and print the figures."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    out = folder(given.out, "async_modes")
    results = {mode: run(mode, given.steps, given.seed, out / mode) for mode in given.modes}
    fields = next(iter(results.values()))
    print(json.dumps({field: {mode: results[mode][field] for mode in results} for field in fields}))


def run(mode: str, steps: int, seed: int, out: Path) -> dict[str, Any]:
    """Run the quickstart in a mode, and return its results by the fields of the last line."""
    with start(mode, steps, seed, out, "trainer.test_freq=2", "trainer.save_freq=-1") as running:
        if running.wait():
            raise SystemExit(f"the run in the mode {mode} failed with exit status {running.returncode}")
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    steps_data = [record["data"] for record in records]
    parts = wake_parts(steps_data, ends_of(Records(out / "records").records())) if mode == "sync" else None
    return {**measure(steps_data), "wake_parts_ms": parts, "violations": summary["certificate_violations"]}


def wake_parts(steps: Sequence[Mapping[str, float]], ends: Mapping[int, Sequence[RowEnd]]) -> dict[str, float] | None:
    """Print where `wake_ms` goes, step by step, and return the means; None where the trainer never waited.

    Args:
        steps: The metrics of the steps.
        ends: The ends of the conversations of each step.
    """
    table = Table("step", *_PARTS, title="milliseconds from the end of a batch's last conversation")
    found = []
    for metrics in steps:
        step = int(metrics.get("training/global_step", -1))
        if f"{_PREFIX}wake_ms" not in metrics or step not in ends:
            continue
        wake, rows = metrics[f"{_PREFIX}wake_ms"], metrics[f"{_PREFIX}rows_ms"]
        parts = parts_of(ends[step])
        found.append((wake, parts.reward, parts.rows, wake - rows, *parts[2:]))
        table.add_row(str(step), *(f"{value:.1f}" for value in found[-1]))
    if not found:
        return None
    Console(stderr=True).print(table)
    return dict(zip(_PARTS, np.mean(found, axis=0).round(1).tolist(), strict=True))


def measure(steps: list[dict[str, float]]) -> dict[str, Any]:
    """Return the results of a run from the metrics of its steps, in order."""
    seconds, curve = 0.0, []
    wakes: list[float] = []
    told: list[float] = []
    ages: list[float] = []
    listings, allowed = 0.0, 0.0
    for metrics in steps:
        seconds += metrics.get("timing_s/step", 0.0) + metrics.get("timing_s/testing", 0.0)
        accuracy = [value for name, value in metrics.items() if name.startswith("val-core/")]
        if accuracy:
            curve.append((round(seconds, 1), round(accuracy[0], 3)))
        if f"{_PREFIX}listings" not in metrics:
            continue  # the validation before the first step
        # The asynchronous trainers list once more when a step begins, to find late groups.
        listings += metrics[f"{_PREFIX}listings"] + (f"{_PREFIX}rerolled" in metrics)
        allowed += _GROUPS + metrics["timing_s/gen"] / _POLL_S
        if f"{_PREFIX}wake_ms" in metrics:
            wakes.append(metrics[f"{_PREFIX}wake_ms"])
            told.append(metrics[f"{_PREFIX}wake_ms"] - metrics[f"{_PREFIX}rows_ms"])
        ages += [metrics[name] for name in (f"{_PREFIX}age/max",) if name in metrics]
    reached = [second for second, accuracy in curve if accuracy >= 0.9]
    return {
        "accuracy": curve[-1][1],
        "seconds_to_0.9": reached[0] if reached else None,
        "wake_ms": round(float(np.percentile(wakes, 95)), 1) if wakes else None,
        "wake_p50_ms": round(float(np.median(wakes)), 1) if wakes else None,
        "told_ms": round(float(np.percentile(told, 95)), 1) if told else None,
        "listings": int(listings),
        "allowed": int(allowed),
        "max_age": max(ages, default=0.0),
        "curve": curve,
    }


if __name__ == "__main__":
    main()

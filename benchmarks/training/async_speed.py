"""How much faster the asynchronous trainers are than `sync`, when tools have long-tailed times.

    python -m benchmarks.async_speed [--modes sync colocate_async separate_async] [--steps 10] [--out FOLDER]

Each mode is one run of the quickstart on the CPU: the real engine and trainer, 8 prompts × 8 samples a step, the
certificate on. The tool sleeps: lognormal, median 1 s, sigma 1.2, cut at 30 s, fixed by row, sample and call
(`slow_calculator.py`). The model calls in about 95 % of the conversations, once (`async_speed_inputs.py`). The age of a
trained token is at most 4, the strategy is `reroll`. All modes wake up when a group has finished, `sync` too.

Time runs from the first submission, warm-up batches included, to the end of the last step: its update, and the new
weights in the engine. Trainer and engine share two cores. In `separate_async`, where both work at the same time, each
has one thread; in the other modes, where they work in turns, each has both.

The last line is a JSON object:

- `speedup`, `colocated`: seconds of `sync` divided by those of `separate_async` and of `colocate_async`;
- `second_half`: the same of the second half of the steps alone;
- `idle`, `max_age`: by mode, the share of the time in which the trainer waited for samples, and the largest age;
- `seconds`, `training_s`, `sync_s`, `rest_s`: by mode, of the run, and of a step in its updates, in giving new weights
  to the engine, and in all else but waiting;
- `called`: share of the conversations with a call; `calls_p50_s`, `calls_p95_s`: seconds of the trained calls;
- `rerolled`, `masked_share`, `prompts_lost`, `rows`, `violations`: as in `docs/train/metrics.md`.

`--save FILE` writes the measurements; `benchmarks.async_sim` reads it.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.async_speed_inputs import write_model, write_rows, write_tools
from benchmarks.async_speed_measures import calls_of, engine_of, measure, prefilling_of, turns_of
from benchmarks.quickstart_runs import MODES, arguments, folder, start
from verl_multiturn.records.read.records import read_records

PROMPTS, SAMPLES, ETA = 8, 8, 4
_MULTITURN = "actor_rollout_ref.rollout.custom.multiturn"
_LOOK_S = 0.02
_SHOWN = (
    "idle", "max_age", "seconds", "training_s", "sync_s", "rest_s", "called", "calls_p50_s", "calls_p95_s", "rerolled",
    "masked_share", "prompts_lost", "rows", "violations",
)  # fmt: skip


def main() -> None:
    """Run the modes one after another, and print the figures."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", type=Path, help="file that gets what was measured")
    given = parser.parse_args()
    out = folder(given.out, "async_speed")
    results = {}
    for mode in given.modes:
        results[mode] = run(mode, given.steps, given.seed, out)
        print(json.dumps({mode: {key: value for key, value in results[mode].items() if key != "calls"}}), flush=True)
        if given.save is not None:
            lines = [json.dumps({mode: found})[1:-1] for mode, found in results.items()]
            given.save.write_text("{" + ",\n".join(lines) + "}\n")
    print(json.dumps(summary(results)))


def summary(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last line's object from the results by mode."""

    def faster(mode: str, key: str) -> float | None:
        known = "sync" in results and mode in results
        return round(results["sync"][key] / results[mode][key], 2) if known else None

    return {
        "speedup": faster("separate_async", "seconds"),
        "colocated": faster("colocate_async", "seconds"),
        "second_half": {mode: faster(mode, "seconds_second_half") for mode in MODES[1:]},
        **{key: {mode: found[key] for mode, found in results.items()} for key in _SHOWN},
    }


def settings(mode: str, out: Path, steps: int, seed: int) -> list[str]:
    """Write the inputs of a run into `out`, and return its settings."""
    batches = steps + ETA  # those of the steps, and of the warm-up
    found = [
        *write_rows(out / "rows", batches * PROMPTS, seed),
        write_tools(out / mode / "tools.yaml", out / mode / "journal.jsonl", SAMPLES),
        write_model(out / "model", seed),
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={PROMPTS * SAMPLES}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    ]
    return found if mode == "sync" else [*found, f"{_MULTITURN}.max_staleness={ETA}"]


def run(mode: str, steps: int, seed: int, out: Path) -> dict[str, Any]:
    """Run the quickstart in a mode, and return its measurements."""
    given = settings(mode, out, steps, seed)
    its = out / mode / "run"
    ends = ends_of_steps(start(mode, steps, seed, its, *given), its / "metrics.jsonl")
    metrics = [json.loads(line)["data"] for line in (its / "metrics.jsonl").read_text().splitlines()]
    journal = [json.loads(line) for line in (out / mode / "journal.jsonl").read_text().splitlines()]
    records = list(read_records(its / "trajectories.jsonl"))
    turns = turns_of(journal, records)
    found = measure(metrics, ends, journal) | engine_of(turns)
    if mode == "sync":  # no turn is interrupted
        found |= prefilling_of(turns, journal, PROMPTS, SAMPLES)
    return found | {"calls": calls_of(journal, SAMPLES)}


def ends_of_steps(started: subprocess.Popen[bytes], metrics: Path) -> list[float]:
    """Watch a run to its end, and return when each line was written into its file of metrics (`time.time`)."""
    ends: list[float] = []
    with started as running:
        while running.poll() is None:
            time.sleep(_LOOK_S)
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            ends += [time.time()] * (lines - len(ends))
    if running.returncode:
        raise SystemExit(f"{' '.join(running.args)} failed with exit status {running.returncode}")
    return ends


if __name__ == "__main__":
    main()

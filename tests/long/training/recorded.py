"""Does verl's trainer do with recorded conversations what it did when they were sampled, and are changed ones refused?

    python -m benchmarks.recorded [--run DIR] [--out DIR] [--seed 0] [--parts step changed]

- **step**: the groups of step 1 of a quickstart (`--run`: a finished one with seed `--seed`; else it is run here) are
  the rows of a second run, whose agent loop returns the records and samples nothing. All other settings are the same.
  The policy loss must be that of the run within 1e-6, the gradient's norm within 1e-5.
- **changed**: in each record of step 1 one id of the prompt or the response, an entry of the mask, a log-probability
  or a weight version is changed, at a place that is drawn. Each changed record must be refused, and no other.

Exit status 1: something of this does not hold. The last line is one JSON object.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.quickstart_runs import ROOT, start
from verl_multiturn.certificate.check import SAMPLED
from verl_multiturn.errors import CertificateError
from verl_multiturn.observe.metric_files import read_metrics
from verl_multiturn.records.read.learning import Selection, SelectionRule, check, choose
from verl_multiturn.records.read.records import read_records

sys.path.insert(0, str(ROOT / "recipes" / "from_records"))
from prepare_data import rl_rows, write

GROUP = 8
NEAR = {"actor/pg_loss": 1e-6, "actor/grad_norm": 1e-5}
_SHOWN = (
    *NEAR, "critic/score/mean", "critic/advantages/min", "critic/advantages/max", "training/rollout_probs_diff_max",
    "rollout/certificate/rows", "rollout/certificate/tokens", "rollout/certificate/violations", "timing_s/gen",
)  # fmt: skip
_PLAIN = ("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1")
Record = dict[str, Any]


def first_step(run: Path) -> dict[str, float]:
    """Return the metrics of a run's first step."""
    return next(entry["data"] for entry in read_metrics(run) if "actor/pg_loss" in entry["data"])


def trained(out: Path, seed: int, *words: str) -> Path:
    """Run one step of the quickstart into a folder, and return it.

    Raises:
        SystemExit: The run failed.
    """
    with start("sync", 1, seed, out, *_PLAIN, *words) as run:
        if status := run.wait():
            raise SystemExit(f"the run in {out} ended with status {status}; see its train.log")
    return out


def step(run: Path, out: Path, seed: int) -> dict[str, Any]:
    """Repeat step 1 of a run from its records."""
    selection = choose([run], SelectionRule(group=GROUP))
    groups = tuple(group for group in selection.groups if group[0].step == 1)
    rows, lines = rl_rows(Selection(groups, selection.left_out, selection.faults))
    write(out / "rows", rows, lines)
    again = trained(out / "recorded", seed, f"data.train_files={out / 'rows' / 'train.parquet'}")
    ran, recorded = first_step(run), first_step(again)
    table = Table("metric of step 1", "the run", "from its records", "difference")
    found: dict[str, Any] = {"groups": len(groups), "holds": True}
    for name in _SHOWN:
        one, other = ran.get(name, np.nan), recorded.get(name, np.nan)
        table.add_row(name, repr(one), repr(other), f"{abs(one - other):.2g}")
        found[name] = [one, other]
        if name in NEAR:
            found["holds"] &= bool(abs(one - other) <= NEAR[name])
    found["holds"] &= recorded["rollout/certificate/violations"] == 0
    Console().print(table)
    return found


def _places(record: Record, kinds: tuple[int, ...]) -> list[int]:
    """Return the positions in the first row whose tokens have one of these sources."""
    row, found, at = record["rows"][0], [], 0
    for count, _, _, _, source in row["runs"]:
        found += range(at, at + count) if source in kinds else []
        at += count
    return found


def _change_id(record: Record, rng: random.Random, sampled: bool) -> None:
    row = record["rows"][0]
    places = _places(record, (SAMPLED,)) if sampled else list(range(row["prompt_length"]))
    row["ids"][rng.choice(places)] += 1


def _change_mask(record: Record, rng: random.Random) -> None:
    """Flip the mask of one token, whose run is split for it."""
    row, at, left = record["rows"][0], rng.randrange(len(record["rows"][0]["ids"])), 0
    for number, (count, mask, *rest) in enumerate(row["runs"]):
        if left <= at < left + count:
            parts = [[at - left, mask, *rest], [1, 1 - mask, *rest], [left + count - at - 1, mask, *rest]]
            row["runs"][number : number + 1] = [part for part in parts if part[0]]
            return
        left += count


def _change_logprob(record: Record, rng: random.Random) -> None:
    numbers = record["rows"][0]["logprobs"]
    at = rng.randrange(len(numbers))
    # The next number that float32 has.
    numbers[at] = float(np.nextafter(np.float32(numbers[at]), np.float32(-1e9)))


def _change_version(record: Record, rng: random.Random) -> None:
    runs = [run for run in record["rows"][0]["runs"] if run[4] == SAMPLED]
    rng.choice(runs)[2] += 1


CHANGES: dict[str, Callable[[Record, random.Random], None]] = {
    "sampled id": lambda record, rng: _change_id(record, rng, sampled=True),
    "prompt id": lambda record, rng: _change_id(record, rng, sampled=False),
    "mask": _change_mask,
    "log-probability": _change_logprob,
    "weight version": _change_version,
}


def refused(record: Record) -> bool:
    """Return whether a record is refused."""
    try:
        check(record)
    except CertificateError:
        return True
    return False


def changed(run: Path, seed: int) -> dict[str, Any]:
    """Change each record of a run's first step in each way."""
    rng = random.Random(seed)
    records = [json.loads(json.dumps(record)) for record in _tried(run)]
    found: dict[str, Any] = {"records": len(records), "refused_unchanged": sum(map(refused, records))}
    for name, change in CHANGES.items():
        count = 0
        for record in records:
            other = copy.deepcopy(record)
            change(other, rng)
            count += refused(other)
        found[name] = count
    found["holds"] = found["refused_unchanged"] == 0 and all(found[name] == len(records) for name in CHANGES)
    print(f"{len(records)} records: " + ", ".join(f"{found[name]} refused with another {name}" for name in CHANGES))
    return found


def _tried(run: Path) -> Iterator[Record]:
    """Yield the records of a run's first step."""
    return (record for record in read_records(run) if record["step"] == 1 and not record["validation"])


def run(parts: Sequence[str], finished: Path | None, out: Path, seed: int) -> dict[str, Any]:
    """Run the parts, print the results, and return the figures.

    Args:
        parts: Of `step` and `changed`.
        finished: Folder of a quickstart with records; None makes one.
        out: Folder for the runs.
        seed: The run's seed.
    """
    began = time.monotonic()
    run = finished.absolute() if finished is not None else trained(out / "run", seed)
    found: dict[str, Any] = {}
    if "changed" in parts:
        found["changed"] = changed(run, seed)
    if "step" in parts:
        found["step"] = step(run, out, seed)
    found |= {"seed": seed, "seconds": round(time.monotonic() - began, 1)}
    return found | {"ok": all(found[part]["holds"] for part in parts)}

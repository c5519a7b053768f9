"""Does the certificate catch every fault of a batch, stay silent on honest batches, and cost almost nothing?

    python -m benchmarks.certificate [--steps 10] [--run DIR]

The benchmark has four parts:
1. It runs the quickstart with the certificate on every batch, or reads the folder of a finished run (`--run`). It
  verifies every trajectory that the real engine sampled for training, both as its record and as the batch row made from
  it. These rows are honest, so every alarm is a false one.
2. It verifies the hard honest conversations of `honest.py` with the trainer's own code. Every alarm is a false
  one here, too.
3. It puts every corruption of `corruptions.py` into many rows of both kinds. A seed draws the rows, their
  partners and the corrupted places. A corruption counts as caught only if the certificate reports it in every row, and
  points at the right turn and token.

4. It does the same with conversations of several rows (`row_conversations.py`): 1,000 honest ones, and every
  fault in how their rows belong together.

All of it is done twice: with the rows together, and in parts, as processes verify a large batch
(`certificate_parts.py`). Each row is a part of its own then, so that rows of one conversation, and rows that
are twice in the batch, lie in different parts.

`step_share` is the certificate's part of the steps' time, including the time to fetch the batch.

The last line is one JSON object. When the run's own log does not report that its trainer verified every trajectory,
there is no such line and the exit status is 1.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.long.tokens.corruptions import CORRUPTIONS
from tests.long.tokens.row_conversations import CONVERSATION_FAULTS, honest, trials, violations
from tests.support.samples import Corrupted, Sample, sample_of_record
from verl_multiturn.certificate.check import verify
from verl_multiturn.records.verify.record import verify_record

ROOT = Path(__file__).resolve().parents[3]
PREFIX = "rollout/certificate/"
HARD = 1200
"""Smallest number of conversations to request from `honest.py`."""
TRIALS = 200
"""Number of rows that each corruption is put into; fewer where fewer rows have room for it."""
CONVERSATIONS = 1000
"""Number of honest conversations of several rows."""


def run_quickstart(out: Path, steps: int) -> None:
    """Run the quickstart in a process of its own.

    Args:
        out: Folder that the run writes to.
        steps: Number of training steps.
    """
    command = [sys.executable, "-m", "verl_multiturn.cli", "run", "quickstart", "--out", str(out)]
    environment = {**os.environ, "VERL_PLATFORM": os.environ.get("VERL_PLATFORM", "cpu")}
    subprocess.run([*command, "--steps", str(steps)], check=True, env=environment)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file with one object per line."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def step_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the logged metrics of each training step, from the file of a run's metrics."""
    return [entry["data"] for entry in read_lines(path) if f"{PREFIX}rows" in entry["data"]]


def complaint(records: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> str:
    """Return why a run proves nothing about the certificate; empty when its trainer verified every row.

    Args:
        records: Records of the trajectories that were sampled for training.
        metrics: Logged metrics of each training step, as `step_metrics` returns them.
    """
    verified = sum(step[f"{PREFIX}rows"] for step in metrics)
    unverified = sum(step[f"{PREFIX}unverified"] for step in metrics)
    if not records:
        return "the run recorded no trajectory that was sampled for training"
    if verified != len(records) or unverified:
        return (
            f"the run's trainer verified {verified:g} rows and left {unverified:g} unverified, where {len(records)} "
            "trajectories were sampled for training"
        )
    return ""


def false_alarms(records: list[dict[str, Any]]) -> int:
    """Count the honest records that raise an alarm, as records or as batch rows, and print each alarm."""
    alarms = 0
    for record in records:
        sample = sample_of_record(record)
        violations = [
            *verify_record(record).violations,
            *verify(sample.row, sample.receipts, filtered=sample.receipts.invalid),
        ]
        alarms += bool(violations)
        for violation in violations:
            print(f"false alarm: {violation}")
    return alarms


def samples_of(records: list[dict[str, Any]]) -> list[Sample]:
    """Return the batch rows that a fault can be put into.

    A record qualifies when its conversation is valid, every answer of the engine is a generation, and every token's
    weight version is known.
    """
    made = [sample_of_record(record) for record in records if record["valid"]]
    return [s for s in made if all(g.is_generation and (g.versions >= 0).all() for g in s.receipts.generations)]


def trials_of(
    name: str, samples: list[Sample], most: int, is_caught: Callable[[Corrupted], bool] = Corrupted.caught
) -> tuple[int, int]:
    """Put a corruption into some rows.

    Args:
        name: Key of `CORRUPTIONS`; also the seed.
        samples: Honest rows to corrupt.
        most: Number of rows to corrupt; fewer where fewer have room for it.
        is_caught: Returns whether the certificate finds a fault and points at the right place.

    Returns:
        The number of corrupted rows, and the number of those in which the certificate pointed at the right place.
    """
    rng = random.Random(name)
    put = caught = 0
    for sample in rng.sample(samples, len(samples)):
        corrupted = CORRUPTIONS[name](sample, rng.choice(samples), rng)
        if corrupted is not None:
            put += 1
            caught += is_caught(corrupted)
        if put == most:
            break
    return put, caught


def run(out: Path, least: int = HARD, most: int = TRIALS, conversations: int = CONVERSATIONS) -> dict[str, Any]:
    """Run all four parts, print the tables, and return the figures.

    Args:
        out: Folder of a finished quickstart.
        least: Smallest number of hard conversations.
        most: Number of rows that each corruption is put into; fewer where fewer rows have room for it.
        conversations: Number of honest conversations of several rows.

    Raises:
        SystemExit: The run's trainer did not verify each of its rows.
    """
    # They import verl and Ray, which nothing else in this module needs.
    from tests.long.tokens import honest as hard_ones
    from tests.long.tokens.certificate_parts import caught_in_parts, violations_in_parts

    records = [record for record in read_lines(out / "trajectories.jsonl") if not record["validation"]]
    metrics = step_metrics(out / "metrics.jsonl")
    if problem := complaint(records, metrics):
        sys.exit(f"{out}: {problem}; the certificate proves nothing here")
    alarms = false_alarms(records)
    hard = hard_ones.roll(least)
    hard_alarms, padding = hard_ones.false_alarms(hard)
    several = [honest(seed) for seed in range(conversations)]
    singles = [sample_of_record(record) for record in [*records, *(each.record for each in hard)]]
    several_alarms = [found[0] for rows in several if (found := violations(rows))]
    parts_alarms = [
        found[0] for rows in [*several, *([each] for each in singles), singles] if (found := violations_in_parts(rows))
    ]
    for alarm in [*hard_alarms, *several_alarms, *parts_alarms]:
        print(f"false alarm: {alarm}")
    samples = samples_of([*records, *(each.record for each in hard)])

    results = {name: trials_of(name, samples, most) for name in CORRUPTIONS}
    results_in_parts = {name: trials_of(name, samples, most, caught_in_parts) for name in CORRUPTIONS}
    joined = {name: trials(name, several, most) for name in CONVERSATION_FAULTS}
    joined_in_parts = {name: trials(name, several, most, violations_in_parts) for name in CONVERSATION_FAULTS}
    for title, what, found in (
        ("what the certificate catches", "rows", results),
        ("what it catches in parts", "rows", results_in_parts),
        ("what it catches in conversations of several rows", "conversations", joined),
        ("what it catches in their parts", "conversations", joined_in_parts),
    ):
        table = Table("corruption", what, "caught", title=title)
        for name, (put, caught) in found.items():
            table.add_row(name.replace("_", " "), str(put), f"{caught}{'' if caught == put else '  MISSED'}")
        Console().print(table)
    table = Table("what is hard", "conversations", title="honest conversations on the scripted engine")
    for kind, count in hard_ones.kinds(hard).most_common():
        table.add_row(kind, str(count))
    Console().print(table)
    print(f"honest, of the real engine: {len(records)}, {alarms} false alarms")
    print(
        f"hard, of the scripted engine: {len(hard)}, {len(hard_alarms)} false alarms; beside them {padding} of filling"
    )
    count = sum(len(rows) for rows in several)
    print(f"conversations of several rows: {len(several)} with {count} rows, {len(several_alarms)} false alarms")
    share = sum(step[f"{PREFIX}seconds"] for step in metrics) / sum(step["timing_s/step"] for step in metrics)
    return {
        "corruptions": len(results),
        "caught": sum(0 < put == caught for put, caught in results.values()),
        "caught_in_parts": sum(0 < put == caught for put, caught in results_in_parts.values()),
        "conversation_corruptions": len(joined),
        "conversation_caught": sum(0 < put == caught for put, caught in joined.values()),
        "conversation_caught_in_parts": sum(0 < put == caught for put, caught in joined_in_parts.values()),
        "honest": len(records) + len(hard),
        "honest_of_several_rows": len(several),
        "false_alarms": alarms
        + len(hard_alarms)
        + len(several_alarms)
        + len(parts_alarms)
        + int(sum(step[f"{PREFIX}violations"] for step in metrics)),
        "step_share": round(share, 5),
    }

"""A loss, rows, a sampler and a filter of one's own: the files of docs/write/plugins.md in real two-step trainings.

Their start-up checks are in `tests/integration/test_own_algorithms.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.own_algorithms import write_files
from verl_multiturn.records.read.records import read_records

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode=my_reinforce"


def trained(folder: Path, words: list[str], **variables: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train the quickstart's two steps, and return the metrics of each step and the records of trained rows."""
    path = os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "verl_multiturn.cli", "run", "quickstart", "--smoke", "--out", str(folder / "out")]
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "PYTHONPATH": path, **variables}
    done = subprocess.run([*command, *words], env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (folder / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [json.loads(line)["data"] for line in lines]
    steps = [data for data in logged if "actor/grad_norm" in data]
    assert len(steps) == 2
    assert all(data["rollout/certificate/violations"] == 0 for data in steps)
    records = [record for record in read_records(folder / "out" / "records") if not record["validation"]]
    return steps, records


def of_step(record: dict[str, Any]) -> int:
    """Return the step that trained a conversation; 0 for none."""
    return int(record.get("trained_step") or 0)


def test_loss_rows_and_sampler(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    steps, records = trained(tmp_path, [*files["my_loss"], *files["my_rows"], *files["my_sampler"]])
    # The actor called the loss: its metric is a mean of log-probabilities.
    assert all(data["actor/my_reinforce/log_prob"] < 0 for data in steps)
    # The rows are those that were made, in their order: half of each batch is hard, and only the first step avoids it.
    asked = {record["prompt_text"] for record in records}
    print(len(asked))


def test_filter(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    steps, records = trained(tmp_path, files["my_filter"])
    numbers: dict[str, set[float]] = defaultdict(set)
    print(len(records), len(steps), numbers)


def test_a_loss_by_the_environment(tmp_path: Path) -> None:
    write_files(tmp_path)
    steps, _ = trained(tmp_path, [LOSS], VERL_USE_EXTERNAL_MODULES="my_loss")
    assert all(data["actor/my_reinforce/log_prob"] < 0 for data in steps)

"""A loss, rows, a sampler and a filter of one's own: the files of docs/write/plugins.md in real two-step trainings.

Their start-up checks are in `tests/integration/test_own_registrations.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.own_registrations import write_files
from verl_multiturn.records.read.records import Records, read_records

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode=my_reinforce"
LOG_PROB = "actor/my_reinforce/log_prob"
BATCH = 8  # prompts of a step of `--smoke`


def train(folder: Path, words: list[str], **variables: str) -> list[dict[str, Any]]:
    """Train the quickstart's two steps in `folder`/out, and return the metrics of each step."""
    path = os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "verl_multiturn.cli", "run", "quickstart", "--smoke", "--out", str(folder / "out")]
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "PYTHONPATH": path, **variables}
    done = subprocess.run([*command, *words], env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (folder / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [data for data in (json.loads(line)["data"] for line in lines) if "actor/grad_norm" in data]
    assert len(steps) == 2
    assert [data["rollout/certificate/violations"] for data in steps] == [0, 0]
    return steps


def trained_groups(out: Path) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """Return the rows of each step's join by the uid of their group."""
    found: dict[int, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in Records(out).joined().to_pylist():
        if not row["validation"] and row["uid"] is not None:
            found[row["step"]][row["uid"]].append(row)
    return found


def numbers_of(out: Path) -> dict[str, int]:
    """Return the number of the row of `my_rows.py` that each group was asked, by the group's uid."""
    found = {}
    for record in read_records(out / "records"):
        if not record["validation"]:
            question = next(each["content"] for each in record["messages"] if each["role"] == "user")
            ((one, _),) = re.findall(r"problem: (\d+) \+ (\d+) =", question)
            found[record["uid"]] = int(one) - (12 if len(one) < 6 else 123_456)
    return found


def test_loss_rows_and_sampler(tmp_path: Path) -> None:
    files, out = write_files(tmp_path), tmp_path / "out"
    steps = train(tmp_path, [*files["my_loss"], *files["my_rows"], *files["my_sampler"]])
    # The actor called the loss: its metric is a mean of log-probabilities.
    assert all(data[LOG_PROB] < 0 for data in steps)
    # The rows come in their order. Every second one is long: the first step trains none, the second whatever comes.
    numbers, groups = numbers_of(out), trained_groups(out)
    assert {step: sorted(numbers[uid] for uid in own) for step, own in groups.items()} == {
        1: list(range(0, 2 * BATCH, 2)),
        2: list(range(2 * BATCH - 1, 3 * BATCH - 1)),
    }
    assert sorted(numbers.values()) == list(range(3 * BATCH - 1)), "each row was asked once, those left out, too"


def test_filter(tmp_path: Path) -> None:
    files, out = write_files(tmp_path), tmp_path / "out"
    # Of two conversations about half of all groups agree: without the filter some of sixteen would.
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    sizes = [f"{rollout}.log_prob_micro_batch_size_per_gpu=16", f"{actor}.ppo_micro_batch_size_per_gpu=16"]
    train(tmp_path, [*files["my_filter"], f"{rollout}.n=2", *sizes])
    groups = trained_groups(out)
    assert {step: len(own) for step, own in groups.items()} == {1: BATCH, 2: BATCH}
    for own in groups.values():
        for rows in own.values():
            assert {json.loads(row["parts"])["right"] for row in rows} == {0.0, 1.0}


def test_a_loss_by_the_environment(tmp_path: Path) -> None:
    write_files(tmp_path)
    assert all(data[LOG_PROB] < 0 for data in train(tmp_path, [LOSS], VERL_USE_EXTERNAL_MODULES="my_loss"))

"""The asynchronous trainer `separate_async` on the real stack: the versions of tokens, and the proximal policy.

The modes are those of `verl-multiturn run --mode`.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.warm_python import of_run
from verl_multiturn.records.read.records import read_records

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

ACTOR = "actor_rollout_ref.actor"
OURS = "actor_rollout_ref.rollout.custom.multiturn"


def run(mode: str, out: Path, *settings: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run the quickstart's smoke run in a mode; return the metrics of its steps, and its conversations' records."""
    command = [sys.executable, "-m", "verl_multiturn.cli", "run", "quickstart", "--smoke", "--mode", mode]
    variables, words = of_run()
    quick = ("trainer.val_before_train=False", "trainer.test_freq=-1", *words)
    settings = (f"--out={out}", *quick, *settings)
    done = subprocess.run([*command, *settings], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    metrics = [json.loads(line)["data"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    records = list(read_records(out / "trajectories.jsonl"))
    return metrics, records


def test_trainer_and_servers_apart(tmp_path: Path) -> None:
    """With the bound 0, a step trains only tokens that its own first parameters sampled.

    So the probabilities of its second update agree with the engine's only if that update's proximal policy has those
    parameters, too, and not the ones that the first update made.
    """
    two_updates = [
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=32",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
    ]
    metrics, records = run(
        "separate_async",
        tmp_path / "out",
        "--steps=2",
        f"{OURS}.max_staleness=0",
        *two_updates,
        "trainer.v1.separate_async.parameter_sync_step=2",
        f"{ACTOR}.optim.lr=1e-2",  # so that a step's two updates differ
    )
    assert len(metrics) == 2
    for data in metrics:
        assert data["rollout/certificate/rows"] == 8 * 8
        assert data["rollout/certificate/violations"] == 0
        assert data["rollout/async/age/max"] == 0
        assert data["rollout/async/masked_share"] == 0
        assert data["training/rollout_probs_diff_max"] < 1e-4
    assert {run[2] for record in records for row in record["rows"] for run in row["runs"] if run[2] >= 0} == {0, 1}

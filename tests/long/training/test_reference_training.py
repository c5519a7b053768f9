"""A real training on the CPU resets its reference, and resumes with the reference of its checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_multiturn.models.checkpoints import checkpoint_folder, reference_folder
from verl_multiturn.records.read.records import Records

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(3600)]

REF = "actor_rollout_ref.ref"
PREFIX = "rollout/reference/"
SETTINGS = [
    "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "data.val_max_samples=16",
    "actor_rollout_ref.actor.use_kl_loss=True", f"{REF}.log_prob_micro_batch_size_per_gpu=64",
    f"{REF}.fsdp_config.dtype=float32",
    f"+{REF}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
    "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=3",
]  # fmt: skip
EVERY = "+actor_rollout_ref.rollout.custom.multiturn.reference_reset.every="


def train(out: Path, steps: int, *words: str) -> dict[int, dict[str, float]]:
    """Train up to a step, and return the metrics of the run's steps."""
    command = [sys.executable, "-m", "verl_multiturn.cli", "run", "quickstart", "--out", str(out)]
    command += ["--steps", str(steps), *SETTINGS, *words]
    environment = {**os.environ, "VERL_PLATFORM": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    last = max(out.glob("metrics*.jsonl"), key=lambda path: path.stat().st_mtime)  # a start that resumes has its own
    lines = [json.loads(line) for line in last.read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["data"] for line in lines if f"{PREFIX}step" in line["data"]}


def test_four_steps_with_two_resets_and_a_resume(tmp_path: Path) -> None:
    out = tmp_path / "out"
    steps = train(out, 4, f"{EVERY}2")
    assert [steps[step][f"{PREFIX}step"] for step in range(1, 5)] == [0, 0, 2, 2]
    assert [steps[step][f"{PREFIX}reset"] for step in range(1, 5)] == [0, 1, 0, 1]
    for step in (1, 3):  # the actor is the reference
        assert abs(steps[step][f"{PREFIX}kl"]) <= 1e-6
        assert abs(steps[step]["actor/kl_loss"]) <= 1e-6
    for step in (2, 4):
        assert steps[step][f"{PREFIX}kl"] > 1e-5
        assert steps[step][f"{PREFIX}kl"] == pytest.approx(steps[step]["actor/kl_loss"], rel=1e-3)
    checkpoints = out / "checkpoints"
    first, second, third = (
        reference_folder(checkpoint_folder(checkpoints, step)) / "reference_world_size_1_rank_0.pt"
        for step in (2, 3, 4)
    )
    assert first.samefile(second)
    assert not second.samefile(third)
    resumed = train(
        out, 5, f"{EVERY}100", "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={checkpoint_folder(checkpoints, 3)}",
    )  # fmt: skip
    for step in (4, 5):
        assert (resumed[step][f"{PREFIX}step"], resumed[step][f"{PREFIX}reset"]) == (2, 0)
        assert resumed[step][f"{PREFIX}kl"] > 1e-5
    assert third.samefile(second)  # written over, with the reference that the resumed start has
    starts = sorted(run["reference_step"] for run in Records(out).runs)
    assert starts == [0, 2]

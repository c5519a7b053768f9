"""A real training on the CPU with a teacher on SGLang: the policy's own first weights teach it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(3600)]

TEACHER = "distillation.teacher_models.teacher_model"
SETTINGS = [
    "distillation.enabled=True", "distillation.nnodes=1", "distillation.n_gpus_per_node=1",
    f"{TEACHER}.model_path={ROOT / 'recipes' / 'quickstart' / 'model'}",
    f"{TEACHER}.inference.tensor_model_parallel_size=1",
]  # fmt: skip
LOSS = "distillation.distillation_loss"


@pytest.mark.parametrize(
    "words", [[], [f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=5"]], ids=["k3", "forward_kl_topk"]
)
def test_two_steps_with_a_teacher(tmp_path: Path, words: list[str]) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "verl_multiturn.cli", "run", "quickstart", "--smoke", "--out", str(out)]
    environment = {**os.environ, "VERL_PLATFORM": "cpu"}
    done = subprocess.run([*command, *SETTINGS, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = {line["step"]: line["data"] for line in lines if "actor/distillation/loss" in line["data"]}
    assert steps.keys() == {1, 2}
    assert abs(steps[1]["actor/distillation/loss"]) <= 1e-6  # the policy is its teacher
    assert steps[2]["actor/distillation/loss"] > 1e-5
    assert [steps[step]["rollout/certificate/violations"] for step in (1, 2)] == [0, 0]
    assert all(steps[step]["rollout/certificate/tokens"] > 0 for step in (1, 2))

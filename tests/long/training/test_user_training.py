"""Both speakers of a conversation are trained: two real steps, in which the quickstart's model plays the user, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from verl_multiturn.records.read.records import Records, read_records
from verl_multiturn.records.verify.record import verify_record

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

OURS = "actor_rollout_ref.rollout.custom.multiturn"
BOTH = ["assistant", "user"]
GAME = '''
"""A zero-sum game of both speakers: who says more."""

from verl_multiturn.interactions.policy_user import PolicyUser


class Game(PolicyUser):
    def __init__(self, config):
        super().__init__(config)
        self.said = {}

    async def reply(self, instance_id, messages, **kwargs):
        answer = await super().reply(instance_id, messages, **kwargs)
        told = self.said.setdefault(instance_id, [0, 0])
        told[0] += len(messages[-1]["content"])
        told[1] += len(answer.text)
        return answer

    async def score(self, instance_id):
        assistant, user = self.said.pop(instance_id, (0, 0))
        won = float((assistant > user) - (assistant < user))
        return {"roles": {"assistant": won, "user": -won}}
'''
USERS = """
interaction:
  - name: game
    class_name: my_game.Game
    config: {persona: "You want a sum.", max_user_turns: 2, max_tokens: 24}
"""


def run(folder: Path, *words: str) -> str:
    """Run a command of ours in a folder, and return its output."""
    path = os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "verl_multiturn.cli", *words]
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_two_steps_in_which_both_speakers_learn(tmp_path: Path) -> None:
    (tmp_path / "my_game.py").write_text(GAME)
    (tmp_path / "users.yaml").write_text(USERS)
    out = tmp_path / "out"
    run(
        tmp_path, "run", "quickstart", "--smoke", "--out", str(out),
        f"++{OURS}.train=[assistant,user]", f"++{OURS}.interaction_config_path={tmp_path / 'users.yaml'}",
        f"++{OURS}.interaction_reward.mode=add", f"++{OURS}.prefix_tree=auto", f"++{OURS}.filter=skip",
        "algorithm.adv_estimator=mt_grpo", "data.max_prompt_length=768", "data.max_response_length=320",
    )  # fmt: skip
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged: list[dict[str, Any]] = [json.loads(line)["data"] for line in lines]
    steps = [data for data in logged if "actor/grad_norm" in data]
    assert len(steps) == 2
    for data in steps:
        assert data["rollout/certificate/violations"] == data["rollout/certificate/unverified"] == 0
        tokens = [data[f"rollout/role/{role}/trained_tokens"] for role in BOTH]
        assert all(tokens)
        assert sum(tokens) == data["rollout/certificate/tokens"]
        assert data["rollout/role/user/silent"] < data["rollout/role/user/conversations"]
        assert data["rollout/role/user/advantage/mean_abs"] > 0
    assert max(data["actor/grad_norm"] for data in steps) > 0
    records = list(read_records(out / "records"))
    assert all(verify_record(record).violations == [] for record in records)
    assert {tuple(record["trained"]) for record in records} == {tuple(BOTH)}
    spoken = [each for record in records for each in record["generations"] if each["role"] == "user"]
    assert spoken
    assert {each["cause"] for each in spoken} <= {None, "dropped_row"}
    rows = [row for row in Records(out).joined().to_pylist() if not row["validation"]]
    assert {row["role"] for row in rows} == set(BOTH)
    assert all(row["advantages"] is not None for row in rows)
    replayed = json.loads(run(tmp_path, "replay", str(out), "--trust").strip().splitlines()[-1])
    assert (replayed["different"], replayed["skipped"], replayed["same"]) == (0, 0, len(records))
    assert "role user" in run(tmp_path, "show", str(out), records[-1]["request_id"])

"""`scripts/harbor.sh` without Harbor: the faults that it finds, and the tasks that it makes."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from scripts.harbor.__main__ import faults
from scripts.harbor.made_tasks import MISSING, make_task
from scripts.harbor.policies import commands, keystrokes
from verl_multiturn.harnesses.harbor.trials.definition import read_definition

GOOD = {"stop": "finished", "valid": True, "reward": 1.0, "completions": 2, "accounted": 2, "violations": []}
FAILED = {**GOOD, "stop": "agent_error", "reward": 0.0}
INVALID = {**GOOD, "stop": "unjudged", "valid": False, "reward": 0.0}
RIGHT: dict[str, dict[str, Any]] = {
    "workspace.oracle": {"end": "returned", "reward": 1.0, "problem": ""},
    "workspace.nop": {"end": "returned", "reward": 0.0, "problem": ""},
    "workspace.solved": GOOD,
    "workspace.cheated": {**GOOD, "reward": 0.0},
    "workspace.late": FAILED,
    "podman.killed": INVALID,
    "podman": {"skipped": "podman is not installed"},
    "refusals.x": {"refused": True, "problem": "x"},
}


def test_what_is_as_it_has_to_be_is_no_fault() -> None:
    assert faults(RIGHT) == []


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("workspace.oracle", {"reward": 0.0}),
        ("workspace.nop", {"reward": 1.0}),
        ("workspace.nop", {"end": "unjudged"}),
        ("workspace.solved", {"reward": 0.0}),
        ("workspace.solved", {"stop": "agent_error"}),
        ("workspace.solved", {"violations": ["v"]}),
        ("workspace.solved", {"accounted": 1}),
        ("workspace.cheated", {"reward": 1.0}),
        ("workspace.late", {"valid": False}),
        ("podman.killed", {"valid": True}),
        ("podman.killed", {"stop": "agent_failed"}),
        ("refusals.x", {"refused": False}),
    ],
)
def test_what_is_not_is_a_fault(name: str, changed: dict[str, object]) -> None:
    [fault] = faults({**RIGHT, name: {**RIGHT[name], **changed}})
    assert fault.startswith(name)


def test_made_tasks(tmp_path: Path) -> None:
    task = make_task(tmp_path, "count", base="scratch", agent_s=7)
    described = tomllib.loads((task / "task.toml").read_text())
    assert described["verifier"]["environment_mode"] == "separate"
    assert described["agent"]["timeout_sec"] == 7
    assert read_definition(task / "environment", None).copies == [("words.txt", "/app/words.txt")]
    missing = tomllib.loads((make_task(tmp_path, "missing", base=MISSING) / "task.toml").read_text())
    assert missing["environment"]["docker_image"] == MISSING


def test_policies() -> None:
    turns: list[int] = []
    say = commands("ls", before=turns.append)
    assert '"command": "ls"' in say("", 0)
    assert "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in say("", 1)
    assert turns == [0, 1]
    assert '"task_complete": false' in keystrokes("ls")("", 0)
    assert '"task_complete": true' in keystrokes("ls")("", 1)

"""The last table of a run: for the user who trained it."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.conftest import ROOT
from tests.unit.trainer.test_checkpoints import write
from verl_multiturn.runs.last_table import print_last

ACCURACY = "val-core/calc/acc/mean@1"


def step(number: int, reward: float, **more: Any) -> dict[str, Any]:
    data = {
        "training/global_step": number,
        "critic/score/mean": reward,
        "timing_s/step": 30.0,
        "rollout/trajectories": 8,
        "rollout/invalid_share": 0.125,
        "rollout/raised": 0.0,
        "rollout/calls/total": 10,
        "rollout/calls/error_rate": 0.1,
        "rollout/calls/timeout_rate": 0.2,
        "rollout/calls/ok_rate": 0.7,
        "rollout/certificate/rows": 8,
        "rollout/certificate/violations": 0,
    }
    return {"step": number, "data": data | more}


def printed(out: Path, capsys: pytest.CaptureFixture[str], *entries: dict[str, Any], **own: str) -> list[str]:
    """Print the table of a run with these entries, and return its lines without their frame."""
    (out / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    console = Console(file=io.StringIO(), width=100)
    print_last(out, {"steps": len(entries), "join_score_diff": 0.5}, own, console)
    assert isinstance(console.file, io.StringIO)
    assert capsys.readouterr().out == f'{{"steps": {len(entries)}, "join_score_diff": 0.5}}\n'
    cells = [[cell.strip() for cell in line.split("│")] for line in console.file.getvalue().splitlines()]
    return [": ".join(filter(None, line)) for line in cells if "─" not in line[0]]


def test_what_a_user_wants_to_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "my run"
    (out / "records").mkdir(parents=True)
    folder = write(out / "checkpoints", 2)
    monkeypatch.setattr("verl_multiturn.runs.last_table._model_of", lambda run: folder / "actor")
    (out / "start_up.json").write_text(json.dumps({"started": 1000.0}))
    monkeypatch.setattr(time, "time", lambda: 1100.0)
    before, after = {"step": 0, "data": {ACCURACY: 0.25}}, {ACCURACY: 0.75}
    lines = printed(out, capsys, before, step(1, 0.1), step(2, 0.9, **after), **{"all [right]": "3 of 4"})
    assert lines == [
        "my run",
        "steps: 2",
        "reward, step 1 → 2: 0.100 → 0.900",
        "validation accuracy, step 0 → 2: 0.250 → 0.750",
        "all [right]: 3 of 4",
        "calls: 20, 1.25 a conversation",
        "failed calls: 6 (error 2, timeout 4)",
        "conversations: 16, 2 invalid, 0 raised",
        "certificate: 16 rows, 0 violations",
        "time: 0:01:00 in steps, 0:01:40 since its start",
        f"model: {folder}/actor",
        "next:",
        f"verl-multiturn show '{out}'",
        f"verl-multiturn view '{out}'",
        f"verl-multiturn export '{out}' --to '{out}-model'",
    ]


def test_a_run_that_kept_nothing_says_what_to_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (out := tmp_path / "run").mkdir()
    lines = printed(out, capsys, {"step": 1, "data": {"critic/score/mean": 0.5}})
    assert lines == [
        "run",
        "steps: 1",
        "reward, step 1 → 1: 0.500 → 0.500",
        "time: 0:00:00 in steps",
        "model: none was kept (trainer.save_freq)",
        "next:",
        "the same run with ++actor_rollout_ref.rollout.custom.multiturn.record_dir=… trainer.save_freq=…, to read its "
        "conversations and to keep its model",
    ]
    (out / "records").mkdir()
    lines = printed(out, capsys)
    assert lines[-3:] == [f"verl-multiturn {command} {out}" for command in ("show", "view", "explain")]


# `from_records` is a fine-tuning, which has no conversations and no steps of rewards.
_WITHOUT_METRICS = ("from_records", "closed_loop")
"""Recipes that are no run of verl's PPO trainer, so that there are no metrics for the table."""
REPORTS = [path for path in sorted((ROOT / "recipes").glob("*/report.py")) if path.parent.name not in _WITHOUT_METRICS]


@pytest.mark.parametrize("script", REPORTS, ids=lambda path: path.parent.name)
def test_every_report_ends_in_this_table(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert text.count("print_last(") == 1
    assert "print(json.dumps(" not in text  # it prints the JSON object, behind the table


def test_rewards_that_broke_have_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = {f"rollout/reward/{name}/mean": 0.0 for name in ("timed_out", "outage", "unjudgeable")}
    failed["rollout/reward/failed/mean"] = 1.0
    lines = printed(tmp_path, capsys, step(1, 0.0, **failed), step(2, 0.0, **failed))
    assert "rewards: 16 failed: they score 0, whatever the answer (verl-multiturn explain)" in lines

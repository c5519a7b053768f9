"""The display of a run while it lasts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from verl_multiturn.observe.metric_files import REWARD
from verl_multiturn.runs import start_up as start_up_module
from verl_multiturn.runs.progress import Display, StepLines, follow
from verl_multiturn.runs.start_up import StartUp


def trained(reward: float, seconds: float = 10.0, **more: Any) -> dict[str, Any]:
    return {REWARD: reward, "timing_s/step": seconds, **more}


def test_a_step_has_its_reward_calls_seconds_stops_and_what_is_left() -> None:
    stops = {"rollout/stop/finished": 0.75, "rollout/stop/response_length": 0.25, "rollout/stop/cancelled": 0.0}
    lines = StepLines(total=12)
    data = trained(0.5, 10.0, **{"rollout/calls/per_trajectory/mean": 1.25}, **stops)
    assert lines.of(9, data) == [
        "step   9  reward 0.500  calls/trajectory 1.25  10.0 s  finished 75 %, response_length 25 %  left 0:00:30"
    ]
    assert lines.of(10, trained(0.5, 20.0)) == ["step  10  reward 0.500  20.0 s  left 0:00:30"]
    assert lines.of(12, trained(1.0)) == ["step  12  reward 1.000  10.0 s"]
    # Without a number of steps the remaining time is not shown.
    assert StepLines(total=None).of(1, trained(0.5)) == ["step   1  reward 0.500  10.0 s"]
    (line,) = StepLines(total=None).of(1, trained(0.5) | {"rollout/raised": 9.0})
    assert line == "step   1  reward 0.500  10.0 s  9 raised (search the log for Error)"
    assert lines.of(13, {REWARD: None}) == []
    broke = {f"rollout/reward/{name}/mean": 0.0 for name in ("timed_out", "outage", "unjudgeable")}
    broke |= {"rollout/trajectories": 8, "rollout/reward/failed/mean": 1.0}
    assert StepLines(total=None).of(1, trained(0.0) | broke) == ["step   1  reward 0.000  8 rewards failed  10.0 s"]


def test_a_validation_has_its_accuracy_for_each_data_set() -> None:
    lines = StepLines(total=None)
    one = {"val-core/openai/gsm8k/acc/mean@1": 0.25, "val-core/openai/gsm8k/reward/mean@1": 0.5, "val-aux/x": 1.0}
    assert lines.of(0, one) == ["step   0  validation accuracy 0.250"]
    two = {**one, "val-core/sql/reward/mean@4": 0.125, "val-core/none/acc/mean@1": None}
    assert lines.of(5, two) == [
        "step   5  validation accuracy of openai/gsm8k 0.250",
        "step   5  validation reward of sql 0.125",
    ]


def test_a_growing_file_is_followed_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = follow(path)
    assert next(lines) == ""
    path.write_bytes(b"one\ntw")
    assert [next(lines), next(lines)] == ["one", ""]
    with path.open("ab") as file:
        file.write("o ü".encode()[:-1])
    assert next(lines) == ""
    with path.open("ab") as file:
        file.write("ü".encode()[-1:] + b"\n")
    assert [next(lines), next(lines)] == ["two ü", ""]
    assert next(follow(path, path.stat().st_size)) == ""


def show(folder: Path, start_up: StartUp | None, total: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=200)
    display = Display(folder / "train.log", folder / "metrics.jsonl", None, total, console, start_up)
    display._log = follow(folder / "train.log")
    display.show_while(lambda: False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_run_is_shown_from_its_files(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("ray init kwargs: {}\nTotal training steps: 3\nstep:1 - reward:0.5\n")
    entries = [{"step": 0, "data": {"val-core/a/acc/mean@1": 0.5}}, {"step": 1, "data": trained(0.5)}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    start_up = StartUp(0.0)
    shown = show(tmp_path, start_up)
    lines = [line for line in shown.splitlines() if line.startswith("step")]
    assert lines == ["step   0  validation accuracy 0.500", "step   1  reward 0.500  10.0 s  left 0:00:20"]
    assert "1/3" in shown
    # A step was trained: the first conversation is over, with records or without.
    assert start_up.is_over


def test_the_phases_are_lines_where_no_bar_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([12.0, 15.0, 20.0, 40.0, 44.5])
    monkeypatch.setattr(start_up_module.time, "time", lambda: next(clock))
    (tmp_path / "train.log").write_text(
        "ray init kwargs: {}\nStarted a local Ray instance.\nactor and ref model engine initialized\n"
        "checkpoint engine manager initialized\n"
    )
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": trained(0.5)}) + "\n")
    shown = show(tmp_path, StartUp(10.0)).splitlines()
    assert [line for line in shown if line.startswith(("phase", "step"))] == [
        "phase: importing verl, checking the settings, after 0 s",
        "phase: starting Ray, after 2 s",
        "phase: loading data and model, after 5 s",
        "phase: starting SGLang, after 10 s",
        "phase: starting the agent loop, waiting for the first conversation, after 30 s",
        "phase: training, after 34 s",
        "step   1  reward 0.500  10.0 s",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_has_the_phases_in_its_bar(tmp_path: Path, terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=terminal, _environ={"TERM": "xterm"})
    (tmp_path / "train.log").touch()
    display = Display(tmp_path / "train.log", tmp_path / "metrics.jsonl", None, None, console, StartUp(0.0))
    display.show_while(lambda: False)
    assert isinstance(console.file, io.StringIO)
    assert ("phase:" in console.file.getvalue()) != terminal


def test_what_cannot_be_shown_is_told_once_and_ends_nothing(tmp_path: Path) -> None:
    entry = {"step": 1, "data": {**trained(0.5), "timing_s/step": float("nan")}}  # no remaining time is known for it
    (tmp_path / "metrics.jsonl").write_text(json.dumps(entry) + "\n" + json.dumps({**entry, "step": 2}) + "\n")
    console = Console(file=io.StringIO(), width=200)
    display = Display(tmp_path / "train.log", tmp_path / "metrics.jsonl", None, 9, console, None)
    looks = iter([True, True, False])
    display.show_while(lambda: next(looks))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("not shown: ValueError") == 1


def test_a_trainer_without_a_file_of_metrics_shows_its_own_lines(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("[rank0] step:1 - train/loss:2.5\nnothing\n")
    assert "step:1 - train/loss:2.5\n" in show(tmp_path, None)

"""The metrics of a run that was started several times are read as one curve."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.recipe_scripts import script
from verl_multiturn.observe.metric_files import metric_files, read_metrics, reward_failures

SCORE = "critic/score/mean"


def trained(step: int, score: float, **more: Any) -> dict[str, Any]:
    return {"step": step, "data": {"training/global_step": step, SCORE: score, **more}}


def validated(step: int, accuracy: float) -> dict[str, Any]:
    return {"step": step, "data": {"val-core/x/acc/mean@1": accuracy}}


def write(folder: Path, name: str, *entries: dict[str, Any], torn: str = "") -> None:
    (folder / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries) + torn)


def scores(folder: Path) -> dict[int, float]:
    return {entry["step"]: entry["data"][SCORE] for entry in read_metrics(folder) if SCORE in entry["data"]}


def test_starts_are_read_in_order(tmp_path: Path) -> None:
    for name in ("metrics.10.jsonl", "metrics.2.jsonl", "metrics.jsonl", "metrics.x.jsonl", "othermetrics.jsonl"):
        write(tmp_path, name)
    assert [path.name for path in metric_files(tmp_path)] == ["metrics.jsonl", "metrics.2.jsonl", "metrics.10.jsonl"]
    assert read_metrics(tmp_path) == []


def test_a_resumed_run_loses_nothing(tmp_path: Path) -> None:
    write(tmp_path, "metrics.jsonl", validated(0, 0.1), *(trained(step, 0.1) for step in (1, 2, 3, 4)), torn='{"st')
    # The run resumes at the checkpoint of step 2: it validates again, then repeats steps 3 and 4.
    write(tmp_path, "metrics.2.jsonl", validated(2, 0.2), *(trained(step, 0.2) for step in (3, 4, 5)))
    write(tmp_path, "metrics.3.jsonl", trained(6, 0.3))
    assert scores(tmp_path) == {1: 0.1, 2: 0.1, 3: 0.2, 4: 0.2, 5: 0.2, 6: 0.3}
    assert [entry["step"] for entry in read_metrics(tmp_path)] == list(range(7))
    second = read_metrics(tmp_path)[2]["data"]
    assert second == {"training/global_step": 2, SCORE: 0.1, "val-core/x/acc/mean@1": 0.2}


@pytest.mark.parametrize("line", ['{"st', "null", "[]", '{"step": 1e400, "data": {}}', "[" * 100_000 + "]" * 100_000])
def test_a_line_that_is_no_entry_is_left_out(tmp_path: Path, line: str) -> None:
    write(tmp_path, "metrics.jsonl", trained(1, 0.5), torn=line)
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [1]


@pytest.mark.parametrize("first", [[], [validated(0, 0.0)]])
def test_a_run_that_began_anew_takes_the_place_of_the_old_one(tmp_path: Path, first: list[dict[str, Any]]) -> None:
    write(tmp_path, "metrics.jsonl", *(trained(step, 0.1) for step in (1, 2, 3)))
    write(tmp_path, "metrics.2.jsonl", *first, trained(1, 0.9))
    assert scores(tmp_path) == {1: 0.9}


def test_the_report_reads_all_starts(tmp_path: Path) -> None:
    total, rows = "rollout/calls/total", "rollout/certificate/rows"
    calls = {f"rollout/calls/{status}_rate": share for status, share in (("error", 0.25), ("malformed", 0.5))}
    write(tmp_path, "metrics.jsonl", trained(1, 0.0, **{rows: 16, total: 8, "rollout/calls/error_rate": None}))
    write(tmp_path, "metrics.2.jsonl", trained(2, 1.0, **{rows: 16, total: 16, **calls}), validated(2, 0.7))
    found = script("common", "report").report(tmp_path)
    assert (found["steps"], found["reward"], found["certificate_rows"]) == (2, 0.5, 32)
    assert (found["tool_calls"], found["tool_error_rate"]) == (24, 0.5)
    assert found["val-core/x/acc/mean@1"] == 0.7


def test_the_report_names_the_recipe_and_not_the_folder(tmp_path: Path) -> None:
    out = tmp_path / "first-try"
    (out / "hydra" / ".hydra").mkdir(parents=True)
    write(out, "metrics.jsonl", trained(1, 0.0))
    assert script("common", "report").report(out)["recipe"] == "first-try"
    (out / "hydra" / ".hydra" / "config.yaml").write_text("recipe: {name: my_task}")
    assert script("common", "report").report(out)["recipe"] == "my_task"
    assert "tool_error_rate" not in script("common", "report").report(out), "there was no call"


def test_a_file_is_read_up_to_an_endless_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "data": {"training/global_step": 1}}\n')
    os.truncate(path, (16 << 20) + 100)  # takes no room
    with path.open("ab") as file:
        file.write(b'\n{"step": 2, "data": {"training/global_step": 2}}\n')
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [1]
    assert "metrics.jsonl: a line has 16 MiB or more" in caplog.text


def test_rewards_that_broke_are_counted_without_outages() -> None:
    reported = "rollout/reward/"
    data = {"rollout/trajectories": 8, f"{reported}failed/mean": 0.5, f"{reported}timed_out/mean": 0.125}
    assert reward_failures(data) == {}  # an author's own names
    data |= {f"{reported}outage/mean": 0.0, f"{reported}unjudgeable/mean": 0.0}
    assert reward_failures(data) == {"failed": 4.0, "timed out": 1.0}
    some = {f"{reported}failed/conversations": 6, f"{reported}outage/mean": 0.25, f"{reported}unjudgeable/mean": 0.0}
    assert reward_failures({**data, **some}) == {"failed": 1.0, "timed out": 1.0}
    assert reward_failures({**data, f"{reported}failed/mean": 0.0, f"{reported}timed_out/mean": 0.0}) == {}
    assert reward_failures({**data, f"{reported}failed/mean": "all", f"{reported}timed_out/mean": math.inf}) == {}
    assert reward_failures({}) == {}

"""`verify` compares a gateway's records with the lines of their sessions."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway_samples import GatewaySamples
from verl_multiturn.records.verify.folder import verify_files


def problems(folder: Path) -> list[str]:
    found = []
    for each in verify_files([folder]):
        found += [each.problem] if each.verified is None else map(str, each.verified.violations)
    return found


def written(folder: Path) -> GatewaySamples:
    made = GatewaySamples(folder)
    made.begin("s0")
    made.end("s0")
    made.write("reward", "s0", generation=1, reward=0.5)
    made.close()
    return made


def test_a_gateways_folder_is_well(tmp_path: Path) -> None:
    written(tmp_path)
    assert problems(tmp_path) == []


@pytest.mark.parametrize(
    ("event", "changes", "said"),
    [
        ("start", {"task_id": "other"}, "its task is 't', by the line of its session's start 'other'"),
        ("start", {"user": "eve"}, "its user is 'ann', by the line of its session's start 'eve'"),
        ("start", {"number": 4}, "its number is 0, by the line of its session's start 4"),
        ("end", {"completions": ["x"]}, "by the line of its session's end ['x']"),
        ("reward", {"generation": 9}, "a line rewards generation 9; it has 3"),
        ("reward", {"session_id": "s9"}, "it has lines, and none says that it began"),
        ("start", {"session_id": "s9"}, "no line of a *.sessions.jsonl says that its session began"),
        ("reward", {"reward": "much"}, "a line is left out"),
        ("reward", {"event": "end"}, "ended before"),
    ],
)
def test_a_changed_line_is_named(tmp_path: Path, event: str, changes: dict[str, Any], said: str) -> None:
    made = written(tmp_path)
    lines = [json.loads(line) for line in made.file.read_text().splitlines()]
    made.file.write_text("".join(json.dumps(one | (changes if one["event"] == event else {})) + "\n" for one in lines))
    assert any(said in each for each in problems(tmp_path))


def test_a_session_that_ended_has_a_record(tmp_path: Path) -> None:
    made = written(tmp_path)
    made.write("start", "s1", task_id="t", number=1)
    assert problems(tmp_path) == []
    made.write("end", "s1", completions=[], why="idle")
    assert problems(tmp_path) == ["by its line it ended, and there is no record of it"]


def test_a_dropped_session_needs_none(tmp_path: Path) -> None:
    made = written(tmp_path)
    made.write("start", "s1", task_id="t", number=1)
    made.write("end", "s1", completions=[], why="dropped: it was not drawn")
    assert problems(tmp_path) == []


def test_a_torn_line_is_told_and_no_fault(tmp_path: Path) -> None:
    made = written(tmp_path)
    made.file.write_bytes(made.file.read_bytes() + b'{"event": "rew')
    (torn,) = (each for each in verify_files([tmp_path]) if each.verified is None)
    assert torn.is_torn

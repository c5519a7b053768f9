"""`scripts/next.sh`: its output on each part, and its last line."""

import json
import sys
from pathlib import Path

import pytest

from scripts import next_set
from verl_multiturn.runs.version_sets import installed

FAULT = "sglang 0.5.20's ServerArgs is no dataclass any more, which verl's async_sglang_server.py needs"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ran(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, dict]:  # type: ignore[type-arg]
    monkeypatch.setattr(sys, "argv", ["next.sh", *words])
    status = next_set.main()
    said = capsys.readouterr().out
    return status, said, json.loads(said.splitlines()[-1])


def test_each_failure_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(next_set, "PARTS", {"contract": lambda: [FAULT], "fast": list, "stack": list})
    status, said, result = ran(monkeypatch, capsys)
    assert status == 1
    assert f"next: contract: failed\n{FAULT}\nnext: fast: ok\n" in said
    assert result["failed"] == {"contract": [FAULT]}
    assert list(result["seconds"]) == ["contract", "fast", "stack"]
    assert result["versions"] == installed()
    status, said, result = ran(monkeypatch, capsys, "--only", "fast", "--only", "stack")
    assert (status, result["failed"], list(result["seconds"])) == (0, {}, ["fast", "stack"])


def test_another_sglang_has_no_other_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["next.sh", "--only", "fast", "--sglang", "0.5.20"])
    with pytest.raises(SystemExit) as ended:
        next_set.main()
    assert ended.value.code == 2
    assert "--sglang runs the part contract alone, got --only fast; leave one out" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_faults_are_taken_from_what_the_parts_say(monkeypatch: pytest.MonkeyPatch) -> None:
    said: tuple[int, list[str]] = (1, ["a warning", FAULT, "270 names, 1 missing or changed"])
    monkeypatch.setattr(next_set, "said_by", lambda *command, **environment: said)
    assert next_set.names() == [FAULT]
    said = (1, ["..F", "FAILED tests/a.py::test_b - assert 1", "1 failed"])
    assert next_set.tests("fast", "not stack") == ["FAILED tests/a.py::test_b - assert 1"]
    said = (2, ["no tests were collected"])
    assert next_set.tests("fast", "not stack") == ["ended with 2: no tests were collected"]
    said = (1, ["ConfigError: bad  ", "see train.log"])
    assert next_set.training("quickstart") == ["ConfigError: bad"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"certificate_violations": 3}, ["3 violations of the certificate"]),
        ({"certificate_rows": 0}, ["2 steps, 0 rows verified"]),
    ],
)
def test_a_training_is_judged_by_its_result(
    changes: dict[str, int], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {"steps": 2, "certificate_rows": 128, "certificate_violations": 0, **changes}
    monkeypatch.setattr(next_set, "said_by", lambda *command: (0, ["a table", json.dumps(result), "written: x"]))
    assert next_set.training("quickstart", "--steps", "2") == expected
    monkeypatch.setattr(next_set, "said_by", lambda *command: (0, ["a table"]))
    assert next_set.training("quickstart") == ["no result at the end of its output"]

"""The trainer's side of a run's folder: joins, `steps.jsonl` and the run's file."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_multiturn.records import schema
from verl_multiturn.records.read import joins
from verl_multiturn.records.read.joins import JoinedRow, figures, parse_name, table_of
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.write import line_file, step_writer
from verl_multiturn.records.write.step_writer import StepWriter, clock_of

START = "20261126T101500_9f3c2a"


def row(**changes: Any) -> JoinedRow:
    made: dict[str, Any] = {
        "request_id": "r-0",
        "uid": "u",
        "number": 0,
        "row": 0,
        "validation": False,
        "step": 7,
        "score": 1.0,
        "advantages": np.array([0.5, 0.5, 0.5], np.float32),
        "trained": 3,
    }
    return JoinedRow(**{**made, **changes})


def line(step: int = 7, event: str = "step") -> dict[str, Any]:
    return {"event": event, "step": step, "began": 1.0, "ended": 2.0, "phases": {"gen": 0.5}, "metrics": {"a": 1.0}}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "steps.jsonl").read_text().splitlines()]


def test_a_table_has_the_schema_and_null_where_the_trainer_has_nothing() -> None:
    rows = [
        row(entropy=np.array([0.25, 0.5, 1.0], np.float32), untrained="too_old", untrained_tokens=np.array([1])),
        row(request_id=None, advantages=np.empty(0, np.float32), trained=0, untrained="unsampled"),
        row(validation=True, advantages=None, score=None),
    ]
    table = table_of(rows)
    assert table.schema == schema.JOINED
    assert table["request_id"].to_pylist() == ["r-0", None, "r-0"]
    assert table["advantages"].to_pylist() == [[0.5, 0.5, 0.5], [], None]
    assert table["entropy"].to_pylist() == [[0.25, 0.5, 1.0], None, None]
    assert table["untrained_tokens"].to_pylist() == [[1], None, None]
    assert table["ref_log_probs"].to_pylist() == [None, None, None]
    assert table_of([]).schema == schema.JOINED


def test_figures_are_those_of_the_tokens_in_the_loss() -> None:
    table = table_of(
        [
            row(score=1.0, advantages=np.array([1.0, 2.0], np.float32)),
            row(score=0.0, advantages=np.array([-1.0, 8.0], np.float32), untrained="rejected", untrained_tokens=[1]),
            row(score=0.5, advantages=np.array([9.0], np.float32), untrained="void", trained=0),
            row(score=0.5, advantages=np.array([-4.0], np.float32), untrained="skipped_update", trained=0),
        ]
    )
    assert figures(table) == (0.5, -0.5, -4.0, 2.0)
    assert all(np.isnan(figures(table_of([]))))


def test_few_rows_are_unpacked_for_one(tmp_path: Path) -> None:
    joins.write(tmp_path, "step-000001-s.parquet", table_of([row()] * 1025))
    assert pq.ParquetFile(tmp_path / "join" / "step-000001-s.parquet").metadata.num_row_groups == 3


def test_a_name_says_what_the_file_is() -> None:
    name = joins.name_of(False, 7, START)
    assert name == "step-000007-20261126T101500_9f3c2a.parquet"
    assert parse_name(name) == (False, 7, START)
    assert parse_name(joins.name_of(True, 0, START)) == (True, 0, START)
    assert parse_name("step-7.parquet") is None


def test_a_step_leaves_its_join_and_then_its_line(tmp_path: Path) -> None:
    writer = StepWriter(tmp_path / "records", START)
    writer.run(lambda: {"schema": 2, "start": START, "token": "\ud83d", "nan": float("nan")})
    writer.join(True, 0, lambda: table_of([row(validation=True)]))
    writer.line(line(0, "validation"))
    writer.join(False, 7, lambda: table_of([row(), row(row=1)]))
    writer.line(line())
    writer.other({"event": "end", "start": START, "at": 3.0, "error": ""})
    writer.close()
    folder = tmp_path / "records"
    names = ["step-000007-20261126T101500_9f3c2a.parquet", "validation-000000-20261126T101500_9f3c2a.parquet"]
    assert sorted(path.name for path in (folder / "join").iterdir()) == names
    assert pq.read_table(folder / "join" / names[0]).schema == schema.JOINED
    validation, step, end = lines(folder)
    assert schema.StepLine.model_validate(step).join == names[0]
    assert (step["rows"], validation["rows"], validation["join"]) == (2, 1, names[1])
    assert schema.RunEnd.model_validate(end).error == ""
    assert json.loads((folder / f"run-{START}.json").read_text())["token"] == "\ufffd"


def test_a_full_disk_is_said_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    writer = StepWriter(tmp_path, START)
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patched:
        patched.setattr(joins, "write", full)
        patched.setattr(line_file, "append_lines", full)
        for step in (1, 2):
            writer.join(False, step, lambda: table_of([row()]))
            writer.line(line(step))
        settle(writer)
    writer.join(False, 3, lambda: table_of([row()]))
    writer.line(line(3))
    writer.close()
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in said] == [
        "joins and steps are lost",
        "joins and steps are written again; 2 were lost so far",
    ]
    # The lines were kept, and report that the joins are missing.
    assert [(each["step"], each["join"] is None) for each in lines(tmp_path)] == [(1, True), (2, True), (3, False)]


def test_joins_that_are_written_say_nothing_of_lines_that_are_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(line_file, "append_lines", full)
    writer = StepWriter(tmp_path, START)
    for step in (1, 2, 3):
        writer.join(False, step, lambda: table_of([row()]))
        writer.line(line(step))
        settle(writer)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["joins and steps are lost"]
    writer.close()


def test_lines_that_are_late_until_the_end_are_counted_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(line_file, "append_lines", full)
    writer = StepWriter(tmp_path, START)
    writer.join(False, 1, lambda: table_of([row()]))
    writer.line(line(1))
    writer.other({"event": "end", "start": START, "at": 3.0, "error": ""})
    writer.close()
    writer.close()
    assert [record.getMessage() for record in caplog.records][1:] == [
        f"lines of steps are lost, 2 in all: {tmp_path / 'steps.jsonl'}: OSError: [Errno 28] No space left on device"
    ]


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    writer = StepWriter(folder, START)
    writer.line(line(1))
    settle(writer)
    (folder / "steps.jsonl").unlink()
    folder.rmdir()
    writer.join(False, 2, lambda: table_of([row()]))
    writer.line(line(2))
    writer.close()
    assert [each["step"] for each in lines(folder)] == [2]


def test_a_folder_that_became_a_file_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "records"
    folder.write_text("")
    writer = StepWriter(folder, START)
    writer.join(False, 2, lambda: table_of([row()]))
    writer.line(line(2))
    writer.close()
    first, last = [record.getMessage() for record in caplog.records]
    assert "the run goes on" in first
    assert last.startswith(f"lines of steps are lost, 1 in all: {folder / 'steps.jsonl'}: NotADirectoryError")


def test_what_cannot_be_made_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def wrong() -> pa.Table:
        raise KeyError("uid")

    writer = StepWriter(tmp_path, START)
    writer.join(False, 1, wrong)
    writer.line(line(1))
    writer.close()
    assert lines(tmp_path)[0]["join"] is None
    assert "it could not be made: KeyError: 'uid'" in caplog.text


def test_a_slow_disk_costs_joins_and_no_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow() -> pa.Table:
        begun.set()
        goes_on.wait()
        return table_of([row()])

    writer = StepWriter(tmp_path, START)
    writer.join(False, 1, slow)
    writer.line(line(1))
    begun.wait()
    for step in range(2, 7):
        writer.join(False, step, slow)
        writer.line(line(step))
    goes_on.set()
    writer.close()
    assert [each["join"] is not None for each in lines(tmp_path)] == [True] * 4 + [False] * 2
    assert "3 wait already, since writing is too slow" in caplog.text


def test_how_far_a_clock_is() -> None:
    clock = clock_of("stem", 200.0, 197.25, 200.5)
    assert clock == {"event": "clock", "file": "stem", "offset_s": 3.0, "error_s": 0.25}
    schema.Clock.model_validate(clock)


def settle(writer: StepWriter) -> None:
    """Wait until the thread has done all that it was handed."""
    done = threading.Event()
    writer._background.put(step_writer._WriteTask(done.set), large=False)
    assert done.wait(60)


def test_the_first_line_after_a_torn_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_bytes(b'{"event": "st')
    writer = StepWriter(tmp_path, START)
    writer.line(line(8))
    writer.close()
    assert [each["step"] for each in Records(tmp_path).steps()] == [8]

"""A cancelled conversation has a record: it is shown, and counts nowhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.sample_records import BEGAN, START, sample_record, sample_run
from verl_multiturn.observe.convert.atif import write_atif
from verl_multiturn.observe.convert.otel import write_otel
from verl_multiturn.observe.convert.parquet import write_parquet
from verl_multiturn.observe.convert.source import RunSource
from verl_multiturn.observe.documents.documents import Documents
from verl_multiturn.observe.explain.explanation import explain
from verl_multiturn.observe.show.documents import ShowDocuments
from verl_multiturn.records.index.index import Index
from verl_multiturn.records.json_text import plain
from verl_multiturn.records.read.fates import fates_of
from verl_multiturn.records.read.learning import SelectionRule, choose
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.verify.folder import verify_files
from verl_multiturn.records.verify.record import verify_record
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.records.write.records import RecordWriter
from verl_multiturn.rollout.life import Life
from verl_multiturn.rollout.outcome import Outcome

NAMES = ["t-gone", "u-gone"]


def cancelled(request_id: str, **changes: Any) -> dict[str, Any]:
    """Return the record of a conversation that was cancelled while its call ran."""
    nothing: dict[str, Any] = {"rows": [], "generations": [], "replies": [], "score": 0.0, "calc_rewards": {}}
    left = {"status": "cancelled", "stop_reason": "", "valid": False, **nothing}
    return sample_record(request_id=request_id, uid="gone", **{**left, **changes})


def make(folder: Path, has_records: bool) -> Path:
    """Write a run with two conversations that were cut off, the one before and the other behind a finished one."""
    sample_run(folder, steps=2, groups=2, size=4)
    writer = RecordWriter(folder, START)
    whole = sample_record(request_id="r-whole", uid="whole", step=2)
    for number, name in enumerate(["t-gone", "r-whole", "u-gone"]):
        line = {"request_id": name, "uid": "whole" if name == "r-whole" else "gone", "number": number % 2, "step": 2}
        writer.begin({**line, "at": BEGAN})
        if name == "r-whole":
            writer.keep(lambda: whole, {**line, "number": 0, "at": BEGAN + 3.0})
            continue
        record = cancelled(name, step=2, number=number % 2)
        writer.cancel(
            {**line, "why": "cut" if number else "cancelled"},
            (lambda record=record: record) if has_records else None,  # type: ignore[misc]
        )
    writer.close()
    return folder


def _converted(write: Callable[..., Any], suffix: str = "") -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        target = folder.parent / f"converted-{folder.name}-{write.__name__}{suffix}"
        return write(RunSource(Records(folder)), target)

    return read


def _seen(folder: Path) -> Documents:
    documents = Documents([folder])
    documents.refresh()
    return documents


def _table(folder: Path) -> list[dict[str, Any]]:
    index = Index(Records(folder))
    index.refresh()
    places = ("file", "offset", "place", "ended")
    return [{name: value for name, value in row.items() if name not in places} for row in index.table.to_pylist()]


READERS: dict[str, Callable[[Path], Any]] = {
    "records": lambda folder: [each["request_id"] for each in Records(folder).records()],
    "faults": lambda folder: [found := Records(folder), list(found.records()), found.faults][-1],
    "table": _table,
    "fates": lambda folder: fates_of(Records(folder)),
    "explain": lambda folder: [each.as_json() for each in explain(Records(folder))],
    "verify": lambda folder: [
        (each.verified.sampled_tokens, each.verified.violations)
        for each in verify_files([folder])
        if each.verified is not None and each.verified.sampled_tokens
    ],
    "learning": lambda folder: choose([folder], SelectionRule()).left_out,
    "show a run": lambda folder: {**ShowDocuments(folder).run(), "open": None},
    "show a group": lambda folder: ShowDocuments(folder).group("gone"),
    "view a run": lambda folder: _seen(folder).run(),
    "parquet": _converted(write_parquet),
    "atif": _converted(write_atif),
    "otel": _converted(write_otel, ".jsonl"),
}


@pytest.fixture(autouse=True)
def still(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the viewer's cache apart, and name files in the order in which they are made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    names = (f"{number:08x}" for number in itertools.count())
    monkeypatch.setattr("verl_multiturn.records.write.records.secrets.token_hex", lambda _: next(names))


@pytest.mark.parametrize("name", READERS)
def test_its_record_changes_nothing_that_is_said_of_others_or_of_its_fate(tmp_path: Path, name: str) -> None:
    with_, without = (READERS[name](make(tmp_path / f"{has}", has)) for has in (True, False))
    assert str(with_).replace(f"{tmp_path}/True", "") == str(without).replace(f"{tmp_path}/False", "")


def test_its_record_is_found_by_its_name_and_shown_everywhere(tmp_path: Path) -> None:
    folder = make(tmp_path / "records", has_records=True)
    records, documents = Records(folder), _seen(folder)
    for number, name in enumerate(NAMES):
        record = records.record(name)
        assert (record["status"], record["rows"], record["number"]) == ("cancelled", [], 0)
        assert record == cancelled(name, step=2)
        assert ShowDocuments(folder).conversation(name)["record"] == record
        found = documents.record(name)
        assert found is not None
        assert (found["record"], found["row"]["fate"]) == (record, ["cancelled", "cut"][number])
        assert (found["row"]["score"], found["row"]["turns"]) == (None, None)
    assert (records.faults, documents.faults()) == ([], [])
    shown = documents.timeline(0, 2, False, "uid=gone")
    assert sorted(each["request_id"] for each in shown["conversations"]) == NAMES


def test_nobody_waited_for_what_was_thrown_away(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, START)
    for number in range(5):
        line = {"request_id": f"r{number}", "uid": "u", "number": number, "step": 1}
        writer.begin({**line, "at": BEGAN})
        if number < 4:
            whole = sample_record(**{**line, "ended": BEGAN + 4.0 if number == 2 else BEGAN + 3.0})
            writer.keep(lambda whole=whole: whole, {**line, "at": BEGAN + 3.0})  # type: ignore[misc]
        else:
            gone = {**cancelled("r4", step=1, number=4), "uid": "u", "ended": BEGAN + 100.0}
            writer.cancel({**line, "why": "cut"}, lambda gone=gone: gone)  # type: ignore[misc]
    writer.close()
    found = _seen(tmp_path).timeline(0, 1, False)
    assert (len(found["conversations"]), found["late"]["request_id"]) == (5, "r2")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"rows": sample_record()["rows"], "generations": sample_record()["generations"]}, ["rows", "generations"]),
        ({"score": 1.0}, ["score"]),
        ({"valid": True, "stop_reason": "finished"}, ["stop_reason", "valid"]),
    ],
)
def test_what_only_a_finished_one_has_is_a_violation(changes: dict[str, Any], said: list[str]) -> None:
    found = verify_record(cancelled("r", **changes)).violations
    assert [each for each in map(str, found) if "it was cancelled" in each] == [
        each for name in said for each in map(str, found) if f"it was cancelled, and its {name} is " in each
    ]
    assert len([each for each in map(str, found) if "it was cancelled" in each]) == len(said)


def test_a_trained_one_cannot_pass_as_cancelled(tmp_path: Path) -> None:
    """A join has rows of it: a record that calls it cancelled hides them from the certificate."""
    from verl_multiturn.records.verify.joins import JoinCheck

    sample_run(tmp_path, steps=1, groups=1, size=1)
    trained = next(Records(tmp_path).records())
    forged = {**cancelled(trained["request_id"]), "uid": trained["uid"]}
    found = JoinCheck(tmp_path).violations(forged, None, None)
    assert any("the trainer's join has its row 0; it has 0 rows" in str(each) for each in found)


def test_one_that_was_cancelled_after_its_score_has_none_and_agrees_with_the_check() -> None:
    outcome = Outcome.begun("r")
    outcome.score = 1.0  # it was cancelled in the `close` of its interaction
    record = record_of(Life("r", "gone", outcome=outcome))
    assert (record["status"], record["score"]) == ("cancelled", 0.0)
    assert verify_record(plain(record)).violations == []


@pytest.mark.parametrize("event", ["cancel", "end"])
@pytest.mark.parametrize("status", ["cancelled", "finished"])
def test_a_line_and_its_record_say_the_same_of_the_end(tmp_path: Path, event: str, status: str) -> None:
    writer = RecordWriter(tmp_path, START)
    line = {"request_id": "r", "uid": "gone", "number": 0, "step": 1}
    record = sample_record(request_id="r", uid="gone") if status == "finished" else cancelled("r")
    writer.begin({**line, "at": BEGAN})
    if event == "end":
        writer.keep(lambda: record, {**line, "at": BEGAN})
    else:
        writer.cancel({**line, "why": "cancelled"}, lambda: record)
    writer.close()
    found = [str(each) for one in verify_files([tmp_path]) if one.verified for each in one.verified.violations]
    is_same = (event == "cancel") == (status == "cancelled")
    assert [f"its status is {status}, and its line is of the event {event}" in each for each in found] == (
        [] if is_same else [True]
    )


def test_a_line_that_names_no_record_is_told(tmp_path: Path) -> None:
    folder = make(tmp_path / "records", has_records=True)
    path = next(each for each in folder.glob("*.lines.jsonl") if "t-gone" in each.read_text())
    path.write_text(path.read_text().replace('"place":2', '"place":9'))
    said = [each.problem for each in verify_files([folder]) if "by a line" in each.problem]
    assert said == ["there is no record; by a line one of request 'u-gone' is here"]


@pytest.mark.parametrize("trouble", ["it cannot be made", "the queue is full"])
def test_a_record_that_is_lost_changes_no_fate(
    tmp_path: Path, trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if trouble == "the queue is full":
        monkeypatch.setattr("verl_multiturn.records.write.records._MOST_RECORDS", 0)
    writer = RecordWriter(tmp_path, START)
    line = {"request_id": "r", "uid": "gone", "number": 0, "step": 2}
    writer.begin({**line, "at": BEGAN})
    writer.cancel({**line, "why": "cancelled"}, lambda: {}["x"])
    writer.close()
    (fate,) = fates_of(Records(tmp_path))
    assert (fate.fate, fate.why, writer.dropped) == ("cancelled", "cancelled", 1)
    assert "records of conversations are lost" in caplog.text

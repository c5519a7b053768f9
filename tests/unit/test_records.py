"""Records of conversations: a full disk, a kill within a line, and numbers and texts that JSON or UTF-8 cannot hold."""

import json
import logging
import os
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT
from verl_multiturn.certificate.records import RecordWriter, json_line, read_records


def file_of(folder: Path) -> Path:
    return folder / f"{socket.gethostname()}-{os.getpid()}.jsonl"


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Limit the size of files, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_logged_and_tears_one_line_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = RecordWriter(tmp_path)
    writer.write({"n": 1})
    with at_most(file_of(tmp_path).stat().st_size + 20):
        for _ in range(3):
            writer.write({"n": 2, "text": "x" * 1000})
    writer.write({"n": 3})
    lines = file_of(tmp_path).read_text().splitlines()
    assert (lines[0], lines[2]) == ('{"n": 1}', '{"n": 3}')
    assert len(lines[1]) < 30
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "File too large" in said[0]
    assert "the run goes on" in said[0]
    assert "3 were lost" in said[1]
    with caplog.at_level(logging.WARNING):
        assert [record["n"] for record in read_records(file_of(tmp_path))] == [1, 3]
    assert ":2: a torn line is left out" in caplog.text


def test_a_disk_that_is_full_from_the_start(tmp_path: Path) -> None:
    file_of(tmp_path).symlink_to("/dev/full")
    RecordWriter(tmp_path).write({"n": 1})


def test_a_torn_line_is_not_joined_to_the_next_record(tmp_path: Path) -> None:
    file_of(tmp_path).write_text('{"n": 1}\n{"n": 2, "te')
    for number in (3, 4):
        RecordWriter(tmp_path).write({"n": number})
    assert file_of(tmp_path).read_text() == '{"n": 1}\n{"n": 2, "te\n{"n": 3}\n{"n": 4}\n'


def test_what_json_cannot_hold_ends_nothing(tmp_path: Path) -> None:
    around: list[object] = []
    around.append(around)
    writer = RecordWriter(tmp_path)
    writer.write({"metrics": around})  # lost, and logged
    for value in ({(1, 2): 3}, int):
        writer.write({"metrics": value})
    assert list(read_records(file_of(tmp_path))) == [{"metrics": {"(1, 2)": 3}}, {"metrics": "<class 'int'>"}]


def test_numbers_that_are_none_get_their_names() -> None:
    infinite = float("inf")
    line = json_line({"calls": [{"metrics": {"a": float("nan"), "b": (infinite, -infinite), "c": 1.5}}]})
    assert line == '{"calls": [{"metrics": {"a": "nan", "b": ["inf", "-inf"], "c": 1.5}}]}\n'


def test_the_quickstarts_readers(tmp_path: Path) -> None:
    """Read a lone surrogate in the model's arguments, and a torn line."""
    sys.path.insert(0, str(ROOT / "recipes" / "quickstart"))
    from report import merge_records  # type: ignore[import-not-found]

    text = "half a pair: \ud83d, Größe"
    record = {"step": 1, "temperature": 1.0, "calls": [{"text": text}]}
    (tmp_path / "records").mkdir()
    path = tmp_path / "records" / "h-1.jsonl"
    path.write_text(json.dumps(record)[:20] + "\n" + json.dumps(record) + "\n" + json.dumps(record)[:30])
    assert merge_records(tmp_path) == [record]
    merged = (tmp_path / "trajectories.jsonl").read_text(encoding="utf-8")
    assert json.loads(merged) == record
    assert "Größe" in merged

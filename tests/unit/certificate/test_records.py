"""Records of conversations: a full disk, a kill within a line, and numbers and texts that JSON or UTF-8 cannot hold."""

import json
import os
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.support.sample_records import sample_record
from verl_multiturn.certificate.records import RecordWriter, json_line
from verl_multiturn.cli.main import app
from verl_multiturn.records.json_text import line_of


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
    written = file_of(tmp_path).read_text().splitlines()
    assert [json.loads(line) for line in written] == [{"metrics": {"(1, 2)": 3}}, {"metrics": "<class 'int'>"}]


# A record as it was before conversations had several rows: receipts without `row` and `places`, and nothing about an
# interaction. The prompt is 1 2; the model said 7 8, a tool answered 4, and the model said 9.
_OLD = {
    "request_id": "r1",
    "stop_reason": "finished",
    "valid": True,
    "step": 3,
    "uid": "u",
    "messages": [{"role": "user", "content": "Q"}],
    "calls": [],
    "tool_rewards": {},
    "differences": [],
    "error": "",
    "generate_s": 0.1,
    "tools_s": 0.0,
    "prompt_length": 2,
    "ids": [1, 2, 7, 8, 4, 9],
    "mask": [0, 0, 1, 1, 0, 1],
    "logprobs": [0.0, 0.0, -0.5, -0.25, 0.0, -1.0],
    "versions": [-1, -1, 3, 3, -1, 3],
    "turn_ids": [0, 0, 0, 0, 1, 1],
    "sources": [0, 0, 1, 1, 3, 1],
    "receipts": {
        "request_id": "r1",
        "uid": "u",
        "session_id": 0,
        "generations": [
            {
                "prompt_tokens": 2,
                "prompt_digest": "2cc5e4d47c5f3c5fbe635a5a5b7bb392",
                "max_tokens": 10,
                "ids": [7, 8],
                "logprobs": [-0.5, -0.25],
                "versions": [3, 3],
            },
            {
                "prompt_tokens": 5,
                "prompt_digest": "cc07ee7d10a192bb04763b1a56145116",
                "max_tokens": 7,
                "ids": [9],
                "logprobs": [-1.0],
                "versions": [3],
            },
        ],
    },
}


def test_old_records_can_be_verified(tmp_path: Path) -> None:
    newer = {**_OLD, "receipts": {**_OLD["receipts"], "void": False, "invalid": False}}  # type: ignore[dict-item]
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps(_OLD) + "\n" + json.dumps(newer) + "\n")
    done = CliRunner().invoke(app, ["verify", str(path)])
    assert (done.exit_code, done.output) == (0, "ok 2 records, 6 sampled tokens, 0 violations\n")
    path.write_text(json.dumps({**_OLD, "ids": [1, 2, 7, 8, 4, 6]}) + "\n")
    done = CliRunner().invoke(app, ["verify", str(path)])
    assert done.exit_code == 1
    assert "request r1" in done.output


def test_numbers_that_are_none_get_their_names() -> None:
    infinite = float("inf")
    line = json_line({"calls": [{"metrics": {"a": float("nan"), "b": (infinite, -infinite), "c": 1.5}}]})
    assert line == '{"calls": [{"metrics": {"a": "nan", "b": ["inf", "-inf"], "c": 1.5}}]}\n'


def test_the_quickstarts_readers(tmp_path: Path) -> None:
    """Read a lone surrogate in the model's arguments, and a torn line."""
    sys.path.insert(0, str(ROOT / "recipes" / "quickstart"))
    from report import merge_records  # type: ignore[import-not-found]

    text = "half a pair: \ud83d, Größe"
    (call,) = sample_record()["calls"]
    record = sample_record(calls=[{**call, "text": text}])
    (tmp_path / "records").mkdir()
    path = tmp_path / "records" / "h-1.jsonl"
    path.write_text(json.dumps(record)[:20] + "\n" + json.dumps(record) + "\n" + json.dumps(record)[:30])
    (merged,) = merge_records(tmp_path)
    assert merged["calls"][0]["text"] == "half a pair: \ufffd, Größe"
    assert (tmp_path / "trajectories.jsonl").read_bytes() == line_of(merged)
    assert "Größe".encode() in line_of(merged)

"""The writer: its files, and that no error ends a run or goes unreported."""

import asyncio
import gzip
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import until
from tests.support.sample_records import sample_record, sample_session
from verl_multiturn.calls.timeline import Timeline
from verl_multiturn.errors import ConfigError
from verl_multiturn.records import schema
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.rows import columns, row_of
from verl_multiturn.records.schema_page import models
from verl_multiturn.records.write import line_file, recorder
from verl_multiturn.records.write import records as writing
from verl_multiturn.records.write.records import RecordWriter
from verl_multiturn.records.write.redaction import Redaction
from verl_multiturn.records.write.share import in_share
from verl_multiturn.rollout.life import Life

START = "20261126T101500-5f3a"


def hand(writer: RecordWriter, number: int, uid: str = "u", **changes: Any) -> dict[str, Any]:
    record = sample_record(request_id=f"r{number}", uid=uid, number=number, **changes)
    writer.keep(lambda: record, {"request_id": f"r{number}", "uid": uid, "number": number, "at": 5.0})
    return record


def named(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(pattern))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in folder.glob("*.lines.jsonl") for line in path.read_text().splitlines()]


def members_of(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the records of each gzip member, by the offsets that the lines name."""
    (path,) = folder.glob("*.jsonl.gz")
    data = path.read_bytes()
    starts = sorted({line["offset"] for line in lines_of(folder) if line["event"] == "end"})
    pieces = [data[start:end] for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]
    return [[json.loads(line) for line in gzip.decompress(piece).splitlines()] for piece in pieces]


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Limit the size of files, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_records_come_in_members_and_lines_name_their_places(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, START)
    writer.begin({"request_id": "r0", "uid": "u", "number": 0, "at": 1.0})
    records = [hand(writer, number) for number in range(40)]
    writer.scored({"request_id": "r0", "score": 1.5, "at": 6.0})
    writer.cancel({"request_id": "c", "why": "cut", "at": 7.0})
    writer.raised({"request_id": "d", "why": "ConfigError: x", "at": 8.0})
    writer.close()
    members = members_of(tmp_path)
    assert max(map(len, members)) <= 32
    assert [record for member in members for record in member] == records
    lines = lines_of(tmp_path)
    assert [line["event"] for line in lines] == ["begin", *["end"] * 40, "score", "cancel", "raise"]
    assert [line["place"] for line in lines if line["event"] == "end"] == [
        place for member in members for place, _ in enumerate(member)
    ]
    assert lines[1]["summary"] == {
        **{"data_source": "sums", "index": 7, "stop_reason": "finished", "turns": 2, "calls": 1, "prompt_tokens": 6},
        **{"response_tokens": 10, "sampled_tokens": 7, "seconds": 3.0, "generate_s": 2.0, "tools_s": 0.5},
    }, "what has its default is left out"
    assert (writer.dropped, next(Records(tmp_path).records())["request_id"]) == (0, "r0")


def test_a_member_holds_a_megabyte_at_most_or_one_record(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, START)
    with writer._background._changed:  # so that all are written together
        for number in range(5):
            hand(writer, number, error="x" * 600_000)
    writer.close()
    assert [len(member) for member in members_of(tmp_path)] == [2, 2, 1]


async def test_what_is_handed_over_is_written_without_an_end(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, START)
    hand(writer, 0)
    await until(lambda: any(line["event"] == "end" for line in lines_of(tmp_path)))
    assert [record["request_id"] for member in members_of(tmp_path) for record in member] == ["r0"]
    writer.close()


def test_what_json_does_not_have() -> None:
    around: list[Any] = []
    around.append(around)
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    floats = np.array([-0.1, np.nan, 1e-45], np.float32)
    text = line_of(
        {
            "numbers": [float("nan"), float("inf"), -float("inf"), 2**64, True, np.float32(0.1), np.int64(3)],
            "texts": ["\ud83d", "\ud83d\ude00", "a\udc00b", "\x00</script>\u202e"],
            "keys": {(1, 2): 1, 3: 2, "\ud83d": 3},
            "odd": [{1}, int, around, b"x"],
            "arrays": [floats[:1], floats, np.array([1, 2]), np.array([[0.5]], np.float16)],
            "deep": deep,
        }
    )
    read = json.loads(text.decode("utf-8"))
    assert read["numbers"] == ["nan", "inf", "-inf", "18446744073709551616", True, 0.1, 3]
    assert read["texts"] == ["\ufffd", "\U0001f600", "a\ufffdb", "\x00</script>\u202e"]
    assert read["keys"] == {"(1, 2)": 1, "3": 2, "\ufffd": 3}
    assert read["odd"] == [[1], "<class 'int'>", ["[[[[[[[[[...]]]]]]]]]"], "b'x'"]
    assert read["arrays"] == [[-0.1], [-0.1, "nan", 1e-45], [1, 2], [[0.5]]]
    assert b"-0.1]" in text
    assert text.count(b"\n") == 1


def test_a_float32_is_its_shortest_decimal() -> None:
    drawn = -np.random.default_rng(0).exponential(size=20_000).astype(np.float32)
    read = json.loads(line_of({"x": drawn}))["x"]
    assert (np.array(read, np.float32) == drawn).all()
    assert max(len(str(each)) for each in read) <= 16


def test_rows_become_runs_and_back() -> None:
    full = {
        "ids": [5, 6, 7, 8, 9],
        "mask": [0, 1, 1, 0, 0],
        "logprobs": [0.0, -0.5, float("nan"), 0.0, 0.0],
        "versions": [-1, 3, 4, -1, -1],
        "turn_ids": [0, 0, 0, 1, 1],
        "sources": [0, 1, 1, 2, 3],
    }
    row = json.loads(line_of(row_of(1, **full)))
    assert row == {
        "prompt_length": 1,
        "ids": [5, 6, 7, 8, 9],
        "logprobs": [-0.5, "nan"],
        "runs": [[1, 0, -1, 0, 0], [1, 1, 3, 0, 1], [1, 1, 4, 0, 1], [1, 0, -1, 1, 2], [1, 0, -1, 1, 3]],
        "images": [],
    }
    assert str(columns(row)) == str({name: full[name] for name in columns(row)})
    assert columns({"ids": [], "logprobs": [], "runs": []}) == {name: [] for name in full}
    for runs in ([[10**12, 0, -1, 0, 0]], [[-1, 0, -1, 0, 0], [6, 0, -1, 0, 0]], []):
        with pytest.raises(ValueError, match="expected one id for each token, and one logprob for each sampled one"):
            columns({**row, "runs": runs})


async def test_a_full_disk_is_counted_said_once_and_over_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RecordWriter(tmp_path, START)
    hand(writer, 0)
    await until(lambda: len(lines_of(tmp_path)) == 1)
    (path,) = named(tmp_path, "*.jsonl.gz")
    whole = path.read_bytes()
    with at_most(len(whole) + 20):
        for number in range(1, 40):
            hand(writer, number)
        await until(lambda: writer.dropped == 39)
    assert path.read_bytes() == whole
    hand(writer, 40)
    writer.close()
    assert [record["request_id"] for record in Records(tmp_path).records()] == ["r0", "r40"]
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in said] == [
        "records of conversations are lost",
        "records of conversations are written again; 39 were lost so far",
    ]
    assert "File too large" in said[0]
    lines = lines_of(tmp_path)
    assert [line["event"] for line in lines] == ["end", *["drop"] * 39, "end"]
    assert "File too large" in lines[1]["why"]
    assert lines[1]["summary"]["turns"] == 2


async def test_lines_that_are_late_until_the_end_are_counted_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writing, "_MOST_LINES", 3)
    monkeypatch.setattr(writing, "MEMBER_S", 0.0)
    folder = tmp_path / "records"
    writer = RecordWriter(folder, START)
    shutil.rmtree(folder)
    for number in range(4):
        writer.begin({"request_id": f"r{number}", "uid": "u", "number": number, "at": 1.0})
        await until(lambda: not writer._background.waiting)
    writer.close()
    path = folder / f"{writer.stem}.lines.jsonl"
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(": FileNotFoundError")[0] for text in said] == [
        f"lines of conversations are lost: {path}",
        f"lines of conversations are lost, 4 in all: {path}",
    ]


async def test_a_folder_that_is_removed_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "records"
    writer = RecordWriter(folder, START)
    shutil.rmtree(folder)
    hand(writer, 0)
    await until(lambda: writer.dropped == 1)
    folder.mkdir()
    hand(writer, 1)
    writer.snapshot([])
    writer.close()
    assert [(line["event"], line["request_id"]) for line in lines_of(folder)] == [("drop", "r0"), ("end", "r1")]
    assert len(caplog.records) == 2


def test_a_full_queue_drops_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_MOST_RECORDS", 2)
    monkeypatch.setattr(writing, "MEMBER_S", 0.0)
    writer = RecordWriter(tmp_path, START)
    begun, free = threading.Event(), threading.Event()

    def slow() -> dict[str, Any]:
        begun.set()
        free.wait()
        return sample_record(request_id="slow")

    writer.keep(slow, {"request_id": "slow", "uid": "u", "at": 0.0})
    begun.wait()
    for number in range(4):
        hand(writer, number)
    assert writer.dropped == 2
    free.set()
    writer.close()
    assert [(line["event"], line["request_id"]) for line in lines_of(tmp_path)] == [
        ("end", "slow"),
        ("end", "r0"),
        ("end", "r1"),
        ("drop", "r2"),
        ("drop", "r3"),
    ]


def test_a_record_that_cannot_be_made_is_dropped(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, START)
    writer.keep(lambda: {}["x"], {"request_id": "r", "uid": "u", "at": 0.0})
    hand(writer, 1)
    writer.close()
    lines = lines_of(tmp_path)
    assert [(line["event"], line.get("why")) for line in lines] == [
        ("drop", "it could not be made: KeyError: 'x'"),
        ("end", None),
    ]
    writer.begin({"request_id": "late", "at": 9.0})
    hand(writer, 2)
    assert writer.dropped == 2


def test_whole_groups_are_kept_the_same_in_all_processes(tmp_path: Path) -> None:
    kept = [f"g{number}" for number in range(200) if in_share(f"g{number}", 0.25)]
    assert 30 < len(kept) < 70
    assert set(kept) <= {f"g{number}" for number in range(200) if in_share(f"g{number}", 0.5)}
    assert all(in_share(f"g{number}", 1.0) for number in range(200))
    assert not any(in_share(f"g{number}", 0.0) for number in range(200))
    writer = RecordWriter(tmp_path, START, share=0.25)
    for number in range(200):
        hand(writer, number, uid=f"g{number}")
    writer.close()
    assert [record["uid"] for record in Records(tmp_path).records()] == kept
    lines = lines_of(tmp_path)
    assert len(lines) == 200
    assert {line["uid"] for line in lines if line.get("offset") is not None} == set(kept)
    assert all(line["summary"]["turns"] == 2 for line in lines)
    assert writer.dropped == 0


def test_a_folder_that_holds_the_most_takes_no_more(tmp_path: Path) -> None:
    (tmp_path / "earlier.jsonl.gz").write_bytes(b"x" * 2000)
    writer = RecordWriter(tmp_path, START, max_gb=1e-6)
    hand(writer, 0)
    writer.close()
    assert [(line["event"], line["why"]) for line in lines_of(tmp_path)] == [("drop", "record_max_gb is reached")]
    assert not list(tmp_path.glob(f"{START}*.gz"))


def test_names_and_patterns_are_hidden(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, START, redact=["ground_truth", "arguments", r"re:\b\d{3} \+ \d{3}\b"])
    before = hand(writer, 0)
    writer.close()
    (record,) = Records(tmp_path).records()
    assert record["sample"]["ground_truth"] == "***"
    assert record["sample"]["messages"] == [{"role": "user", "content": "*** ="}]
    assert record["calls"][0]["arguments"] == {"expression": "***"}
    assert record["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"expression": "***"}
    assert record["messages"][3] == before["messages"][3]
    assert record["rows"][0]["ids"] == before["rows"][0]["ids"]
    with pytest.raises(ConfigError, match=r"record_redact has 're:\(', which is no regular expression"):
        RecordWriter(tmp_path, START, redact=["re:("])


def test_the_causes_in_lines_are_hidden(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, START, redact=["re:sk-[a-z]+|cut"])
    writer.raised({"request_id": "a", "why": "ConfigError: sk-abc is no key", "at": 8.0})
    writer.keep(lambda: 1 // len("sk-abc"[9:]), {"request_id": "b", "why": "sk-abc", "at": 8.0})  # type: ignore[arg-type]
    writer.cancel({"request_id": "c", "why": "cut", "at": 8.0})
    writer.close()
    assert [(line["event"], line["why"]) for line in lines_of(tmp_path)] == [
        ("raise", "ConfigError: *** is no key"),
        ("drop", "it could not be made: ZeroDivisionError: integer division or modulo by zero"),
        ("cancel", "cut"),
    ]


def test_what_is_hidden_still_fits_the_schema() -> None:
    own = {name for model in models() for name in model.model_fields}
    record, session = sample_record(), sample_session()
    record["calls"][0]["reward"] = "nan"
    record["calls"][0]["metrics"] = {"reward": 0.5, "nan": "nan"}
    session["session"]["events"] = [["request", 0, 0]]
    for rule in [*own, "re:.+"]:
        for each in (record, session):
            schema.Record.model_validate_json(line_of(Redaction([rule])(each)), strict=True)
    (call,) = Redaction(["reward", "turn", "metrics"])(record)["calls"]
    assert (call["reward"], call["turn"]) == ("nan", 0)
    assert call["metrics"] == {"reward": "***", "nan": "***"}
    assert Redaction(["temperature"])(record)["sampling"] == {"temperature": "***", "top_p": 1.0}


def test_a_torn_line_ends_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    line_file.append_lines(path, b"1\n")
    line_file.append_lines(path, b"2\n3\n")
    line_file.append(path, b'{"ev')
    line_file.append_lines(path, b"")
    assert path.read_bytes() == b'1\n2\n3\n{"ev'
    line_file.append_lines(path, b"4\n")
    assert path.read_bytes() == b'1\n2\n3\n{"ev\n4\n'


async def test_a_snapshot_replaces_the_one_before(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, START)
    waiting = {"request_id": "r", "began": 1.0, "doing": "generation", "since": 2.0}
    with writer._background._changed:  # so that the first is not written
        writer.snapshot([waiting, waiting])
        writer.snapshot([waiting])
    await until(lambda: named(tmp_path, "*.open.json"))
    (shot,) = Records(tmp_path).snapshots()
    assert (shot["file"], len(shot["open"]), shot["dropped"]) == (writer.stem, 1, 0)
    writer.close()
    assert not named(tmp_path, "*.new")
    (last,) = Records(tmp_path).snapshots()
    assert last["open"] == []
    assert last["cpu_s"] > shot["cpu_s"]


def test_a_fork_writes_nothing(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, START)
    hand(writer, 0)
    child = os.fork()
    if child == 0:
        hand(writer, 1)
        writer.snapshot([])
        writer.close()
        os._exit(writer.dropped)
    _, status = os.waitpid(child, 0)
    writer.close()
    assert os.waitstatus_to_exitcode(status) == 1
    assert [record["request_id"] for record in Records(tmp_path).records()] == ["r0"]


@pytest.mark.slow
def test_what_was_handed_over_is_written_at_exit(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from tests.support.sample_records import sample_record\n"
        "from verl_multiturn.records.write.records import RecordWriter\n"
        "writer = RecordWriter(sys.argv[1], 's')\n"
        "writer.keep(lambda: sample_record(), {'request_id': 'r-0', 'uid': 'group-0', 'at': 0.0})\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, cwd=Path(__file__).parents[3])
    assert [record["request_id"] for record in Records(tmp_path).records()] == ["r-0"]


async def test_a_disk_that_hangs_is_waited_for_but_not_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writing, "CLOSE_S", 0.05)
    writer, free = RecordWriter(tmp_path, START), threading.Event()
    writer.keep(lambda: sample_record(void=not free.wait()), {"request_id": "slow", "uid": "u", "at": 0.0})
    await writer.aclose()
    (said,) = [record.getMessage() for record in caplog.records]
    free.set()
    assert said.startswith("the last records of conversations may be lost: some 1 were not written in time")
    writer.close()


def test_a_path_that_is_a_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        RecordWriter(tmp_path / "file", START)


def test_writers_of_one_process_have_files_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        writers = [RecordWriter(tmp_path, START) for _ in range(8)]
    for writer in writers:
        writer.close()
    assert len({writer.stem for writer in writers}) == len(list(tmp_path.glob("*.lines.jsonl"))) == 8
    assert not caplog.records


async def test_a_recorder_that_is_closed_looks_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "LOOK_S", 0.0)
    made = recorder.Recorder(RecordWriter(tmp_path, START))
    life = Life(id="a", timeline=Timeline())
    made.begun(life)
    await made.aclose()
    await asyncio.sleep(0.05)
    assert "are lost" not in caplog.text

"""The reader: whole folders, and faults, of which each is one sentence and costs itself alone."""

import gzip
import json
import random
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.sample_records import START, sample_record, sample_run, sample_run_file, sample_session
from verl_multiturn.errors import ConfigError
from verl_multiturn.records import schema
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.read import lines as lines_module
from verl_multiturn.records.read import members
from verl_multiturn.records.read.joins import name_of
from verl_multiturn.records.read.lines import fitted
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.summaries import summary_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sample_run(tmp_path / "records")
    return tmp_path / "records"


def one(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def change_lines(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(new) + "\n" for line in lines if (new := change(line)) is not None))


def read_all(folder: Path) -> list[str]:
    """Read all that a folder has, and return its faults."""
    records = Records(folder)
    _ = records.runs, list(records.records()), list(records.lines()), records.steps(), records.clocks()
    _ = records.joined(), records.snapshots()
    return records.faults


def test_a_whole_folder(tmp_path: Path) -> None:
    made = sample_run(tmp_path / "records")
    for place in (tmp_path, tmp_path / "records"):
        records = Records(place)
        found = list(records.records())
        assert [record["request_id"] for record in found] == [record["request_id"] for record in made]
        # A record that is read has the entries, too, that have their defaults.
        assert found == [fitted(schema.Record, record) for record in made]
        assert records.runs == [sample_run_file()]
        assert [(line["event"], line["step"], line["rows"]) for line in records.steps()] == [
            ("step", 1, 8),
            ("step", 2, 8),
            ("validation", 2, 2),
        ]
        assert records.clocks() == []
        joined = records.joined()
        assert (joined.schema, joined.num_rows) == (schema.JOINED, 18)
        assert records.record(made[9]["request_id"]) == found[9]
        assert [line["event"] for line in records.lines()].count("end") == 18
        assert records.faults == []
        with pytest.raises(ConfigError, match="there is no record of request 'x'; take an id of the table"):
            records.record("x")


def test_all_that_is_written_fits_the_schema(folder: Path) -> None:
    for path, model in (
        ("run-*.json", schema.RunFile),
        ("*.lines.jsonl", schema.ConversationLine),
        ("steps.jsonl", schema.StepLine),
    ):
        for line in one(folder, path).read_text().splitlines():
            model.model_validate_json(line)
    for line in gzip.decompress(one(folder, "*.jsonl.gz").read_bytes()).splitlines():
        schema.Record.model_validate_json(line, strict=True)
    schema.Record.model_validate_json(line_of(sample_session()), strict=True)


@pytest.mark.parametrize(
    ("damage", "offset", "left"),
    [
        (lambda members: [*members[:2], members[2][:-7]], 2, 20),
        (lambda members: [members[0], members[1][:-1] + bytes([members[1][-1] ^ 1]), members[2]], 1, 20),
        (lambda members: [bytes([members[0][0] ^ 1]) + members[0][1:], *members[1:]], 0, 20),
        (lambda members: [members[0][:100] + b"\x00" * 40 + members[0][140:], *members[1:]], 0, 20),
        (lambda members: [members[0], b"junk", *members[1:]], 1, 30),
    ],
    ids=["torn", "checksum", "beginning", "middle", "between"],
)
def test_a_damaged_member_costs_itself(tmp_path: Path, damage: Any, offset: int, left: int) -> None:
    members = [
        gzip.compress(
            b"".join(line_of(sample_record(request_id=f"r{first + number}")) for number in range(10)), mtime=0
        )
        for first in (0, 10, 20)
    ]
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"".join(damage(members)))
    records = Records(path)
    assert len(list(records.records())) == left
    at = sum(map(len, members[:offset]))
    assert [fault for fault in records.faults if f"{path}, offset {at}: a gzip member cannot be read: " in fault]
    assert len([fault for fault in records.faults if "gzip member" in fault]) == 1


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("summary", None, "summaries in"),
        ("summary", {"turns": "many"}, "a summary is left out: summary.turns is 'many'"),
        ("offset", 7, "records have no line of their end"),
        ("event", "fell", "a line is left out: event is 'fell'"),
        ("request_id", "other", "record 0 is of request "),
    ],
)
def test_a_wrong_line(folder: Path, name: str, value: Any, said: str) -> None:
    first = f"{START}-t1-0-0"

    def change(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, name: value} if (line["event"], line["request_id"]) == ("end", first) else line

    change_lines(one(folder, "*.lines.jsonl"), change)
    faults = read_all(folder)
    assert any(said in fault for fault in faults), faults
    assert all(str(folder) in fault for fault in faults)
    assert len(list(Records(folder).records())) == 18


def test_summaries_that_are_not_the_records(folder: Path) -> None:
    def change(line: dict[str, Any]) -> dict[str, Any]:
        if line.get("summary") and line.get("number") == 3 and line.get("step") == 1:
            line["summary"]["turns"] = 9
        return line

    change_lines(one(folder, "*.lines.jsonl"), change)
    records = Records(folder)
    assert len(list(records.records())) == 18
    path = one(folder, "*.jsonl.gz")
    lines = one(folder, "*.lines.jsonl").name
    assert records.faults == [
        f"{path}, offset 0: 2 summaries in {lines} are not those of their records, that of request "
        f"'{START}-t1-0-3' first; the records are taken"
    ]


def _with_row(**changes: Any) -> dict[str, Any]:
    record = sample_record(request_id="bad")
    record["rows"][0] |= changes
    return record


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            _with_row(logprobs=[-0.1]),
            "rows.0: a row has 16 ids, runs of 16 tokens of which 7 are sampled, and 1 logprobs; expected one id for "
            "each token, and one logprob for each sampled one",
        ),
        (
            _with_row(runs=[[-1, 0, -1, 0, 0]]),
            "rows.0: a row has 16 ids, runs of -1 tokens of which 0 are sampled, and 7 logprobs; expected one id for "
            "each token, and one logprob for each sampled one",
        ),
        (_with_row(ids=[1 << 40]), "rows.0.ids.0 is 1099511627776: input should be less than 2147483648"),
        (
            _with_row(runs=[[1, 0, 1 << 63, 0, 0]]),
            "rows.0.runs.0.2 is 9223372036854775808: input should be less than 9223372036854775808",
        ),
        (
            sample_record(number=1 << 63),
            "number is 9223372036854775808: input should be less than 9223372036854775808",
        ),
        (sample_record(began=1e300), "began is 1e+300: input should be less than 100000000000"),
        (sample_record(ended=-1.0), "ended is -1.0: input should be greater than or equal to 0"),
        (sample_record(ended="nan"), "ended is 'nan': input should be a finite number"),
    ],
    ids=["logprob", "counts", "id", "version", "number", "late", "early", "nan"],
)
def test_a_record_that_nobody_could_use_costs_itself(tmp_path: Path, record: dict[str, Any], said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (record, sample_record())))
    records = Records(path)
    assert [each["request_id"] for each in records.records()] == ["r-0"]
    assert records.faults == [f"{path}, offset 0: record 0 is left out: {said}"]


def test_lines_that_are_missing(folder: Path) -> None:
    one(folder, "*.lines.jsonl").unlink()
    records = Records(folder)
    assert len(list(records.records())) == 18
    assert "is missing; conversations that left no record are unknown" in records.faults[0]


def test_newer_schemas_are_refused_by_name(folder: Path) -> None:
    (folder / "run-z.json").write_text(json.dumps(sample_run_file(schema=3)))
    (folder / "z.jsonl.gz").write_bytes(gzip.compress(json.dumps(sample_record(schema=3)).encode()))
    faults = read_all(folder)
    said = "it is of schema 3, this version reads 2; install the version that wrote it"
    assert [fault for fault in faults if said in fault] == [
        f"{folder / 'run-z.json'}, offset 0: it is left out: {said}",
        f"{folder / 'z.jsonl.gz'}, offset 0: record 0 is left out: {said}",
    ]
    assert len(list(Records(folder).records())) == 18


def test_two_starts_and_a_step_done_again(folder: Path) -> None:
    second = "20261126T120000-77aa"
    sample_run(folder, steps=1, start=second)
    records = Records(folder)
    assert [run["start"] for run in records.runs] == [START, second]
    assert len(list(records.records())) == 18 + 10
    assert records.joined().num_rows == 18 + 10
    assert len(records.steps()) == 5
    what = "starts of a run that go on from no checkpoint"
    assert records.faults == [f"{folder}: it holds 2 {what}: {START}, {second}"]
    (folder / f"run-{second}.json").write_text(json.dumps(sample_run_file(start=second, resumed_from=0)))
    assert read_all(folder) == []  # a resume is ordinary


def test_a_step_that_one_start_has_twice(folder: Path) -> None:
    path = folder / "steps.jsonl"
    path.write_bytes(path.read_bytes() * 2)
    assert [fault.partition(": ")[2] for fault in read_all(folder)] == [
        f"{name} of start {START} is there twice" for name in ("step 1", "step 2", "validation 2")
    ]


def test_records_or_joins_alone(tmp_path: Path) -> None:
    sample_run(tmp_path / "a", join=False)
    assert read_all(tmp_path / "a") == [
        f"{tmp_path / 'a'}: there are records, and no joins; what was trained and scored is unknown"
    ]
    sample_run(tmp_path / "b")
    for path in [*(tmp_path / "b").glob("*.jsonl.gz"), *(tmp_path / "b").glob("*.lines.jsonl")]:
        path.unlink()
    assert read_all(tmp_path / "b") == [
        f"{tmp_path / 'b' / 'join'}: there are joins, and no records; tokens and texts are unknown"
    ]


def test_joins_of_other_kinds(folder: Path) -> None:
    for number, path in enumerate(sorted((folder / "join").iterdir())):
        if number == 0:
            path.write_bytes(path.read_bytes()[:-100])
        elif number == 1:
            path.unlink()
    place = {"uid": ["u"], "number": [0], "row": [0], "validation": [False], "step": [9]}
    pq.write_table(pa.table({"request_id": ["r"], "score": [1], **place}), folder / "join" / name_of(False, 9, START))
    records = Records(folder)
    joined = records.joined().to_pylist()
    assert len(joined) == 2 + 1
    assert [row["score"] for row in joined if row["request_id"] == "r"] == [1.0]
    records.steps()
    assert any("it is left out, it is no join: " in fault for fault in records.faults)
    assert any("the join of step 2" in fault and "is missing" in fault for fault in records.faults)


def test_clocks_that_differ(folder: Path) -> None:
    clock = {"event": "clock", "file": "f", "offset_s": -3.0, "error_s": 0.001}
    with (folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps(clock) + "\n" + '{"event": "clock"}\n')
    records = Records(folder)
    assert records.clocks() == [clock]
    assert len(records.steps()) == 3
    assert "a line is left out: file is {'event': 'clock'}: field required" in records.faults[0]


def test_what_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: it does not exist"):
        Records(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be read"):
        Records("a" * 300)
    assert read_all(tmp_path) == []


@pytest.mark.parametrize("seed", range(40))
def test_random_bytes_in_a_folder_raise_nothing(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    sample_run(tmp_path, steps=1, groups=1)
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    for _ in range(4):
        path = draw.choice(paths)
        data = bytearray(path.read_bytes())
        for _ in range(draw.randint(1, 8)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(bytes(data[: draw.choice([len(data), draw.randrange(len(data)) or 1])]))
    read_all(tmp_path)
    assert all(summary_of(record) for record in Records(tmp_path).records())


def is_taken() -> bool:
    """Return whether a thread reads a large text: another one cannot."""
    with ThreadPoolExecutor(1) as pool:
        taken = not pool.submit(lines_module._reading.acquire, blocking=False).result()
        if not taken:
            pool.submit(lines_module._reading.release).result()
    return taken


def test_of_large_texts_one_is_read_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs several times its size while it is read, and threads would add that up."""
    large = line_of(sample_record(**{"left": 0, "extra_info": {"text": "x" * (9 << 20)}}))
    small = line_of(sample_record())
    seen: list[tuple[str, int, bool]] = []
    unpacking, loads = zlib.decompressobj, orjson.loads

    class Unpacking:
        def __init__(self, *kind: int) -> None:
            self._made, self._size = unpacking(*kind), 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._made, name)

        def decompress(self, *given: Any) -> bytes:
            seen.append(("unpack", self._size, is_taken()))
            piece: bytes = self._made.decompress(*given)
            self._size += len(piece)
            return piece

    def parsed(text: bytes) -> Any:
        seen.append(("parse", len(text), is_taken()))
        return loads(text)

    (folder / f"{START}-large.jsonl.gz").write_bytes(gzip.compress(small + large))
    monkeypatch.setattr(members, "zlib", SimpleNamespace(decompressobj=Unpacking, error=zlib.error))
    monkeypatch.setattr(lines_module, "orjson", SimpleNamespace(loads=parsed, JSONDecodeError=orjson.JSONDecodeError))
    assert read_all(folder)
    for what, size in (("unpack", 8 << 20), ("parse", 9 << 20)):
        assert {taken for step, at, taken in seen if step == what and at > size} == {True}, what
        assert False in {taken for step, at, taken in seen if step == what and at < 1 << 20}
    assert not is_taken()

"""Folders of records that somebody else made, or that hold copies: nothing is counted twice, and nothing is waited for.

Each strange thing leaves a fault that names the file, and costs itself alone.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import verl_multiturn.cli.main as cli
from tests.support.sample_records import sample_record, sample_run
from verl_multiturn.errors import CertificateError, ConfigError
from verl_multiturn.evaluation.results import read_results
from verl_multiturn.observe.convert.parquet import write_parquet
from verl_multiturn.observe.convert.source import RunSource
from verl_multiturn.observe.documents.documents import Documents
from verl_multiturn.observe.explain.explanation import explain
from verl_multiturn.observe.explain.facts import read_facts
from verl_multiturn.observe.show.documents import ShowDocuments
from verl_multiturn.records.index.index import Index
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.read import lines as record_lines
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.schema import Record
from verl_multiturn.records.verify.folder import verify_files

START = "20261126T101500_5f3a2c"
RECORDS, CONVERSATIONS = 18, 20


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "records"
    folder.mkdir(parents=True)
    sample_run(folder, start=START)
    return folder


def counted(folder: Path) -> dict[str, int]:
    """Return how many conversations each reader finds."""
    index = Index(Records(folder))
    index.refresh()
    fates = ShowDocuments(folder).run()["fates"]
    facts = read_facts(Records(folder))
    return {
        "records": len(list(Records(folder).records())),
        "convert": len(list(RunSource(Records(folder)).records())),
        "verify": sum(verdict.verified is not None for verdict in verify_files([folder])),
        "show": sum(sum(each.values()) for each in fates.values()),
        "view": len(index),
        "lines": len({line["request_id"] for line in Records(folder).lines()}),
        "begun": sum(line["event"] == "begin" for line in Records(folder).lines()),
        "open": ShowDocuments(folder).run()["open"],
        "rows": sum(step["rows"] for step in ShowDocuments(folder).run()["steps"]),
        "joined": len(Records(folder).joined()),
        "starts": len(Records(folder).runs),
        "explain": len(facts.training) + len(facts.validation),
    }


def one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def twice(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def beside(path: Path, name: str) -> None:
    shutil.copy(path, path.with_name(name))


def renamed(path: Path, before: str = "copy-") -> Path:
    return Path(shutil.copy(path, path.with_name(before + path.name)))


COPIES: dict[str, Callable[[Path], object]] = {
    "records and lines": lambda run: [renamed(each) for each in run.glob(f"{START}-*.*l*")],
    "records and lines, first by name": lambda run: [renamed(each, "0-") for each in run.glob(f"{START}-*.*l*")],
    "records": lambda run: renamed(one(run, "*.jsonl.gz")),
    "records, first by name": lambda run: renamed(one(run, "*.jsonl.gz"), "0-"),
    "records, unpacked": lambda run: (run / "all.jsonl").write_bytes(
        gzip.decompress(one(run, "*.jsonl.gz").read_bytes())
    ),
    "lines": lambda run: renamed(one(run, "*.lines.jsonl")),
    "records in the same file": lambda run: twice(one(run, "*.jsonl.gz")),
    "lines in the same file": lambda run: twice(one(run, "*.lines.jsonl")),
    "run file": lambda run: beside(one(run, "run-*"), f"run-{START} (1).json"),
    "join": lambda run: beside(run / "join" / f"step-000001-{START}.parquet", f"step-000001-{START} (1).parquet"),
    "join, of another step": lambda run: beside(
        run / "join" / f"step-000001-{START}.parquet", f"step-000009-{START}.parquet"
    ),
    "join, of the same step": lambda run: beside(
        run / "join" / f"step-000001-{START}.parquet", f"step-1-{START}.parquet"
    ),
}


@pytest.mark.parametrize("what", COPIES)
def test_a_copy_counts_once_wherever_it_is_counted_and_is_named(what: str, run: Path) -> None:
    before = counted(run)
    assert (before["records"], before["show"], before["view"]) == (RECORDS, CONVERSATIONS, CONVERSATIONS)
    COPIES[what](run)
    assert counted(run) == before
    records = Records(run)
    list(records.records())
    document = ShowDocuments(run).run()
    assert any("left out" in fault for fault in document["faults"]), document["faults"]


def test_a_copy_of_the_snapshot(run: Path) -> None:
    line = next(iter(Records(run).lines()))
    own = {name: line[name] for name in ("request_id", "uid", "number", "validation", "step")}
    own = {**own, "began": 1.0, "doing": "generation", "since": 1.0, "turn": 0}
    (run / f"{START}-host.open.json").write_text(json.dumps({"at": 1.0, "open": [own], "dropped": 0, "cpu_s": 0.0}))
    before = sum(len(shot["open"]) for shot in Records(run).snapshots())
    renamed(run / f"{START}-host.open.json")
    assert sum(len(shot["open"]) for shot in Records(run).snapshots()) == before == 1


def test_a_copy_of_the_folder_is_refused_or_counts_once(run: Path) -> None:
    shutil.copytree(run, run.parent / "copy")
    records = Records(run, run.parent / "copy")
    assert len(list(records.records())) == RECORDS
    assert f"'{run}" in records.faults[-1]
    shutil.copytree(run, run / "copy")
    assert len(list(Records(run).records())) == RECORDS


def test_convert_says_what_it_left_out(run: Path) -> None:
    COPIES["records and lines"](run)
    done = CliRunner().invoke(cli.app, ["convert", str(run.parent), "--parquet"])
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["conversations"], said["faults"]) == (RECORDS, 2), done.output
    assert "18 conversations are left out" in done.stderr
    [table] = (run.parent / "converted").rglob("*.parquet")
    assert pq.read_table(table).num_rows == RECORDS


def put(kind: str, path: Path, outside: Path) -> None:
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a link that leads nowhere":
        path.symlink_to(outside / "gone")
    elif kind == "out of":
        outside.mkdir(exist_ok=True)
        (outside / "a").write_text("private text of the reader\n" * 3)
        path.symlink_to(outside / "a")
    else:
        os.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as held:
            held.bind(path.name)


KINDS = ["a pipe", "a socket", "a folder", "a device", "a link that leads nowhere", "out of"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["records", "lines", "run-x.json", "x.jsonl", "x.jsonl.gz", "x.open.json", "steps.jsonl", "join"]
)
def test_what_is_no_plain_file_is_named_and_nothing_waits(
    name: str, kind: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    own = {
        "records": one(run, "*.jsonl.gz"), "lines": one(run, "*.lines.jsonl"),
        "join": run / "join" / f"step-000001-{START}.parquet",
    }  # fmt: skip
    path = own.get(name, run / name)
    put(kind, path, run.parent / "private")
    records = Records(run.parent)
    records.require()
    shown = ShowDocuments(run.parent).run()
    list(records.records())
    index = Index(Records(run.parent))
    index.refresh()
    faults = [*shown["faults"], *records.faults]
    assert any(str(path) in fault and (kind in fault or "no plain file" in fault) for fault in faults), faults
    assert "private text" not in json.dumps([faults, list(index.faults)])
    assert len(index) <= CONVERSATIONS


def test_joins_that_lie_elsewhere(run: Path) -> None:
    (run / "join").rename(run.parent / "join")
    (run / "join").symlink_to("../join")
    records = Records(run)
    assert len(records.joined()) == 0
    assert sum("leads out of" in fault for fault in records.faults) == 3
    index = Index(Records(run))
    index.refresh()
    assert sum("leads out of" in fault for fault in index.faults) == 3


def test_records_that_lie_elsewhere(run: Path) -> None:
    (run.parent / "other").mkdir()
    (run.parent / "other" / "records").symlink_to(run)
    with pytest.raises(ConfigError, match=f"leads out of .*; name '{run}' itself"):
        Records(run.parent / "other")
    (run.parent / "named").symlink_to(one(run, "*.jsonl.gz"))
    assert len(list(Records(run.parent / "named").records())) == RECORDS


def test_a_name_with_line_ends_forges_no_line(run: Path) -> None:
    (run / "x\n{'faults': 0}.jsonl").write_bytes(b"[]\n")
    records = Records(run)
    list(records.records())
    assert [fault for fault in records.faults if "x\\n{'faults': 0}.jsonl" in fault]
    assert not [fault for fault in records.faults if "\n" in fault]


BOMBS = {
    "lists": b"[" + b"[]," * 3_000_000 + b"0]",
    "objects": b"[" + b"{}," * 3_000_000 + b"0]",
    "keys": b"[" + b'{"":0},' * 3_000_000 + b"0]",
    "numbers": b"[" + b"1.5," * 3_000_000 + b"0]",
}


@pytest.mark.parametrize("what", BOMBS)
def test_values_that_would_fill_the_memory(what: str, run: Path) -> None:
    text = line_of(sample_record(request_id="bomb", sampling={"x": "@"})).replace(b'"@"', BOMBS[what])
    (run / "bomb.jsonl.gz").write_bytes(gzip.compress(text))
    records = Records(run)
    assert "bomb" not in {record["request_id"] for record in records.records()}
    assert any("would take more than 192 MB of memory" in fault for fault in records.faults), records.faults


def test_the_largest_honest_records_are_read() -> None:
    """Four times a large record: of 32,768 tokens eight rows, and ten answers of a million characters full of marks."""
    row = b"151643," * 32_768 + b"-12.345678," * 32_768
    record_lines._refuse_costly(b"[" + row * 32 + b"0]")
    text = json.dumps({"a": '[{"b": 1}, ' * 90_000}).encode()
    record_lines._refuse_costly(b"[" + b",".join([text] * 40) + b"]")
    assert len(text) * 40 < record_lines.LONGEST_LINE


def test_a_join_that_would_fill_the_memory(run: Path) -> None:
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 1_000_000, pa.int32()), pa.array(["r"]))
    columns = {"request_id": values, "step": pa.array([9] * 1_000_000, pa.int32())}
    path = run / "join" / f"step-000009-{START}.parquet"
    pq.write_table(pa.table(columns), path)
    assert path.stat().st_size < 10_000
    records = Records(run)
    assert len(records.joined()) == len(Records(run).joined())
    assert any(str(path) in fault and "would unpack to" in fault for fault in records.faults)


@pytest.mark.parametrize(
    "table",
    [
        pa.Table.from_arrays([pa.array([9])] * 2, names=["step", "step"]),
        pa.Table.from_arrays([pa.array([9]), *[pa.array(["u"])] * 2], names=["step", "uid", "uid"]),
        pa.table({"a": [{"step": 9}]}),
    ],
    ids=["step twice", "uid twice", "step within"],
)
def test_a_join_with_other_columns(table: pa.Table, run: Path) -> None:
    expected = len(Records(run).joined())
    path = run / "join" / f"step-000009-{START}.parquet"
    pq.write_table(table, path)
    records = Records(run)
    assert len(records.joined()) == expected
    assert any(str(path) in fault for fault in records.faults)


def changed(**columns: Any) -> Callable[[pa.Table], pa.Table]:
    """Return a function that gives a column of a join another value in all rows; None: it has the column no more."""

    def change(table: pa.Table) -> pa.Table:
        for name, value in columns.items():
            at, kind = table.schema.get_field_index(name), table.schema.field(name).type
            if value is None:
                table = table.remove_column(at)
            else:
                made = [value if value != "null" else None] * len(table)
                table = table.set_column(at, name, pa.array(made, kind))
        return table

    return change


PLACES = ("uid", "number", "row", "validation", "step")
UNPLACED = {
    **{f"no {name}": changed(**{name: None}) for name in PLACES},
    **{f"{name} of nobody": changed(**{name: "null"}) for name in PLACES},
    "a row before the first": changed(row=-1),
}
ODD = {
    **{f"no {name}": changed(**{name: None}) for name in ("trained", "untrained", "group_mean", "group_std", "score")},
    "without rows": lambda table: table.slice(0, 0),
    "no request id": changed(request_id="null"),
    "large scores": changed(score=1e308),
    "large parts": changed(parts='{"acc": 1%s}' % ("0" * 400)),
    "deep parts": changed(parts='{"a": ' * 1_020 + "1" + "}" * 1_020),
}


@pytest.mark.parametrize("what", [*UNPLACED, *ODD])
def test_a_join_with_odd_rows_is_read_or_named_by_every_reader(what: str, run: Path, tmp_path: Path) -> None:
    change = {**UNPLACED, **ODD}[what]
    path = run / "join" / f"step-000001-{START}.parquet"
    for each in path.parent.iterdir():
        pq.write_table(change(pq.read_table(each)), each)
    request_id = next(Records(run).records())["request_id"]
    shown = [ShowDocuments(run), ShowDocuments(run), ShowDocuments(run)]
    shown[0].run(), shown[1].step(1), shown[2].conversation(request_id)
    documents = Documents([run])
    documents.refresh()
    documents.run(), documents.timeline(0, 1, False), documents.record(request_id)
    verify_files([run])
    explain(Records(run))
    write_parquet(RunSource(Records(run)), tmp_path / "converted")
    named = [any(str(path) in fault for fault in faults) for faults in (shown[0].run()["faults"], documents.faults())]
    assert named == [what in UNPLACED] * 2, (shown[0].run()["faults"], documents.faults())


def test_a_summary_that_its_record_contradicts_is_said(run: Path) -> None:
    path = one(run, "*.lines.jsonl")
    path.write_bytes(path.read_bytes().replace(b'"turns":2', b'"turns":9'))
    document = ShowDocuments(run).group(f"{START}-t1-0")
    assert {each["turns"] for each in document["conversations"]} == {2}
    assert any("says turns 9 for 2; the record is taken" in fault for fault in document["faults"])


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_beside_the_records(kind: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    (run.parent / "evaluations").mkdir()
    put(kind, run.parent / "evaluations" / "points.jsonl", run.parent.parent / "private")
    assert any("points.jsonl' " in fault for fault in ShowDocuments(run.parent).run()["faults"])
    put(kind, run.parent / "evaluation.json", run.parent.parent / "private")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_results(run.parent)
    shutil.rmtree(run)
    run.mkdir()
    put(kind, run.parent / "train.log", run.parent.parent / "private")
    done = CliRunner().invoke(cli.app, ["show", str(run.parent)])
    assert done.exit_code == 2
    assert "private text" not in done.output


def test_a_long_text_that_a_join_repeats(run: Path) -> None:
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 500, pa.int32()), pa.array(["r" * 8_000_000]))
    columns = {"request_id": values, "step": pa.array([9] * 500, pa.int32())}
    path = run / "join" / f"step-000009-{START}.parquet"
    pq.write_table(pa.table(columns), path, compression="zstd")
    records = Records(run)
    assert len(records.joined()) > 0
    assert any(str(path) in fault and "would unpack to 4" in fault for fault in records.faults)


def test_convert_writes_nothing_through_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (run.parent / "converted").symlink_to(tmp_path / "private")
    done = CliRunner().invoke(cli.app, ["convert", str(run.parent), "--otel"])
    assert (done.exit_code, list((tmp_path / "private").iterdir())) == (2, [])
    (run.parent / "converted").unlink()
    (run.parent / "converted").mkdir()
    os.mkfifo(run.parent / "converted" / "traces.jsonl")
    done = CliRunner().invoke(cli.app, ["convert", str(run.parent), "--otel"])
    assert done.exit_code == 2
    assert "is no plain file and no folder; remove it" in done.stderr


def test_the_error_of_a_large_text_holds_no_copy_of_it() -> None:
    # It outlives the turn of its thread (`alone_if_large`), and others read their texts then.
    text = b'{"a": ' + b"9" * 5_000_000 + b"}"
    with pytest.raises(CertificateError, match=r"no record of a conversation: .*digits") as caught:
        record_lines.read_object(text)
    held = [each for frame, _ in traceback.walk_tb(caught.tb) for each in frame.f_locals.values() if each is not text]
    assert max(len(each) for each in held if isinstance(each, str | bytes)) < 1000
    assert caught.value.__context__ is None


def test_the_error_of_an_object_that_does_not_fit_holds_none_of_its_values() -> None:
    value = record_lines.read_object(line_of(sample_record(status="x" * 100_000)))
    with pytest.raises(CertificateError, match="status") as caught:
        record_lines.fitted(Record, value)
    assert caught.value.__context__ is None

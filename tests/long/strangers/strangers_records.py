"""Hostile records for `benchmarks.strangers_folder`: files that are none, bombs, copies, lies, and names."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.long.strangers.strangers_cases import (
    DIGITS,
    Case,
    Raw,
    changed_lines,
    in_places,
    lines_of,
    link,
    one_more,
    packed,
    pipe,
    records_in,
)
from tests.long.strangers.strangers_material import World, read_json, write_json
from tests.support.sample_records import START
from verl_multiturn.observe.documents.documents import Documents

INDEX = "view-index.parquet"
ANSI = "\x1b[2J\x1b]0;gone\x07\u202e\U000e0041\ufe0f\u00ad\x9b"
"""Characters that a terminal obeys, or that hide text."""


def record_cases() -> Iterator[Case]:
    """Yield the cases of a run's records."""
    yield from in_places(
        "run",
        {
            "the records": packed,
            "more records": lambda folder: folder / "records" / "x.jsonl",
            "more packed records": lambda folder: folder / "records" / "x.jsonl.gz",
            "the lines": lines_of,
            "the run's file": lambda folder: folder / "records" / f"run-{START}.json",
            "the steps": lambda folder: folder / "records" / "steps.jsonl",
            "a join": lambda folder: next((folder / "records" / "join").iterdir()),
            "the snapshot": lambda folder: folder / "records" / f"{START}-1.open.json",
            "the index": lambda folder: folder / "records" / INDEX,
            "the points": lambda folder: folder / "evaluations" / "points.jsonl",
            "the log": lambda folder: folder / "train.log",
            "the metrics": lambda folder: folder / "metrics.jsonl",
        },
        {
            "the records": "pl", "more records": "ps6dj", "more packed records": "pf6", "the lines": "p6jn",
            "the run's file": "pf6jnl", "the steps": "p6jn", "a join": "p6l", "the snapshot": "p6", "the index": "p6fl",
            "the points": "p6", "the log": "pl", "the metrics": "p6n",
        },
    )  # fmt: skip
    yield from _links()
    yield from _bombs()
    yield from _copies()
    yield from _lies()
    yield from _texts()
    yield from _numbers()


def _links() -> Iterator[Case]:
    def outside(folder: Path, world: World) -> None:
        link(folder / "records", world.secrets / "records")

    def one(folder: Path, world: World) -> None:
        target = next((world.secrets / "records").glob("*.jsonl.gz"))
        link(folder / "records" / target.name, target)

    def environment(folder: Path, world: World) -> None:
        link(folder / "records" / "x.jsonl", "/proc/self/environ")

    def itself(folder: Path, world: World) -> None:
        link(folder / "records" / "join", folder / "records")

    def planted(folder: Path, world: World) -> None:
        (folder / "records" / "x.jsonl").write_text("")

    yield Case("records: a link to another run", "run", outside, counted=False)
    yield Case("a file of records that is a link to another run's", "run", one, counted=False)
    yield Case("records: a link to the environment", "run", environment, counted=False, is_short=True)
    yield Case("join: a link to its own folder", "run", itself, counted=False)
    yield Case("a link under the name of the unfinished index", "run", planted, planted=True, counted=False)


def _bombs() -> Iterator[Case]:
    def member(text: bytes) -> Any:
        def change(folder: Path, world: World) -> None:
            record = json.dumps({**records_in(packed(folder))[0], "request_id": "bomb"}).encode()
            at = record.index(b'"left": 0')
            with (folder / "records" / f"{START}-bomb.jsonl.gz").open("wb") as file:
                file.write(_zipped(record[:at] + b'"left": ' + text + record[at + 9 :] + b"\n"))

        return change

    def many(folder: Path, world: World) -> None:
        (folder / "records" / "bomb.jsonl.gz").write_bytes(_zipped(b"\n" * (200 << 20)) * 20)

    def lines(folder: Path, world: World) -> None:
        with lines_of(folder).open("a") as file:
            file.write(json.dumps({"event": "begin", "request_id": "x" * (300 << 20)}) + "\n")

    def table(folder: Path, world: World, name: str, columns: dict[str, Any]) -> None:
        rows = 20_000_000
        place = folder / "records" / name
        writer = None
        for _ in range(20):
            made = pa.table({key: pa.array([value] * (rows // 20)) for key, value in columns.items()})
            writer = writer or pq.ParquetWriter(place, made.schema, compression="zstd")
            writer.write_table(made)
        assert writer is not None
        writer.close()

    def join(folder: Path, world: World) -> None:
        columns = {"request_id": "x" * 90, "uid": "y" * 90, "number": 0, "row": 0, "validation": False, "step": 1}
        table(folder, world, f"join/step-000009-{START}.parquet", columns)

    def wide(folder: Path, world: World) -> None:
        place = folder / "records" / "join" / f"step-000009-{START}.parquet"
        kept = pq.read_table(next(place.parent.iterdir())).slice(0, 1)
        long = pa.array([[0.5] * 100_000_000], kept.schema.field("advantages").type)
        names = kept.schema.get_field_index("advantages")
        pq.write_table(kept.set_column(names, kept.schema.field("advantages"), long), place, compression="zstd")

    yield Case("a member of empty lists", "run", member(b"[" + b"[]," * 19_000_000 + b"[]]"), counted=False)
    yield Case("a member of one number", "run", member(b"9" * (60 << 20)), counted=False)
    yield Case("a member of one text", "run", member(b'"' + b"x" * (250 << 20) + b'"'), counted=False)
    yield Case("a member of keys", "run", member(_keys(3_000_000)), counted=False)
    yield Case("members of line ends", "run", many, counted=False)
    yield Case("a line of 300 MB", "run", lines, counted=False)
    yield Case("a join of 20,000,000 rows", "run", join, counted=False)
    yield Case("a join of one row with 100,000,000 advantages", "run", wide, counted=False)


def _keys(count: int) -> bytes:
    return ("{" + ",".join(f'"{number}":0' for number in range(count)) + "}").encode()


def _zipped(text: bytes) -> bytes:
    made = zlib.compressobj(9, zlib.DEFLATED, 31)
    return made.compress(text) + made.flush()


def _copies() -> Iterator[Case]:
    def pair(folder: Path, world: World, name: str = f"copy-{START}", lines: bool = True) -> None:
        for path in [packed(folder), *([lines_of(folder)] if lines else [])]:
            shutil.copyfile(path, path.with_name(name + path.name.removeprefix(path.name.split(".")[0])))

    def later(folder: Path, world: World) -> None:
        pair(folder, world, f"{START}-zz")

    def alone(folder: Path, world: World) -> None:
        pair(folder, world, lines=False)

    def plain(folder: Path, world: World) -> None:
        text = gzip.decompress(packed(folder).read_bytes())
        (folder / "records" / "all.jsonl").write_bytes(text)

    def linked(folder: Path, world: World) -> None:
        for path in (packed(folder), lines_of(folder)):
            os.link(path, path.with_name(f"linked-{path.name}"))

    def twice(folder: Path, world: World) -> None:
        path = packed(folder)
        path.write_bytes(path.read_bytes() * 2)

    def lines_twice(folder: Path, world: World) -> None:
        path = lines_of(folder)
        path.write_bytes(path.read_bytes() * 2)

    def lines_alone(folder: Path, world: World) -> None:
        path = lines_of(folder)
        shutil.copyfile(path, path.with_name(f"copy-{path.name}"))

    def another(folder: Path, world: World) -> None:
        record = records_in(packed(folder))[0]
        one_more(folder, request_id=record["request_id"], uid=record["uid"], stop_reason="length", score=1.0)

    def join(folder: Path, world: World) -> None:
        path = sorted((folder / "records" / "join").iterdir())[0]
        shutil.copyfile(path, path.with_name(f"copy-{path.name}"))

    def step(folder: Path, world: World) -> None:
        path = sorted((folder / "records" / "join").iterdir())[0]
        shutil.copyfile(path, path.with_name(f"step-000007-{START}.parquet"))

    def steps(folder: Path, world: World) -> None:
        path = folder / "records" / "steps.jsonl"
        path.write_bytes(path.read_bytes() * 2)

    yield Case("a copy of records and lines", "run", pair, is_short=True)
    yield Case("a copy under a later name", "run", later)
    yield Case("a copy of the records alone", "run", alone)
    yield Case("a copy that is not packed", "run", plain)
    yield Case("hard links to records and lines", "run", linked)
    yield Case("the members twice in one file", "run", twice, is_short=True)
    yield Case("the lines twice in one file", "run", lines_twice)
    yield Case("a copy of the lines alone", "run", lines_alone)
    yield Case("another record of the same request", "run", another)
    yield Case("a copy of a join", "run", join)
    yield Case("a copy of a join under another step", "run", step)
    yield Case("the steps twice", "run", steps)


def _lies() -> Iterator[Case]:
    def index(change: Any) -> Any:
        def changed(folder: Path, world: World) -> None:
            documents = Documents([folder])
            documents.refresh()
            documents.save()
            path = folder / "records" / INDEX
            if not path.is_file():  # it is kept elsewhere
                write_json(path, {})
                return
            table = pq.read_table(path)
            state = json.loads(table.schema.metadata[b"verl_multiturn"])
            table = change(table, state, folder, world)
            pq.write_table(table.replace_schema_metadata({"verl_multiturn": json.dumps(state)}), path)

        return changed

    def scores(table: pa.Table, state: Any, folder: Path, world: World) -> pa.Table:
        at = table.schema.get_field_index("score")
        return table.set_column(at, table.schema.field(at), pa.array([1.0] * len(table), pa.float64()))

    def guests(table: pa.Table, state: Any, folder: Path, world: World) -> pa.Table:
        return pa.concat_tables([table, table])

    def joins(table: pa.Table, state: Any, folder: Path, world: World) -> pa.Table:
        target = next((world.secrets / "records" / "join").iterdir())
        state["joins"] = [os.path.relpath(target, folder / "records" / "join")] * len(state["joins"])
        shutil.rmtree(folder / "records" / "join")
        return table

    def files(table: pa.Table, state: Any, folder: Path, world: World) -> pa.Table:
        target = next((world.secrets / "records").glob("*.jsonl.gz"))
        stem = target.name.removesuffix(".jsonl.gz")
        state["files"] = [os.path.relpath(target.with_name(stem), folder / "records")] * len(state["files"])
        return table

    def summaries(line: dict[str, Any]) -> dict[str, Any]:
        if line.get("summary"):
            line["summary"] |= {"stop_reason": "length", "sampled_tokens": 10**6, "valid": False}
        return line

    def scored(line: dict[str, Any]) -> dict[str, Any]:
        return line | {"score": 1.0} if line["event"] == "score" else line

    def others(line: dict[str, Any]) -> dict[str, Any]:
        return line | {"request_id": f"other-{line['request_id']}"} if line["event"] == "end" else line

    def offsets(line: dict[str, Any]) -> dict[str, Any]:
        return line | {"offset": -1, "place": 2**40} if line["event"] == "end" else line

    def ghosts(folder: Path, world: World) -> None:
        path = lines_of(folder)
        end = next(line for line in path.read_text().splitlines() if '"end"' in line)
        for number in range(50):
            with path.open("a") as file:
                file.write(json.dumps({**json.loads(end), "request_id": f"ghost-{number}", "offset": 7}) + "\n")

    def joined(folder: Path, world: World) -> None:
        for path in (folder / "records" / "join").iterdir():
            table = pq.read_table(path)
            at = table.schema.get_field_index("score")
            pq.write_table(
                table.set_column(at, table.schema.field(at), pa.array([1.0] * len(table), pa.float64())), path
            )

    def names(folder: Path, world: World) -> None:
        path = folder / "records" / "steps.jsonl"
        target = next((world.secrets / "records" / "join").iterdir())
        steps = [json.loads(line) for line in path.read_text().splitlines()]
        for step in steps:
            step["join"] = os.path.relpath(target, folder / "records" / "join")
        path.write_text("".join(json.dumps(step) + "\n" for step in steps))

    yield Case("an index with other scores", "run", index(scores), is_short=True)
    yield Case("an index with each conversation twice", "run", index(guests))
    yield Case("an index that names another run's join", "run", index(joins), counted=False)
    yield Case("an index that names another run's records", "run", index(files))
    for name, change in {"summaries of others": summaries, "scores in the lines": scored, "ends of others": others,
                         "offsets that are none": offsets}.items():  # fmt: skip
        yield Case(f"lines: {name}", "run", lambda folder, world, change=change: changed_lines(folder, change))
    yield Case("lines of conversations that are not there", "run", ghosts)
    yield Case("joins with other scores", "run", joined, is_short=True)
    yield Case("steps that name another run's join", "run", names)


def _texts() -> Iterator[Case]:
    hostile = {
        "a path": "../../../../../../tmp/escaped",
        "characters that hide": f"r{ANSI}\nverl-multiturn: all is well",
        "markup of a terminal": "[red]x[/] [link=http://127.0.0.1:9/x]y[/link] [/]",
        "HTML": '</script><script>alert(1)</script><img src="http://127.0.0.1:9/x">',
        "half a character": "\ud83d",
        "4 MB": "x" * (4 << 20),
    }
    for name, text in hostile.items():

        def change(folder: Path, world: World, text: str = text) -> None:
            one_more(folder, request_id=text, uid=text, stop_reason="finished", error=text, loop=text)

        yield Case(f"a request id: {name}", "run", change, counted=False)

    def file_name(folder: Path, world: World) -> None:
        (folder / "records" / f"a{ANSI}\n[red]b.jsonl").write_text("{}\n")

    def settings(folder: Path, world: World) -> None:
        path = folder / "records" / f"run-{START}.json"
        told = read_json(path)
        told |= {"versions": {f"x`|\n# {ANSI}": "`|\n\n# Verified\n<script>alert(1)</script>"}, "host": ANSI}
        told["template"]["text"] = "{% for i in range(10 ** 10) %}{% endfor %}"
        write_json(path, told)

    def tokenizer(folder: Path, world: World) -> None:
        path = folder / "records" / f"run-{START}.json"
        shutil.copyfile(folder / "checkpoints/global_step_1/actor/huggingface/tokenizer.json",
                        world.secrets / "tokenizer.json")  # fmt: skip
        write_json(path, read_json(path) | {"tokenizer": {"path": str(world.secrets), "digest": None}})

    def piped(folder: Path, world: World) -> None:
        pipe(folder / "tokenizer.json")
        path = folder / "records" / f"run-{START}.json"
        write_json(path, read_json(path) | {"tokenizer": {"path": str(folder), "digest": None}})

    yield Case("a file's name", "run", file_name, counted=False)
    yield Case("versions and a template", "run", settings)
    yield Case("the reader's own tokenizer", "run", tokenizer)
    yield Case("a tokenizer that is a pipe", "run", piped)


def _numbers() -> Iterator[Case]:
    entries: dict[str, dict[str, Any]] = {
        "a number beyond 32 bits": {"number": 2**40},
        "a number beyond 64 bits": {"step": 2**70},
        "a number of 100,000 digits": {"number": Raw(DIGITS)},
        "a time beyond all": {"began": 1e308, "ended": -1e308},
        "no number": {"began": Raw("NaN"), "ended": Raw("Infinity")},
        "a step of 10^9": {"step": 10**9},
        "a score beyond all": {"score": 1e308},
        "an id beyond 64 bits": {"rows": [{"prompt_length": 1, "ids": [2**70], "logprobs": [], "images": [],
                                           "runs": [[1, 0, -1, 0, 0]]}]},
        "a run of 10^12 tokens": {"rows": [{"prompt_length": 1, "ids": [1], "logprobs": [], "images": [],
                                            "runs": [[10**12, 0, -1, 0, 0]]}]},
        "a timeline of 10^9 turns": {"timeline": [{"kind": "call", "name": "x", "turn": 10**9, "start": 0.0,
                                                   "end": 1e300}]},
        "itself, rolled again": {"rerolled_from": "guest"},
        "depth": {"differences": [], "sample": Raw('{"a":' * 5_000 + "1" + "}" * 5_000)},
    }  # fmt: skip
    for name, own in entries.items():
        yield Case(
            f"a record with {name}", "run", lambda folder, world, own=own: one_more(folder, **own), counted=False
        )

    def step(folder: Path, world: World) -> None:
        path = folder / "records" / "steps.jsonl"
        first = json.loads(path.read_text().splitlines()[0])
        with path.open("a") as file:
            file.write(json.dumps({**first, "step": 10**12, "rows": 10**15}) + "\n")

    yield Case("a step of 10^12", "run", step)

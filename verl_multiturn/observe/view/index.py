"""`Index`: a row for each conversation that was begun, kept as a Parquet file beside the records and read in memory.

Invariants:
- the index holds nothing that the records do not: it may be deleted, and is built anew where it is older than this code
  or than a file that became shorter;
- only what was appended since is read: lines from where they were left, joins that are new;
- a torn or strange line costs that line, and is told as a fault.

The columns of a conversation come from its lines (`index_rows.py`), those of `JOIN` from the trainer's joins.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verl_multiturn.errors import ConfigError
from verl_multiturn.observe.view.index_rows import (
    COLUMNS,
    JOIN,
    SCHEMA,
    Row,
    enter,
    enter_record,
    fate_row,
    merge,
    table_of,
)
from verl_multiturn.records import schema
from verl_multiturn.records.fates import fates, start_of
from verl_multiturn.records.files import LINES as LINES_END
from verl_multiturn.records.files import STEPS, RecordFile
from verl_multiturn.records.joins import FOLDER, first_line, is_of, open_join, parse_name, refusal
from verl_multiturn.records.reader import Placed, Records

NAME = "view-index.parquet"
_VERSION = "2"
_PART = 100_000
"""Rows of one part. Only parts that change are copied."""
_SLICE = 100_000
"""Lines that are read at a time."""
_BLOCK = 16_000_000

_OF_JOIN = (
    "request_id", "uid", "number", "row", "validation", "step", "update", "score", "trained", "untrained", "group_mean",
    "group_std",
)  # fmt: skip
_GIVEN = [*(name for name, _ in JOIN), "score", "why"]
"""Columns that a join decides."""
_UIDS = 4_000
"""Groups whose fates are looked for at a time."""


class Index:
    """The conversations of one folder of records, or of one file.

    Args:
        records: The records of the folder.
    """

    def __init__(self, records: Records) -> None:
        (self.folder,) = records.folders
        self._records = records
        self.faults: dict[str, None] = {}
        self.version = 0
        """Grows with each change."""
        self._parts: list[pa.Table] = []
        self._files: list[str] = []
        self._read: dict[str, int] = {}
        self._joins: list[str] = []
        self._told: list[Any] = []
        """What decides the fates of groups without new lines; see `_teller`."""
        self._touched: set[str] = set()
        """Groups with new lines."""
        self._looked: dict[str, int] = {}
        self._seen: set[str] = set()
        self._open_file()

    @property
    def table(self) -> pa.Table:
        """Return all rows, those begun first first."""
        return pa.concat_tables(self._parts) if self._parts else SCHEMA.empty_table()

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def stem(self, number: int) -> str:
        """Return the stem of the files of the writer that the column `file` names."""
        return self._files[number]

    def join(self, number: int) -> Path:
        """Return the join that the column `join` names."""
        return self.folder / "join" / self._joins[number]

    def refresh(self) -> bool:
        """Read what was written since, and tell whether anything was."""
        before = self.version
        for path in self._records.line_files:
            with contextlib.suppress(OSError):
                self._read_lines(path)
        with contextlib.suppress(ConfigError):  # a file that went away meanwhile
            self._read_alone()
        self._read_joins()
        told = self._teller()
        if self.version != before or told != self._told:
            self._find_fates(told[2], everywhere=told != self._told)
            self._told, self._touched = told, set()
            self.version += 1
        return self.version != before

    def _teller(self) -> list[Any]:
        """Return what other conversations' fates hang on: the run's steps, joins and starts."""
        runs = sorted(path.stem.removeprefix("run-") for path in self.folder.glob("run-*.json"))
        return [
            _size(self.folder / STEPS),
            len(self._joins),
            sorted({start_of(stem, runs) for stem in self._files}),
            runs,
        ]

    def save(self) -> None:
        """Write the index beside the records; where that cannot be, it stays in memory."""
        state: dict[str, Any] = {"version": _VERSION, "read": self._read, "files": self._files, "joins": self._joins}
        state |= {"told": self._told, "looked": self._looked}
        table = self.table.replace_schema_metadata({"verl_multiturn": json.dumps(state)})
        half = self.folder / f".{NAME}.{os.getpid()}"
        try:
            pq.write_table(table, half, compression="zstd", row_group_size=_PART)
            half.replace(self.folder / NAME)
        except OSError:
            with contextlib.suppress(OSError):
                half.unlink(missing_ok=True)

    def _open_file(self) -> None:
        path = self.folder / NAME
        try:
            file = pq.ParquetFile(path)
            state = json.loads(file.schema_arrow.metadata[b"verl_multiturn"])
            sizes = {name: (self.folder / name).stat().st_size for name in state["read"]}
            if state["version"] != _VERSION or any(sizes[name] < read for name, read in state["read"].items()):
                return
            if not all((self.folder / "join" / name).exists() for name in state["joins"]):
                return
            parts = [file.read_row_group(number).cast(SCHEMA) for number in range(file.num_row_groups)]
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
            return
        self._parts = [part.replace_schema_metadata(None) for part in parts]
        self._read, self._files, self._joins = state["read"], state["files"], state["joins"]
        self._told, self._looked = state["told"], state["looked"]

    def _read_lines(self, path: Path) -> None:
        start = self._read.get(path.name, 0)
        if path.stat().st_size <= start:
            return
        number = self._number(path.name.removesuffix(LINES_END))
        changed: dict[str, Row] = {}
        name, count = path.name, 0
        for at, text in _lines(path, start):
            self._read[name] = at + len(text)
            try:
                enter(changed, orjson.loads(text), number)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                if text.strip():
                    self.faults[f"{path}: the line at byte {at} is left out, it cannot be read ({error})"] = None
                continue
            count += 1
            if count % _SLICE == 0:
                self._put(changed)
                changed = {}
        self._put(changed)

    def _number(self, stem: str) -> int:
        if stem not in self._files:
            self._files.append(stem)
        return self._files.index(stem)

    def _read_alone(self) -> None:
        """Read the records that have no line: all of a file without lines, and those behind the last line of one.

        A process that was killed may have written a member, and not its lines. So a file with lines is looked at once.
        """
        for file in self._records.files:
            size, has_lines = _size(file.path), file.has_lines
            if self._looked.get(file.path.name) == size or (has_lines and file.stem in self._seen):
                continue
            self._looked[file.path.name] = size
            self._seen.add(file.stem)
            number = self._number(file.stem)
            found = self._behind(file, number) if has_lines else list(self._records.placed(file))
            changed: dict[str, Row] = {}
            for placed in found:
                enter_record(changed, placed, number)
            self._put(changed)

    def _behind(self, file: RecordFile, number: int) -> list[Placed]:
        last = (-1, -1)
        for part in self._parts:
            own = part.filter(pc.and_(pc.equal(part["file"], number), pc.is_valid(part["offset"])))
            if len(own):
                best = pc.select_k_unstable(own, 1, sort_keys=[("offset", "descending"), ("place", "descending")])
                last = max(last, (own["offset"][best[0].as_py()].as_py(), own["place"][best[0].as_py()].as_py()))
        found = self._records.placed_from(file, max(last[0], 0))
        return [placed for placed in found if (placed.offset, placed.place) > last]

    def _find_fates(self, starts: Sequence[str], everywhere: bool) -> None:
        """Enter the fates that neither a join nor a line alone says: of groups with new lines, or of all open ones.

        Args:
            starts: The starts whose files are there.
            everywhere: Whether what decides other groups' fates has changed.
        """
        touched = pa.array(self._touched, pa.string())
        open_ones = [part.filter(_undecided(part, everywhere, touched))["uid"] for part in self._parts]
        uids = pc.unique(pa.concat_arrays([pa.array([], pa.string()), *(each.combine_chunks() for each in open_ones)]))
        if not len(uids):
            return
        steps, runs = [*self._records.steps(), *self._records.ends()], self._records.runs
        of_joins = [name.start if (name := parse_name(join)) else "" for join in self._joins]
        others: dict[str, Any] = {"other_starts": [*starts, *filter(None, of_joins)], "has_joins": bool(self._joins)}
        for first in range(0, len(uids), _UIDS):
            some = uids.slice(first, _UIDS)
            rows = [
                row
                for part in self._parts
                for row in part.filter(pc.is_in(part["uid"], some)).select(_TOLD).to_pylist()
            ]
            joined = [_joined_row(row, of_joins[row["join"]]) for row in rows if row["join"] is not None]
            lines = (line for row in rows for line in self._lines_again(row))
            before = {row["request_id"]: row for row in rows if row["join"] is None}
            changed = {}
            for fate in fates(lines, steps, joined, runs, **others):
                row = before.get(fate.request_id)
                if row is not None and (row["fate"], row["why"]) != (fate.fate, fate.why):
                    changed[fate.request_id] = fate_row(fate.request_id, fate.fate, fate.why)
            self._put(changed)

    def _lines_again(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the lines that a row was made of, as far as fates read them."""
        names = ("request_id", "uid", "number", "validation", "step")
        line = {name: row[name] for name in names} | {"why": row["said"]}
        line["file"] = "" if row["file"] is None else self._files[row["file"]]
        if row["began"] is not None:
            yield {**line, "event": "begin", "at": row["began"]}
        if row["event"] != "begin":
            yield {**line, "event": row["event"], "at": row["ended"]}

    def _put(self, changed: dict[str, Row]) -> None:
        """Put changed conversations among the parts: of each, a value for each column; None: it stays."""
        if not changed:
            return
        self.version += 1
        ids = pa.array(changed, pa.string())
        for place, part in enumerate(self._parts):
            known = pc.is_in(part["request_id"], ids)
            if pc.any(known).as_py():
                for row in part.filter(known).to_pylist():
                    before = list(row.values())
                    merge(before, changed[row["request_id"]])
                    changed[row["request_id"]] = before
                self._parts[place] = part.filter(pc.invert(known))
        self._parts = [part for part in self._parts if len(part)]
        made = table_of(list(changed.values()))
        self._touched.update(made["uid"].to_pylist())
        self._append(made)

    def _append(self, table: pa.Table) -> None:
        if self._parts and len(self._parts[-1]) + len(table) <= _PART:
            table = pa.concat_tables([self._parts.pop(), table]).combine_chunks()
        self._parts.append(table)

    def _read_joins(self) -> None:
        """Enter what the trainer made of the conversations; of one that two joins have, the later start's counts."""
        known, starts = set(self._joins), None
        paths = [path for path in (self.folder / FOLDER).glob("*.parquet") if path.name not in known]
        found: list[pa.Table] = []
        for path in sorted(paths, key=lambda path: (parse_name(path.name) or ("",))[::-1]):
            name = parse_name(path.name)
            starts = self._records.starts(self.folder) if starts is None else starts
            if name is None or not is_of(name, starts):
                self._fault(f"{path}: {refusal(name)}")
                continue
            self._joins.append(path.name)
            try:
                with open_join(path, name) as file:
                    table = pq.read_table(file, columns=list(_OF_JOIN), partitioning=None)
                found.append(_joined(table.filter(pc.is_valid(table["request_id"])), len(self._joins) - 1))
            except (OSError, ValueError, KeyError, pa.ArrowException) as error:
                self._fault(f"{path}: the join is left out, it cannot be read ({first_line(error)})")
            if sum(len(each) for each in found) >= _PART:
                self._put_joined(found)
                found = []
        if found:
            self._put_joined(found)

    def _put_joined(self, found: list[pa.Table]) -> None:
        """Put joins among the parts; of a conversation that two have, the last one counts."""
        self.version += 1
        joined = pa.concat_tables(found[::-1]).combine_chunks()
        left = pa.array([True] * len(joined))
        for place, part in enumerate(self._parts):
            at = pc.index_in(part["request_id"], joined["request_id"])
            known = pc.is_valid(at)
            if not pc.any(known).as_py():
                continue
            left = pc.and_(left, pc.invert(pc.is_in(joined["request_id"], part["request_id"])))
            for name in _GIVEN:
                values = pc.if_else(known, joined[name].take(at), part[name]).combine_chunks()
                part = part.set_column(part.schema.get_field_index(name), SCHEMA.field(name), values)
            self._parts[place] = part
        rest = joined.filter(left)
        if len(rest):
            columns = [rest[name] if name in rest.column_names else pa.nulls(len(rest), kind) for name, kind in COLUMNS]
            self._append(pa.table(columns, SCHEMA))


def _joined(rows: pa.Table, number: int) -> pa.Table:
    """Return what a join has of its conversations, a row for each: the columns `_GIVEN` and its names."""
    names = [name for name in _OF_JOIN if name not in ("request_id", "trained")]
    first = rows.sort_by([("row", "ascending")]).group_by("request_id", use_threads=False)
    found = first.aggregate([*((name, "first") for name in names), ("trained", "sum")])
    made = {name: found[f"{name}_first"] for name in names} | {"request_id": found["request_id"]}
    made |= {"trained_step": made.pop("step"), "trained_tokens": found["trained_sum"]}
    made |= {"join": pa.array([number] * len(found)), "why": pa.array([""] * len(found))}
    made["untrained"] = pc.fill_null(made["untrained"], "")
    trained = pc.if_else(pc.greater(pc.fill_null(made["trained_tokens"], 0), 0), "trained", "untrained")
    spared = pc.is_in(made["untrained"], pa.array(schema.SPARED))
    trained = pc.if_else(pc.and_(pc.equal(trained, "untrained"), spared), "spared", trained)
    made["fate"] = pc.if_else(pc.fill_null(made["validation"], False), "validated", trained)
    kept = [field for field in SCHEMA if field.name in made]
    return pa.table([made[field.name].cast(field.type) for field in kept], pa.schema(kept))


_TOLD = ["request_id", "uid", "number", "validation", "step", "began", "ended", "event", "said", "file", "join", "fate"]
_TOLD += ["trained_step", "trained_tokens", "untrained", "why"]


def _undecided(part: pa.Table, everywhere: bool, touched: pa.Array) -> pa.ChunkedArray:
    """Return which rows have a fate that their group's new lines, or another group, a step or the run's end decide."""
    found = pc.is_in(part["uid"], touched)
    if everywhere:
        decided = pc.is_in(part["fate"], pa.array(["raised", "cut", "evicted", "filtered", "discarded", "failed"]))
        found = pc.or_(found, pc.invert(decided))
    return pc.and_(pc.is_null(part["join"]), found)


def _joined_row(row: dict[str, Any], start: str) -> dict[str, Any]:
    made = {name: row[name] for name in ("request_id", "uid", "number", "validation", "untrained")}
    return made | {"start": start, "step": row["trained_step"], "trained": row["trained_tokens"], "row": 0}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _lines(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield position and text of each whole line from a position on."""
    with path.open("rb") as file:
        file.seek(start)
        at, rest = start, b""
        while block := file.read(_BLOCK):
            block = rest + block
            lines = block.split(b"\n")
            rest = lines.pop()
            for line in lines:
                yield at, line + b"\n"
                at += len(line) + 1

"""`Index`: a row for each conversation that was begun, kept as a Parquet file beside the records and read in memory.

Invariants:
- the index holds nothing that the records do not: it may be deleted, and is built anew where it is older than this code
  or than a file that became shorter;
- only what was appended since is read: lines from where they were left, joins that are new;
- a torn or strange line costs that line, and is told as a fault.

The columns of a conversation come from its lines, those of `JOIN` from the trainer's joins.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verl_multiturn.errors import ConfigError
from verl_multiturn.records import schema
from verl_multiturn.records.fates import fates
from verl_multiturn.records.files import LINES as LINES_END
from verl_multiturn.records.files import STEPS, RecordFile
from verl_multiturn.records.joins import parse_name
from verl_multiturn.records.lines import defaults
from verl_multiturn.records.reader import Placed, Records
from verl_multiturn.records.summaries import summary_of

NAME = "view-index.parquet"
_VERSION = "1"
_PART = 100_000
"""Rows of one part. Only parts that change are copied."""
_SLICE = 100_000
"""Lines that are read at a time."""
_BLOCK = 16_000_000

_TEXT, _INT, _REAL, _BOOL = pa.string(), pa.int32(), pa.float64(), pa.bool_()
LINES = [
    ("request_id", _TEXT), ("uid", _TEXT), ("number", _INT), ("validation", _BOOL), ("step", _INT),
    ("rerolled_from", _TEXT), ("began", _REAL), ("ended", _REAL), ("event", _TEXT), ("why", _TEXT),
    ("data_source", _TEXT), ("index", _TEXT), ("stop_reason", _TEXT), ("valid", _BOOL), ("rows", _INT),
    ("turns", _INT), ("calls", _INT), ("failed_calls", _INT), ("prompt_tokens", _INT), ("response_tokens", _INT),
    ("sampled_tokens", _INT), ("seconds", _REAL), ("generate_s", _REAL), ("tools_s", _REAL), ("interaction_s", _REAL),
    ("score", _REAL), ("file", _INT), ("offset", pa.int64()), ("place", _INT),
]  # fmt: skip
JOIN = [
    ("trained_step", _INT), ("update", _INT), ("trained_tokens", _INT), ("untrained", _TEXT), ("group_mean", _REAL),
    ("group_std", _REAL), ("join", _INT), ("fate", _TEXT),
]  # fmt: skip
SCHEMA = pa.schema(LINES + JOIN)
HIDDEN = ("file", "offset", "place", "join", "event")
"""Columns that say where a conversation is stored; no table shows them."""
_COLUMNS = LINES + JOIN
_WIDTH = len(_COLUMNS)
_AT = {name: at for at, (name, _) in enumerate(_COLUMNS)}
_NAMES = [name for name, _ in LINES[:6]]
# A line has no entry that has its default.
_OF_LINE, _OF_SUMMARY = defaults(schema.Line), defaults(schema.Summary)
"""Columns that every line has."""
_FIRST, _SUMMARY = 10, [name for name, _ in LINES[10:25]]
"""Columns of a summary, and where they begin."""
_VALIDATION, _BEGAN, _ENDED, _EVENT, _WHY = (_AT[name] for name in ("validation", "began", "ended", "event", "why"))
_INDEX, _SCORE, _FILE, _OFFSET, _PLACE, _JOIN, _FATE = (
    _AT[name] for name in ("index", "score", "file", "offset", "place", "join", "fate")
)
_OF_JOIN = (
    "request_id", "uid", "number", "row", "validation", "step", "update", "score", "trained", "untrained", "group_mean",
    "group_std",
)  # fmt: skip
_GIVEN = [*(name for name, _ in JOIN), "score", "why"]
"""Columns that a join decides."""
_UIDS = 20_000
"""Groups whose fates are looked for at a time."""
_OVER = ("end", "drop")
_WORTH = {"begin": 0, "score": 1, "end": 2, "drop": 2, "cancel": 2, "raise": 2}


class Index:
    """The conversations of one folder of records.

    Args:
        records: The folder's records.
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
        self._steps = -1
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
        for path in sorted(self.folder.glob(f"*{LINES_END}")):
            with contextlib.suppress(OSError):
                self._read_lines(path)
        with contextlib.suppress(ConfigError):  # a file that went away meanwhile
            self._read_alone()
        known = set(self._joins)
        joins = [path for path in (self.folder / "join").glob("*.parquet") if path.name not in known]
        self._read_joins([path for path in joins if parse_name(path.name) is not None])
        steps = _size(self.folder / STEPS)
        if self.version != before or steps != self._steps:
            self._steps = steps
            self._find_fates()
            self.version += 1
        return self.version != before

    def save(self) -> None:
        """Write the index beside the records; where that cannot be, it stays in memory."""
        state: dict[str, Any] = {"version": _VERSION, "read": self._read, "files": self._files, "joins": self._joins}
        state |= {"steps": self._steps, "looked": self._looked}
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
        self._steps, self._looked = state["steps"], state["looked"]

    def _read_lines(self, path: Path) -> None:
        start = self._read.get(path.name, 0)
        if path.stat().st_size <= start:
            return
        number = self._number(path.name.removesuffix(LINES_END))
        changed: dict[str, list[Any]] = {}
        name, count = path.name, 0
        for at, text in _lines(path, start):
            self._read[name] = at + len(text)
            try:
                _enter(changed, orjson.loads(text), number)
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
            size, has_lines = _size(file.path), file.is_packed and file.lines.exists()
            if self._looked.get(file.path.name) == size or (has_lines and file.stem in self._seen):
                continue
            self._looked[file.path.name] = size
            self._seen.add(file.stem)
            number = self._number(file.stem)
            found = self._behind(file, number) if has_lines else list(self._records.placed(file))
            changed: dict[str, list[Any]] = {}
            for placed in found:
                _enter_record(changed, placed, number)
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

    def _find_fates(self) -> None:
        """Enter the fates that neither a join nor a line alone says."""
        open_ids = pa.concat_tables([_undecided(part) for part in self._parts]) if self._parts else SCHEMA.empty_table()
        uids = pc.unique(open_ids["uid"])
        if not len(uids):
            return
        steps, runs = [*self._records.steps(), *self._records.ends()], self._records.runs
        starts = [name.start if (name := parse_name(join)) else "" for join in self._joins]
        for first in range(0, len(uids), _UIDS):
            some = uids.slice(first, _UIDS)
            rows = [
                row
                for part in self._parts
                for row in part.filter(pc.is_in(part["uid"], some)).select(_TOLD).to_pylist()
            ]
            joined = [_joined_row(row, starts[row["join"]]) for row in rows if row["join"] is not None]
            lines = (line for row in rows for line in self._lines_again(row))
            before = {row["request_id"]: row for row in rows if row["join"] is None}
            changed = {}
            for fate in fates(lines, steps, joined, runs):
                row = before.get(fate.request_id)
                if row is not None and (row["fate"], row["why"] or "") != (fate.fate, fate.why):
                    entry: list[Any] = [None] * _WIDTH
                    entry[0], entry[_FATE], entry[_WHY] = fate.request_id, fate.fate, fate.why
                    changed[fate.request_id] = entry
            self._put(changed)

    def _lines_again(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the lines that a row was made of, as far as fates read them."""
        names = ("request_id", "uid", "number", "validation", "step")
        line = {name: row[name] for name in names} | {"why": row["why"]}
        line["file"] = "" if row["file"] is None else self._files[row["file"]]
        if row["began"] is not None:
            yield {**line, "event": "begin", "at": row["began"]}
        if row["event"] != "begin":
            yield {**line, "event": row["event"], "at": row["ended"]}

    def _put(self, changed: dict[str, list[Any]]) -> None:
        """Put changed conversations among the parts: of each, a value for each column; None: it stays."""
        if not changed:
            return
        self.version += 1
        ids = pa.array(changed, _TEXT)
        for place, part in enumerate(self._parts):
            known = pc.is_in(part["request_id"], ids)
            if pc.any(known).as_py():
                for row in part.filter(known).to_pylist():
                    before = list(row.values())
                    _merge(before, changed[row["request_id"]])
                    changed[row["request_id"]] = before
                self._parts[place] = part.filter(pc.invert(known))
        self._parts = [part for part in self._parts if len(part)]
        self._append(_table(list(changed.values())))

    def _append(self, table: pa.Table) -> None:
        if self._parts and len(self._parts[-1]) + len(table) <= _PART:
            table = pa.concat_tables([self._parts.pop(), table]).combine_chunks()
        self._parts.append(table)

    def _read_joins(self, paths: list[Path]) -> None:
        """Enter what the trainer made of the conversations; of one that two joins have, the later start's counts."""
        found = []
        for path in sorted(paths, key=lambda path: (parse_name(path.name) or ("",))[::-1]):
            self._joins.append(path.name)
            try:
                table = pq.read_table(path, columns=list(_OF_JOIN), partitioning=None)
                found.append(_joined(table.filter(pc.is_valid(table["request_id"])), len(self._joins) - 1))
            except (OSError, ValueError, KeyError, pa.ArrowException) as error:
                self.faults[f"{path}: the join is left out, it cannot be read ({_first(error)})"] = None
        if not found:
            return
        self.version += 1
        joined = pa.concat_tables(found[::-1]).combine_chunks()
        parts = []
        for part in self._parts:
            at = pc.index_in(part["request_id"], joined["request_id"])
            known = pc.is_valid(at)
            if pc.any(known).as_py():
                for name in _GIVEN:
                    values = pc.if_else(known, joined[name].take(at), part[name])
                    part = part.set_column(part.schema.get_field_index(name), SCHEMA.field(name), values)
            parts.append(part.combine_chunks())
        self._parts = parts
        left = joined.filter(pc.invert(pc.is_in(joined["request_id"], self.table["request_id"])))
        if len(left):
            self._append(
                pa.table(
                    [left[name] if name in left.column_names else pa.nulls(len(left), kind) for name, kind in _COLUMNS],
                    SCHEMA,
                )
            )


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


def _merge(own: list[Any], changes: list[Any]) -> None:
    """Change a row; what a join said of the score stays."""
    score, event = own[_SCORE], own[_EVENT]
    joined = own[_JOIN] is not None
    for at, value in enumerate(changes):
        if value is not None:
            own[at] = value
    if joined:
        own[_SCORE] = score
    if event not in (None, "begin"):
        own[_EVENT] = event


def _enter(changed: dict[str, list[Any]], line: dict[str, Any], file: int) -> None:
    """Enter a line among changed conversations."""
    request_id, event, at = line["request_id"], line["event"], float(line["at"])
    score = line.get("score") if event == "score" else None
    number = None if score is None else float(score)
    row = changed.get(request_id)
    if row is None:
        row = changed[str(request_id)] = [None] * _WIDTH
        row[: len(_NAMES)] = [line.get(name, _OF_LINE.get(name)) for name in _NAMES]
        row[_VALIDATION], row[_FILE] = bool(row[_VALIDATION]), file
    if event == "begin":
        row[_BEGAN] = at
        row[_EVENT] = row[_EVENT] or event
    elif event == "score":
        row[_SCORE] = number
    elif row[_EVENT] in (None, "begin"):
        row[_ENDED], row[_EVENT], row[_WHY] = at, event, line.get("why") or ""
        if event in _OVER:
            row[_OFFSET], row[_PLACE] = line.get("offset"), line.get("place")
            if (summary := line.get("summary")) is not None:
                _summarize(row, {**_OF_SUMMARY, **summary})


def _enter_record(changed: dict[str, list[Any]], placed: Placed, file: int) -> None:
    """Enter a record without a line among changed conversations."""
    record = placed.record
    row = changed[record["request_id"]] = [None] * _WIDTH
    row[: len(_NAMES)] = [record[name] for name in _NAMES]
    row[_BEGAN], row[_ENDED], row[_EVENT], row[_WHY] = record["began"] or None, record["ended"] or None, "end", ""
    row[_FILE], row[_OFFSET], row[_PLACE] = file, placed.offset, placed.place
    _summarize(row, summary_of(record))


def _summarize(row: list[Any], summary: dict[str, Any]) -> None:
    row[_FIRST : _FIRST + len(_SUMMARY)] = [summary.get(name) for name in _SUMMARY]
    if (index := row[_INDEX]) is not None and not isinstance(index, str):
        row[_INDEX] = orjson.dumps(index).decode()


_TOLD = ["request_id", "uid", "number", "validation", "step", "began", "ended", "event", "why", "file", "join", "fate"]
_TOLD += ["trained_step", "trained_tokens", "untrained"]


def _undecided(part: pa.Table) -> pa.Table:
    """Return the rows whose fate another conversation, a step or the run's end may decide."""
    decided = pc.is_in(part["fate"], pa.array(["raised", "cut", "lost", "evicted", "filtered", "discarded", "failed"]))
    return part.filter(pc.and_(pc.is_null(part["join"]), pc.invert(decided)))


def _joined_row(row: dict[str, Any], start: str) -> dict[str, Any]:
    made = {name: row[name] for name in ("request_id", "uid", "number", "validation", "untrained")}
    return made | {"start": start, "step": row["trained_step"], "trained": row["trained_tokens"], "row": 0}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _table(rows: list[list[Any]]) -> pa.Table:
    """Return rows as a table; a value of another type is left out."""
    columns = []
    for field, values in zip(SCHEMA, zip(*rows, strict=True), strict=True):
        try:
            columns.append(pa.array(values, field.type))
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            columns.append(pa.array([_fit(value, field.type) for value in values], field.type))
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _fit(value: Any, kind: pa.DataType) -> Any:
    """Return a value as a column's type has it; None where it has none."""
    try:
        if pa.types.is_floating(kind) and isinstance(value, str):
            value = float(value)  # `nan`, `inf`
        if pa.types.is_string(kind) and value is not None:
            value = value if isinstance(value, str) else str(value)
        return pa.scalar(value, kind).as_py()
    except (pa.ArrowException, ValueError, TypeError, OverflowError, UnicodeError):
        return None


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


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

"""`Records`: a run's data on disk, as plain dictionaries of `schema`.

Invariants:
- an unreadable part loses itself alone, and adds one sentence to `faults` that names the file and the offset;
- each yielded value fits its model, even from a file of another program;
- a conversation is yielded once, however many files of the folders have it;
- only plain files are read, and none that lies elsewhere;
- a cancelled conversation is yielded by none of the methods that yield all: `record` and `record_at` return its record;
- a record that was written and is read back equals the one in memory (`read_back`).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from verl_multiturn.config import with_derived
from verl_multiturn.describe import one_line, show
from verl_multiturn.errors import CertificateError, ConfigError
from verl_multiturn.paths import read_regular
from verl_multiturn.records import schema
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.read import joins
from verl_multiturn.records.read.contradictions import are_close, score_fault
from verl_multiturn.records.read.files import (
    LINES,
    OPEN,
    SESSIONS,
    STEPS,
    RecordFile,
    beside,
    folder_of,
    names_in,
    record_files,
)
from verl_multiturn.records.read.lines import alone_if_large, fitted, read_lines, read_object, require_schema
from verl_multiturn.records.read.members import Member, member_at, read_members
from verl_multiturn.records.read.repeats import Repeats
from verl_multiturn.records.read.sessions import LiveSession, SessionIndex
from verl_multiturn.records.rows import checked
from verl_multiturn.records.summaries import HAS_RECORD, ends_of, summary_of
from verl_multiturn.records.write.locks import is_held

_LOG = logging.getLogger(__name__)
_OF_A_RUN = ("run-*.json", f"*{LINES}", f"*{SESSIONS}", STEPS, "join/*.parquet")
"""Files of a run that a folder may hold beside files of records."""


class StoredRecord(NamedTuple):
    """A record, and where it is."""

    record: dict[str, Any]
    path: Path
    offset: int
    """Position of its gzip member in the file; in a file that is not packed, of its line."""
    place: int
    """Number of the record in its member."""


class Records:
    """The records of one run or of several.

    Files are read as they are when a method is called, so that a run may still be writing them.

    Args:
        folders: Folders of records, run folders that have one called `records`, or single files, with their lines and
            the file of their run beside them. The trainer's side is that of a folder alone.

    Raises:
        ConfigError: One of them does not exist.
    """

    def __init__(self, *folders: str | Path) -> None:
        # A user may name a single file by a link.
        found = [folder_of(Path(folder)) for folder in folders]
        self.folders = [Path(os.path.realpath(each)) if each.is_file() else each for each in found]
        for folder in self.folders:
            record_files(folder)
        self.forget()

    def forget(self) -> None:
        """Forget all data read: the files were replaced, and faults of the old ones do not apply to them."""
        self._faults: dict[str, None] = {}
        self._sessions = SessionIndex(*self.folders)
        self._repeats = Repeats()
        self._places: dict[str, tuple[str, int, int]] = {}

    def require(self) -> Records:
        """Return these records, if each folder holds something of a run.

        Raises:
            ConfigError: One holds nothing, or is a file of which nothing can be read.
        """
        for folder in self.folders:
            if folder.is_dir() and not record_files(folder) and not any(any(folder.glob(each)) for each in _OF_A_RUN):
                raise ConfigError(f"{str(folder)!r} holds no records; name a run's folder or its record_dir")
            if not folder.is_dir() and not RecordFile(folder).has_lines:
                self._require_file(RecordFile(folder))
        return self

    def _require_file(self, file: RecordFile) -> None:
        """Refuse a file of which nothing can be read; an empty one, as a killed process leaves it, can."""
        alone = Records(file.path)
        if next(alone._read(file), None) is None and alone._faults:
            raise ConfigError(f"{next(iter(alone._faults))}; name a file of records, or a folder of them")

    @property
    def faults(self) -> list[str]:
        """Unreadable or odd parts so far: one sentence each, with the file and the offset."""
        return [*self._faults, *self._sessions.faults, *map(one_line, self._repeats.faults)]

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The run files, dictionaries as `schema.RunFile`, in the order of their starts."""
        found = list(self._run_files())
        fresh: dict[Path, list[str]] = {}
        for path, value in found:
            # A start that goes on from a checkpoint is ordinary, and so is one that adds to those before.
            if value["resumed_from"] is None and not _adds(value):
                fresh.setdefault(path.parent, []).append(value["start"])
        for folder, names in fresh.items():
            if len(names) > 1:
                what = "starts of a run that go on from no checkpoint"
                self._fault(folder, None, f"it holds {len(names)} {what}: {', '.join(names)}")
        return sorted((value for _, value in found), key=lambda run: run["began"])

    @property
    def evaluations(self) -> set[str]:
        """The starts of an evaluation or a gateway. Each of them adds to those before, and does nothing again."""
        return {str(run["start"]) for _, run in self._run_files() if _adds(run)}

    def _run_files(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        for path in self._files("run-*.json"):
            value = self._object(path, schema.RunFile)
            if value is None:
                continue
            if path.name != f"run-{value['start']}.json":
                what = f"by its content it is of the start {show(value['start'], 60)}"
                self._fault(path, None, f"it is left out: {what}")
                continue
            yield path, {**value, "settings": with_derived(value["settings"])}

    @property
    def files(self) -> list[RecordFile]:
        """The files of records: those with lines first, then in the order of their names."""
        found = [RecordFile(path) for folder in self.folders for path in record_files(folder)]
        return sorted(found, key=lambda file: not file.has_lines)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield all records, dictionaries as `schema.Record`, file by file."""
        for file in self.files:
            for placed in self.placed(file):
                yield placed.record

    def placed(self, file: RecordFile) -> Iterator[StoredRecord]:
        """Yield the records of a file with their places, and compare each with the summary in its line."""
        ends = ends_of(self._lines_of(file.lines)) if file.lines.exists() else None
        alone: list[int] = []
        differing: list[StoredRecord] = []
        seen: set[str] = set()
        for placed in self._finished(file):
            request_id = placed.record["request_id"]
            if self._repeats.is_again(request_id, file.path, file.stem):
                continue
            if request_id in seen:
                self._repeats.note_within(request_id, file.path)
                continue
            seen.add(request_id)
            yield placed
            if ends is None or not file.is_packed:
                continue
            line = ends.get((placed.offset, placed.place))
            if line is None:
                alone.append(placed.offset)
            elif line["request_id"] != placed.record["request_id"]:
                what = f"record {placed.place} is of request {placed.record['request_id']!r}, its line of"
                self._fault(file.path, placed.offset, f"{what} {line['request_id']!r}; the record is taken")
            elif line["summary"] != summary_of(placed.record):
                differing.append(placed)
        if alone:
            what = f"{len(alone)} records have no line of their end in {file.lines.name}; they are read all the same"
            self._fault(file.path, alone[0], what)
        if differing:
            request = differing[0].record["request_id"]
            what = f"{len(differing)} summaries in {file.lines.name} are not those of their records"
            self._fault(
                file.path, differing[0].offset, f"{what}, that of request {request!r} first; the records are taken"
            )
        if ends is None and file.is_packed:
            self._fault(file.path, None, f"{file.lines.name} is missing; conversations that left no record are unknown")

    def placed_from(self, file: RecordFile, start: int) -> Iterator[StoredRecord]:
        """Yield the records of a file from a member's offset on, but those that other files have."""
        for placed in self._finished(file, start):
            if not self._repeats.is_again(placed.record["request_id"], file.path, file.stem):
                yield placed

    def record(self, request_id: str) -> dict[str, Any]:
        """Return the record of a conversation.

        Raises:
            ConfigError: There is none.
        """
        if request_id not in self._places:
            self._places = {
                line["request_id"]: (line["file"], line["offset"], line["place"])
                for line in self.lines()
                if line["event"] in HAS_RECORD and line["offset"] is not None and line["place"] is not None
            }
        if (place := self._places.get(request_id)) is not None:
            found = self.record_at(*place)
            if found is not None and found["request_id"] == request_id:
                return found
        for record in self.records():
            if record["request_id"] == request_id:
                return record
        raise ConfigError(f"there is no record of request {show(request_id)}; take an id of the table of conversations")

    def record_at(self, file: str, offset: int, place: int) -> dict[str, Any] | None:
        """Return the record at a place that a line or a row of the index names; None: it cannot be read."""
        for each in self.files:
            if each.stem == file:
                found = [placed for placed in self._at(each, offset) if placed.place == place]
                return found[0].record if found else None
        return None

    def sessions(self) -> dict[str, LiveSession]:
        """Return a gateway's sessions by id, as far as they have a start; {} where no gateway wrote."""
        self._sessions.refresh()
        return {name: each for name, each in self._sessions.sessions.items() if each.file}

    def held(self) -> set[str]:
        """Return the stems of the files of sessions whose gateway runs."""
        return {path.name.removesuffix(SESSIONS) for path in self._sessions.files if is_held(path)}

    @property
    def session_files(self) -> list[Path]:
        """The files of a gateway's sessions, in the order of their names."""
        return self._sessions.files

    @property
    def line_files(self) -> list[Path]:
        """The files of lines, in the order of their names."""
        return self._files(f"*{LINES}")

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of all files, dictionaries as `schema.Line`; each has `file`, the stem of its files, too."""
        for path in self.line_files:
            stem = path.name.removesuffix(LINES)
            for line in self._repeats.once(self._lines_of(path), path, stem):
                yield {**line, "file": stem}

    @property
    def has_trainer(self) -> bool:
        """Return whether a trainer belongs to them: not where each start is an evaluation's or a gateway's."""
        return not self.runs or not all(_adds(run) for run in self.runs)

    def steps(self) -> list[dict[str, Any]]:
        """Return the trainer's steps and validations, dictionaries as `schema.StepLine`, in the order of writing."""
        found = []
        seen: set[tuple[str, int, str]] = set()
        for path, offset, line in self._step_lines(("step", "validation"), schema.StepLine):
            found.append(line)
            name = line["event"], line["step"]
            if (key := (*name, line["start"])) in seen:  # another start may do a step again
                self._fault(path, offset, f"{name[0]} {name[1]} of start {line['start']} is there twice")
            seen.add(key)
            if (join := line["join"]) is not None and join not in names_in(path.parent / joins.FOLDER):
                self._fault(path, offset, f"the join of {name[0]} {name[1]}, {show(line['join'])}, is missing")
        return found

    def ends(self) -> list[dict[str, Any]]:
        """Return the ends of starts, dictionaries as `schema.End`; a start that was killed has none."""
        return [line for _, _, line in self._step_lines(("end",), schema.RunEnd)]

    def clocks(self) -> list[dict[str, Any]]:
        """Return how far the workers' clocks are from the trainer's, dictionaries as `schema.Clock`."""
        return [line for _, _, line in self._step_lines(("clock",), schema.Clock)]

    def joined(self) -> pa.Table:
        """Return the rows of all joins as one table (`schema.JOINED`); of a conversation, those of its last join."""
        tables: list[pa.Table] = []
        seen: set[str] = set()
        for _, table in sorted(self.joins(), key=lambda joined: joins.order(joined[0]), reverse=True):
            found = set(table["request_id"].to_pylist()) - {None}
            if again := found & seen:
                table = table.filter(pc.invert(pc.is_in(table["request_id"], pa.array(again, pa.string()))))
            seen |= found
            tables.insert(0, joins.filled(table, schema.JOINED.names))
        for folder in self.folders:
            has_records, has_join = bool(record_files(folder)), any(folder.glob("join/*.parquet"))
            if has_join and not has_records:
                self._fault(folder / "join", None, "there are joins, and no records; tokens and texts are unknown")
            if has_records and not has_join and not any(folder.glob(f"*{SESSIONS}")):  # a gateway trains nothing
                self._fault(folder, None, "there are records, and no joins; what was trained and scored is unknown")
        return pa.concat_tables(tables) if tables else schema.JOINED.empty_table()

    def joins(self, columns: Sequence[str] | None = None) -> Iterator[tuple[joins.JoinName, pa.Table]]:
        """Yield the joins, see `joins.read`; a file that is not one, or of no start of the folder, is a fault."""
        for folder in self.folders:
            yield from joins.read(folder, self.starts(folder), self._fault_of, columns)

    def snapshots(self) -> list[dict[str, Any]]:
        """Return the snapshots of each worker's open conversations, dictionaries as `schema.Snapshot`, with `file`."""
        found = []
        for path in self._files(f"*{OPEN}"):
            value, stem = self._object(path, schema.Snapshot), path.name.removesuffix(OPEN)
            if value is not None:
                own = [each for each in value["open"] if not self._repeats.is_again(each["request_id"], path, stem)]
                found.append({**value, "open": own, "file": stem})
        return found

    def starts(self, folder: Path) -> frozenset[str]:
        """Return the starts that the run's files and steps of a folder name; none: they are not there."""
        if not folder.is_dir():
            return frozenset()
        runs = {run["start"] for _, run in self._run_files()}
        steps = self._step_lines(("step", "validation"), schema.StepLine)
        return frozenset(runs | {line["start"] for _, _, line in steps} | {line["start"] for line in self.ends()})

    def compare_scores(
        self, scores: Mapping[str, tuple[float | None, int]], joined: Iterable[Mapping[str, Any]]
    ) -> None:
        """Compare the scores of lines with those of joins; a fault names those that differ.

        Args:
            scores: By request id the score of its line, and the number of its rows.
            joined: The rows of all joins.
        """
        sums: dict[tuple[str, str, int], list[float]] = {}
        for row in joined:
            if row.get("score") is not None and row.get("otc_factor") in (None, 1.0):
                sums.setdefault((str(row["request_id"]), row["start"], row["step"]), []).append(row["score"])
        found: dict[str, None] = {}
        for (request_id, _, _), own in sums.items():
            score, rows = scores.get(request_id, (None, 1))
            if score is not None and len(own) == rows and not are_close(math.fsum(own), score):
                found[request_id] = None
        if found:
            folder = self.folders[0]
            self._faults[one_line(score_fault(folder, list(found)))] = None

    def _fault_of(self, path: Path, what: str) -> None:
        self._fault(path, None, what)

    def _fault(self, path: Path, offset: int | None, what: str) -> None:
        self._faults[one_line(f"{path}: {what}" if offset is None else f"{path}, offset {offset}: {what}")] = None

    def _files(self, pattern: str) -> list[Path]:
        found: list[Path] = []
        for folder in self.folders:
            if folder.is_dir():
                # A glob of a whole name leaves out a link that leads nowhere.
                found += sorted(folder.glob(pattern)) if "*" in pattern else [folder / pattern]
            else:
                found += [path for path in beside(RecordFile(folder)) if path.match(pattern)]
        return found

    def _object(self, path: Path, model: type[BaseModel]) -> dict[str, Any] | None:
        try:
            value = read_object(read_regular(path, within=path.parent))
            if "schema" in value:
                require_schema(value)
            return fitted(model, value)
        except (CertificateError, OSError) as error:
            self._fault(path, 0, f"it is left out: {error}")
            return None

    def _objects(self, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            for line in read_lines(path):
                try:
                    yield line.offset, read_object(line.text)
                except CertificateError as error:
                    self._fault(path, line.offset, f"a line is left out: {error}")
        except (CertificateError, OSError) as error:
            if os.path.lexists(path):
                self._fault(path, None, f"it cannot be read to its end: {error}")

    def _lines_of(self, path: Path) -> Iterator[dict[str, Any]]:
        for offset, value in self._objects(path):
            try:
                yield fitted(schema.ConversationLine, value)
            except CertificateError as error:
                # A wrong summary does not make the conversation unknown.
                try:
                    line = fitted(schema.ConversationLine, {**value, "summary": None})
                except CertificateError:
                    self._fault(path, offset, f"a line is left out: {error}")
                else:
                    self._fault(path, offset, f"a summary is left out: {error}")
                    yield line

    def _step_lines(
        self, events: tuple[str, ...], model: type[BaseModel]
    ) -> Iterator[tuple[Path, int, dict[str, Any]]]:
        for path in self._files(STEPS):
            for offset, value in self._objects(path):
                if value.get("event") not in events:
                    continue
                try:
                    yield path, offset, fitted(model, value)
                except CertificateError as error:
                    self._fault(path, offset, f"a line is left out: {error}")

    def _finished(self, file: RecordFile, start: int = 0) -> Iterator[StoredRecord]:
        """Yield the records of a file, from an offset on, but those of cancelled conversations."""
        return (placed for placed in self._read(file, start) if placed.record["status"] == "finished")

    def _read(self, file: RecordFile, start: int = 0) -> Iterator[StoredRecord]:
        """Yield the records of a file from an offset on."""
        try:
            if file.is_packed:
                for member in read_members(file.path, start):
                    yield from self._of_member(file.path, member)
            else:
                for line in read_lines(file.path, start):
                    yield from self._of_text(file.path, line.offset, 0, line.text)
        except (CertificateError, OSError) as error:
            self._fault(file.path, None, f"it cannot be read to its end: {error}")

    def _at(self, file: RecordFile, offset: int) -> Iterator[StoredRecord]:
        """Yield the records of one member, or the record of one line."""
        if not file.is_packed:
            yield from (placed for placed in self._read(file, offset) if placed.offset == offset)
            return
        try:
            yield from self._of_member(file.path, member_at(file.path, offset))
        except OSError as error:
            self._fault(file.path, offset, f"it cannot be read: {error}")

    def _of_member(self, path: Path, member: Member) -> Iterator[StoredRecord]:
        if member.lines is None:
            what = (
                f"a gzip member cannot be read: {member.problem}; its {member.end - member.offset} bytes are left out"
            )
            self._fault(path, member.offset, what)
            return
        for place, text in enumerate(member.lines):
            yield from self._of_text(path, member.offset, place, text)

    def _of_text(self, path: Path, offset: int, place: int, text: bytes) -> Iterator[StoredRecord]:
        try:
            with alone_if_large(len(text)):
                record = _in_form(read_object(text))
        except CertificateError as error:
            self._fault(path, offset, f"record {place} is left out: {error}")
        else:
            yield StoredRecord(record, path, offset, place)


def _adds(run: Mapping[str, Any]) -> bool:
    """Return whether a start adds to those before it: one of an evaluation, or of a gateway."""
    return "evaluation" in run["settings"] or "gateway" in run["settings"]


def read_back(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as `Records` yields it once it is on disk.

    Args:
        record: The result of `encode.record_of`.

    Raises:
        CertificateError: It does not fit the schema.
    """
    return fitted(schema.Record, read_object(line_of(dict(record))))


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file or a folder; unreadable parts are logged and skipped.

    Raises:
        ConfigError: There is no such file or folder.
    """
    records = Records(path)
    yield from records.records()
    for fault in records.faults:
        _LOG.warning("%s", fault)


def _in_form(value: dict[str, Any]) -> dict[str, Any]:
    """Return a record in the form of its model.

    Raises:
        CertificateError: It is not a record of our schema.
    """
    require_schema(value)
    record = fitted(schema.Record, value)
    for number, row in enumerate(record["rows"]):
        try:
            checked(row)
        except ValueError as error:  # a reader that makes columns of it would fail
            raise CertificateError(f"rows.{number}: {error}") from None
    return record

"""`Index`: the one table of a run, a row for each conversation that was begun, in memory and in the user's cache.

Invariants:
- the index holds nothing that the records do not: it may be deleted, and is checked against them before it is taken.
  It is built anew where it is older than this code, or a file's earlier content has changed (`cache.py`);
- only data appended since is read: lines from the last position, and new joins;
- a torn or strange line costs that line, and a conversation in two files counts once; a fault reports it.

The columns of a conversation come from its lines (`rows.py`), those of `JOIN` from the trainer's joins (`joins.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from verl_multiturn.describe import one_line
from verl_multiturn.errors import CertificateError, ConfigError
from verl_multiturn.records.index import cache
from verl_multiturn.records.index.cache import CacheFolderError, identity
from verl_multiturn.records.index.joins import OF_FATES, OF_JOIN, figures_of, joined, joined_row, oddities, undecided
from verl_multiturn.records.index.parts import RowParts, widened
from verl_multiturn.records.index.rows import (
    AGAIN,
    SCHEMA,
    Row,
    enter,
    enter_record,
    enter_session,
    fate_of,
    fate_row,
    file_of,
    summarize,
)
from verl_multiturn.records.index.sources import Sources
from verl_multiturn.records.read import joins
from verl_multiturn.records.read.contradictions import score_fault
from verl_multiturn.records.read.fates import fates, start_of, undone_joins
from verl_multiturn.records.read.files import LINES as LINES_END
from verl_multiturn.records.read.files import PACKED, STEPS, RecordFile
from verl_multiturn.records.read.joins import FOLDER, JoinName, is_of, no_join, parse_name, read_one, refusal
from verl_multiturn.records.read.lines import read_object
from verl_multiturn.records.read.records import Records, StoredRecord
from verl_multiturn.records.read.repeats import repeat_fault
from verl_multiturn.records.read.scores import each_once
from verl_multiturn.records.read.sessions import LiveSession

_VERSION = "9"
_SLICE = 100_000
"""Lines that are read at a time."""
_UIDS = 4_000
"""Groups whose fates are looked for at a time."""


class Index:
    """The conversations of one folder of records, or of one file.

    Args:
        records: The records of the folder.
    """

    def __init__(self, records: Records) -> None:
        (self.folder,) = records.folders
        self._place = self.folder if self.folder.is_dir() else self.folder.parent
        self._records = records
        self.version = 0
        """Grows with each change."""
        self.rebuilds = 0
        """Number of times that all files were read anew, because one had changed."""
        self._starts: tuple[list[Any], frozenset[str]] = [], frozenset()
        """The starts that the folder knows, and the files that name them."""
        self._of_files: dict[str, dict[str, None]] = {}
        """Faults of files of records, in the words of `Records`, by the file's name."""
        self._clear()
        self._open_file()

    def _clear(self) -> None:
        """Forget everything that was read."""
        self._faults: dict[str, None] = {}
        self._refused: dict[str, None] = {}
        """Faults of joins that may yet be taken: the file that names their start may come after them."""
        self._again: dict[tuple[Path, str], dict[str, None]] = {}
        """Conversations that are in two files: the file, and the one that has them first, and their request ids."""
        self._otherwise: dict[str, None] = {}
        """Conversations of which a join has another score than their lines."""
        self._odd: list[str] = []
        self._kept: dict[str, list[str]] = {}
        """The same as `_of_files`, of an index that was kept: of files that were not looked at since."""
        self._parts = RowParts()
        self._nameless: list[pa.Table] = []
        """Conversations that only joins know, of agent loops that give them no request id."""
        self._files: list[str] = []
        self._sources = Sources(self._place)
        self._joins: list[str] = []
        self._figures: list[dict[str, Any]] = []
        """Figures of the rows of each join; see `figures_of`."""
        self._told: list[Any] = []
        """Facts that decide the fates of groups without new lines; see `_teller`."""
        self._touched: set[str] = set()
        """Groups with new lines."""
        self._sessions: dict[str, LiveSession] = {}
        """A gateway's sessions, by request id, and what was known of each."""
        self._states: dict[str, tuple[Any, ...]] = {}
        self._looked: dict[str, Any] = {}
        self._seen: set[str] = set()

    @property
    def faults(self) -> dict[str, None]:
        """Faults, a sentence each: parts that could not be read, or were skipped."""
        odd = [repeat_fault(path, list(ids), home) for (path, home), ids in self._again.items()]
        odd += [score_fault(self.folder, list(self._otherwise))] if self._otherwise else []
        kept = [fault for own in self._kept.values() for fault in own]
        return self._faults | self._refused | dict.fromkeys([*kept, *map(one_line, [*odd, *self._odd])])

    @property
    def table(self) -> pa.Table:
        """Return all rows, those begun first first."""
        return self._parts.table

    @property
    def nameless(self) -> pa.Table:
        """Return the joins' rows of conversations without a request id, with the columns of `table`."""
        return pa.concat_tables(self._nameless) if self._nameless else SCHEMA.empty_table()

    def __len__(self) -> int:
        return len(self._parts)

    def stem(self, number: int) -> str:
        """Return the stem of the files of the writer that the column `file` names."""
        return self._files[number]

    def join(self, number: int) -> Path:
        """Return the join that the column `join` names."""
        return self.folder / FOLDER / self._joins[number]

    def figures(self) -> dict[JoinName, dict[str, Any]]:
        """Return the figures of each join's rows (`figures_of`); for a repeated step, those of the last time.

        A join that could not be read has no rows.
        """
        names = self._names()
        counting = joins.counting(names, self._records.evaluations)
        return {name: figures for name, figures in zip(names, self._figures, strict=True) if name in counting}

    def joins_of(self, step: int, validation: bool) -> list[Path]:
        """Return the joins that count for a step, or for the validation after it."""
        wanted = {name for name in self.figures() if (name.step, name.validation) == (step, validation)}
        return [self.join(number) for number, name in enumerate(self._names()) if name in wanted]

    def undone(self) -> list[int]:
        """Return the numbers of joins of steps that a later start did again, as the column `join` has them."""
        counting = self.figures()
        return [number for number, name in enumerate(self._names()) if name not in counting]

    def _names(self) -> list[JoinName]:
        """Return the names of the joins; only files that have one are taken."""
        return [name for name in map(parse_name, self._joins) if name is not None]

    def refresh(self) -> bool:
        """Read the data written since; return whether there was any."""
        before = self.version
        starts = self._starts_now()
        taken = [parse_name(name) for name in self._joins]
        gone = self._sessions.keys() - self._records.sessions().keys()
        if gone or self._sources.has_changed() or not all(name and is_of(name, starts) for name in taken):
            self._clear()
            self._of_files.clear()
            self._records.forget()
            self.version += 1
            self.rebuilds += 1
        for path in self._records.line_files:
            try:
                with self._noting(path.name):
                    self._read_lines(path)
            except OSError as error:
                self._fault(f"{path}: it cannot be read to its end: {error}")
        with contextlib.suppress(ConfigError):  # a file that went away meanwhile
            self._read_alone()
        self._read_joins(starts)
        self._read_sessions()
        told = self._teller()
        if self.version != before or told != self._told:
            steps, runs = [*self._records.steps(), *self._records.ends()], self._records.runs
            self._find_fates(told[2], told != self._told, steps, runs)
            undone = undone_joins(self._names(), steps, runs)
            self._parts.mark_undone([number for number, name in enumerate(self._names()) if name in undone])
            self._told, self._touched = told, set()
            self._odd = oddities(self.table, lambda number: self._place / f"{self._files[number]}{LINES_END}")
            self.version += 1
        return self.version != before

    def _starts_now(self) -> frozenset[str]:
        """Return the starts that the folder knows; its files are read where they have changed."""
        key = [identity(path) for path in [self._place / STEPS, *sorted(self._place.glob("run-*.json"))]]
        if key != self._starts[0]:
            self._starts = key, self._records.starts(self.folder)
        return self._starts[1]

    def _teller(self) -> list[Any]:
        """Return the run's steps, joins and starts, on which other conversations' fates depend."""
        runs = sorted(path.stem.removeprefix("run-") for path in self.folder.glob("run-*.json"))
        return [
            identity(self._place / STEPS),
            len(self._joins),
            sorted({start_of(stem, runs) for stem in self._files}),
            runs,
            sorted(self._records.held()),
        ]

    def save(self) -> str:
        """Keep the index in the user's cache, and return why it stays in memory; "": it is kept."""
        state: dict[str, Any] = {"version": _VERSION, "files": self._files, "joins": self._joins}
        state |= {"folder": os.path.realpath(self.folder), "told": self._told, "looked": self._looked}
        state["figures"] = self._figures
        state |= self._sources.state()
        state["faults"] = [list(self._faults), [[str(path), home, *ids] for (path, home), ids in self._again.items()]]
        state["odd"] = [self._odd, list(self._otherwise)]
        said = set(self._records.faults)  # one that counts conversations may have grown
        state["of_files"] = self._kept | {
            name: [*filter(said.__contains__, own)] for name, own in self._of_files.items()
        }
        try:
            cache.keep(self.folder, state, pa.concat_tables([self.table, self.nameless]))
        except CacheFolderError as error:
            return str(error)
        except OSError as error:
            return f"no index is kept: {error}"
        return ""

    def _open_file(self) -> None:
        """Take the index that was kept, if it is of the files as they are."""
        if (found := cache.kept(self.folder)) is None:
            return
        state, file = found
        sources = Sources(self._place)
        try:
            if state["version"] != _VERSION or state["folder"] != os.path.realpath(self.folder):
                return
            if not all(map(parse_name, state["joins"])) or len(state["figures"]) != len(state["joins"]):
                return
            if not sources.fits(state):
                return
            parts = [file.read_row_group(number).cast(SCHEMA) for number in range(file.num_row_groups)]
            files, told, looked, of_files = (state[name] for name in ("files", "told", "looked", "of_files"))
            faults, again = state["faults"]
            odd, otherwise = state["odd"]
            again = {(Path(path), home): dict.fromkeys(ids) for path, home, *ids in again}
            faults, otherwise = dict.fromkeys(faults), dict.fromkeys(otherwise)
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
            return
        parts = [part.replace_schema_metadata(None) for part in parts]
        mixed = [part for part in parts if part["request_id"].null_count]  # the last one at most
        named = [part.filter(pc.is_valid(part["request_id"])) for part in mixed]
        self._parts = RowParts([part for part in parts if not part["request_id"].null_count] + named)
        self._nameless = [part.filter(pc.is_null(part["request_id"])) for part in mixed]
        self._figures, self._sources = state["figures"], sources
        self._files, self._joins = files, state["joins"]
        self._told, self._looked, self._kept = told, looked, of_files
        self._odd, self._otherwise = odd, otherwise
        self._faults, self._again = faults, again

    def _fault(self, what: str) -> None:
        self._faults[one_line(what)] = None

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        """Note the faults that `Records` finds as a file's own: a reader of the kept index does not read the file."""
        before = set(self._records.faults)
        try:
            yield
        finally:
            new = (fault for fault in self._records.faults if fault not in before)
            self._of_files.setdefault(name, {}).update(dict.fromkeys(new))

    def _read_lines(self, path: Path) -> None:
        number = self._number(path.name.removesuffix(LINES_END))
        changed: dict[str, Row] = {}
        try:
            for count, (at, text) in enumerate(self._sources.lines(path.name), 1):
                try:
                    line = read_object(text)
                    if odd := enter(changed, line, number):
                        self._note_odd(odd, changed, line, path)
                except (CertificateError, ValueError, TypeError, KeyError, AttributeError) as error:
                    if text.strip():
                        self._fault(f"{path}, offset {at}: a line is left out: {error}")
                if count % _SLICE == 0:
                    self._put(changed)
                    changed = {}
        except CertificateError as error:
            self._fault(f"{path}: {error}")
        finally:
            self._put(changed)

    def _note_odd(self, odd: str, changed: dict[str, Row], line: Mapping[str, Any], path: Path) -> None:
        """Note a line that `enter` found odd, and enter the summary of a record whose line has none."""
        row, request_id, place = changed[line["request_id"]], line["request_id"], line.get("place") or 0
        if odd == AGAIN:
            self._note_again(request_id, file_of(row), file_of(row))
            return
        record = self._records.record_at(path.name.removesuffix(LINES_END), line["offset"], place)
        if record is not None and record["request_id"] == request_id:
            summarize(row, record)
            how = "it is made of its record"
        else:
            how = "its record cannot be read"
        self._fault(f"{path}: request {request_id!r} has no summary; {how}")

    def _number(self, stem: str) -> int:
        if stem not in self._files:
            self._files.append(stem)
        return self._files.index(stem)

    def _read_alone(self) -> None:
        """Read the records that have no line: all of a file without lines, and those behind the last line of one.

        A process that was killed may have written a member, and not its lines. So a file with lines is looked at once.
        """
        for file in self._records.files:
            own, has_lines = identity(file.path), file.has_lines
            if self._looked.get(file.path.name) == own or (has_lines and file.stem in self._seen):
                continue
            self._looked[file.path.name] = own
            self._seen.add(file.stem)
            number = self._number(file.stem)
            if not has_lines:
                self._sources.note(file.path.name)
            self._kept.pop(file.path.name, None)
            with self._noting(file.path.name):
                found = self._behind(file, number) if has_lines else list(self._records.placed(file))
            changed: dict[str, Row] = {}
            for placed in found:
                enter_record(changed, placed, number)
            self._put(changed)

    def _behind(self, file: RecordFile, number: int) -> list[StoredRecord]:
        last = (-1, -1)
        for part in self._parts.tables:
            own = part.filter(pc.and_(pc.equal(part["file"], number), pc.is_valid(part["offset"])))
            if len(own):
                best = pc.select_k_unstable(own, 1, sort_keys=[("offset", "descending"), ("place", "descending")])
                last = max(last, (own["offset"][best[0].as_py()].as_py(), own["place"][best[0].as_py()].as_py()))
        found = self._records.placed_from(file, max(last[0], 0))
        return [placed for placed in found if (placed.offset, placed.place) > last]

    def _find_fates(
        self, starts: Sequence[str], everywhere: bool, steps: list[dict[str, Any]], runs: list[dict[str, Any]]
    ) -> None:
        """Enter the fates that neither a join nor a line gives alone: of groups with new lines, or of all open ones.

        Args:
            starts: The starts whose files are there.
            everywhere: Whether the data that decides other groups' fates has changed.
            steps: The lines of `steps.jsonl`.
            runs: The runs' files.
        """
        touched = pa.array(self._touched, pa.string())
        open_ones = [part.filter(undecided(part, everywhere, touched))["uid"] for part in self._parts.tables]
        uids = pc.unique(pa.concat_arrays([pa.array([], pa.string()), *(each.combine_chunks() for each in open_ones)]))
        if not len(uids):
            return
        of_joins = [name.start for name in self._names()]
        others: dict[str, Any] = {"other_starts": [*starts, *of_joins], "has_joins": bool(self._joins)}
        others["held"] = self._records.held()
        for first in range(0, len(uids), _UIDS):
            some = uids.slice(first, _UIDS)
            rows = [
                row
                for part in self._parts.tables
                for row in part.filter(pc.is_in(part["uid"], some)).select(OF_FATES).to_pylist()
            ]
            joined = [joined_row(row, of_joins[row["join"]]) for row in rows if row["join"] is not None]
            lines = (line for row in rows for line in self._lines_again(row))
            before = {row["request_id"]: row for row in rows if row["join"] is None}
            own = {row["request_id"] for row in rows}
            others["sessions"] = {name: self._sessions[name] for name in own & self._sessions.keys()}
            changed = {}
            for fate in fates(lines, steps, joined, runs, **others):
                row = before.get(fate.request_id)
                if row is not None and fate_of(row) != fate:
                    changed[fate.request_id] = fate_row(fate)
            self._put(changed)

    def _lines_again(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the lines that a row was made of, as far as fates read them."""
        names = ("request_id", "uid", "number", "validation", "step")
        line = {name: row[name] for name in names} | {"why": row["said"] or ""}
        line["file"] = "" if row["file"] is None else self._files[row["file"]]
        if row["began"] is not None:
            yield {**line, "event": "begin", "at": row["began"]}
        if row["event"] != "begin":
            yield {**line, "event": row["event"], "at": row["ended"]}

    def _put(self, changed: dict[str, Row]) -> None:
        if changed:
            self.version += 1
            self._touched.update(self._parts.put(changed, self._note_row_again))

    def _note_row_again(self, row: Mapping[str, Any], new: Row) -> None:
        self._note_again(row["request_id"], row["file"], file_of(new))

    def _note_again(self, request_id: str, home: int, other: int) -> None:
        """Note a conversation that a file has, too.

        Args:
            request_id: Its request id.
            home: Number of the files that have it first.
            other: Number of the file.
        """
        stem = self._files[other]
        ends = (end for end in (LINES_END, PACKED, "") if (self._place / f"{stem}{end}").exists())
        path = self._place / f"{stem}{next(ends, '')}"
        named = str(path if home == other else self._place / self._files[home])
        self._again.setdefault((path, named), {})[request_id] = None

    def _read_sessions(self) -> None:
        """Enter a gateway's sessions and their rewards, which count before those of joins."""
        before, self._sessions = self._sessions, self._records.sessions()
        known = {name: each.state for name, each in self._sessions.items()}
        if new := [name for name, state in known.items() if name not in before or self._states.get(name) != state]:
            self._touched.update(self._sessions[name].task or "" for name in new)
            self.version += 1
        self._states = known
        changed: dict[str, Row] = {}
        for name in self._parts.missing(new):
            enter_session(changed, self._sessions[name])
        self._put(changed)
        rewards = {name: each.reward for name, each in self._sessions.items()}
        if self._parts.put_scores({name: reward for name, reward in rewards.items() if reward is not None}):
            self.version += 1

    def _read_joins(self, starts: frozenset[str]) -> None:
        """Enter the trainer's results for the conversations; where two joins have one, the later start's counts."""
        known, self._refused = set(self._joins), {}
        seen = set(map(parse_name, known))
        paths = [path for path in (self.folder / FOLDER).glob("*.parquet") if path.name not in known]
        found: list[pa.Table] = []
        for path in sorted(paths, key=lambda path: (parse_name(path.name) or ("",))[::-1]):
            name = parse_name(path.name)
            if name is None or name in seen or not is_of(name, starts):
                self._refused[one_line(f"{path}: {refusal(name, seen)}")] = None
                continue
            seen.add(name)
            self._joins.append(path.name)
            self._sources.note(f"{FOLDER}/{path.name}")
            self._figures.append({"rows": 0, "untrained": {}})
            try:
                rows = each_once(read_one(path, name, OF_JOIN))
            except joins.UNREADABLE as error:
                self._fault(f"{path}: {no_join(error)}")
                continue
            self._figures[-1] = figures_of(rows)
            found.append(joined(rows, len(self._joins) - 1))
            if sum(len(each) for each in found) >= cache.ROWS:
                self._put_joined(found)
                found = []
        if found:
            self._put_joined(found)

    def _put_joined(self, found: list[pa.Table]) -> None:
        """Put joins among the parts; of a conversation that two have, the last one counts."""
        self.version += 1
        joined = pa.concat_tables(found[::-1]).combine_chunks()
        is_named = pc.is_valid(joined["request_id"])
        self._otherwise |= dict.fromkeys(self._parts.put_joined(joined.filter(is_named)))
        nameless = joined.filter(pc.invert(is_named))
        if len(nameless):
            self._nameless.append(widened(nameless))

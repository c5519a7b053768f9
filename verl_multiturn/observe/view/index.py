"""`Index`: a row for each conversation that was begun, kept as a Parquet file in the user's cache and read in memory.

Invariants:
- the index holds nothing that the records do not: it may be deleted, and is built anew where it is older than this code
  or than a file that is not what it was, with more behind it (`index_cache.py`);
- only what was appended since is read: lines from where they were left, joins that are new;
- a torn or strange line costs that line, and a conversation that is in two files counts once; a fault says so.

The columns of a conversation come from its lines (`index_rows.py`), those of `JOIN` from the trainer's joins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verl_multiturn.describe import one_line
from verl_multiturn.errors import CertificateError, ConfigError
from verl_multiturn.observe.view.index_cache import (
    CacheFolderError,
    digest_of_begin,
    digest_of_end,
    identity,
    identity_of,
    kept_at,
    make_room,
)
from verl_multiturn.observe.view.index_joins import (
    GIVEN,
    OF_FATES,
    OF_JOIN,
    WHOLE,
    joined,
    joined_row,
    oddities,
    otherwise_scored,
    undecided,
    without_invalid,
)
from verl_multiturn.observe.view.index_rows import (
    COLUMNS,
    SCHEMA,
    Row,
    enter,
    enter_record,
    fate_row,
    file_of,
    is_again,
    merge,
    table_of,
)
from verl_multiturn.paths import open_regular
from verl_multiturn.records import joins
from verl_multiturn.records.fates import fates, start_of
from verl_multiturn.records.files import LINES as LINES_END
from verl_multiturn.records.files import STEPS, RecordFile
from verl_multiturn.records.joins import FOLDER, first_line, is_of, open_join, parse_name, refusal, table_in
from verl_multiturn.records.lines import LONGEST_LINE, read_object
from verl_multiturn.records.oddities import score_fault
from verl_multiturn.records.reader import Placed, Records
from verl_multiturn.records.repeats import repeat_fault

_VERSION = "6"
_PART = 100_000
"""Rows of one part. Only parts that change are copied."""
_SLICE = 100_000
"""Lines that are read at a time."""
_BLOCK = 16_000_000

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
        self._starts: tuple[list[Any], frozenset[str]] = [], frozenset()
        """The starts that the folder knows, and the files that say so."""
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
        self._parts: list[pa.Table] = []
        self._files: list[str] = []
        self._read: dict[str, int] = {}
        """Where the next line of a file begins, by the file's name; so with the next two."""
        self._digests: dict[str, hashlib._Hash] = {}
        """Digest of what is before it."""
        self._ends: dict[str, str] = {}
        """Digest of the end of that, which is looked at before more is read."""
        self._identities: dict[str, Any] = {}
        """Which file it was when it was read."""
        self._endless: set[str] = set()
        """Files that have a line which is too long."""
        self._joins: list[str] = []
        self._told: list[Any] = []
        """What decides the fates of groups without new lines; see `_teller`."""
        self._touched: set[str] = set()
        """Groups with new lines."""
        self._looked: dict[str, Any] = {}
        self._seen: set[str] = set()

    @property
    def faults(self) -> dict[str, None]:
        """What could not be read, or was left out: a sentence each."""
        odd = [repeat_fault(path, list(ids), home) for (path, home), ids in self._again.items()]
        odd += [score_fault(self.folder, list(self._otherwise))] if self._otherwise else []
        return self._faults | self._refused | dict.fromkeys(map(one_line, [*odd, *self._odd]))

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
        return self.folder / FOLDER / self._joins[number]

    def undone(self) -> list[int]:
        """Return the numbers of joins of steps that a later start did again, as the column `join` has them."""
        names = [parse_name(name) for name in self._joins]
        counting = joins.counting(filter(None, names), self._records.evaluations)
        return [number for number, name in enumerate(names) if name not in counting]

    def refresh(self) -> bool:
        """Read what was written since, and tell whether anything was."""
        before = self.version
        starts = self._starts_now()
        taken = [parse_name(name) for name in self._joins]
        if any(map(self._is_other, self._identities)) or not all(name and is_of(name, starts) for name in taken):
            self._clear()
            self.version += 1
        for path in self._records.line_files:
            try:
                self._read_lines(path)
            except OSError as error:
                self._fault(f"{path}: it cannot be read: {error}")
        with contextlib.suppress(ConfigError):  # a file that went away meanwhile
            self._read_alone()
        self._read_joins(starts)
        told = self._teller()
        if self.version != before or told != self._told:
            self._find_fates(told[2], everywhere=told != self._told)
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
        """Return what other conversations' fates hang on: the run's steps, joins and starts."""
        runs = sorted(path.stem.removeprefix("run-") for path in self.folder.glob("run-*.json"))
        return [
            identity(self._place / STEPS),
            len(self._joins),
            sorted({start_of(stem, runs) for stem in self._files}),
            runs,
        ]

    def save(self) -> str:
        """Keep the index in the user's cache, and return why it stays in memory; "": it is kept."""
        state: dict[str, Any] = {"version": _VERSION, "files": self._files, "joins": self._joins}
        state |= {"folder": os.path.realpath(self.folder), "told": self._told, "looked": self._looked}
        state["read"] = {
            name: [read, self._digests[name].hexdigest() if name in self._digests else self._kept_digests[name]]
            for name, read in self._read.items()
        }
        state |= {"identities": self._identities, "ends": self._ends}
        state["faults"] = [list(self._faults), [[str(path), home, *ids] for (path, home), ids in self._again.items()]]
        state["odd"] = [self._odd, list(self._otherwise)]
        table = self.table.replace_schema_metadata({"verl_multiturn": json.dumps(state)})
        try:
            kept = kept_at(self.folder)
            half = kept.with_name(f".{kept.stem}.{os.getpid()}")
            try:
                pq.write_table(table, half, compression="zstd", row_group_size=_PART)
                half.replace(kept)
            finally:
                half.unlink(missing_ok=True)
            make_room(kept)
        except CacheFolderError as error:
            return str(error)
        except OSError as error:
            return f"no index is kept: {error}"
        return ""

    def _open_file(self) -> None:
        self._kept_digests: dict[str, str] = {}
        try:
            kept = kept_at(self.folder)
            with open_regular(kept) as opened:
                file = pq.ParquetFile(opened)
                state = json.loads(file.schema_arrow.metadata[b"verl_multiturn"])
                if state["version"] != _VERSION or state["folder"] != os.path.realpath(self.folder):
                    return
                if not all(self._is_as_read(name, read, state["identities"]) for name, read in state["read"].items()):
                    return
                others = state["identities"].keys() - state["read"].keys()
                if any(identity(self._place / name) != state["identities"][name] for name in others):
                    return
                parts = [file.read_row_group(number).cast(SCHEMA) for number in range(file.num_row_groups)]
            kept.touch()
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
            return
        self._parts = [part.replace_schema_metadata(None) for part in parts]
        self._read = {name: read for name, (read, _) in state["read"].items()}
        self._kept_digests = {name: digest for name, (_, digest) in state["read"].items()}
        self._files, self._joins, self._identities = state["files"], state["joins"], state["identities"]
        self._ends = state["ends"]
        self._told, self._looked = state["told"], state["looked"]
        told, again = state["faults"]
        self._odd, self._otherwise = state["odd"][0], dict.fromkeys(state["odd"][1])
        self._faults = dict.fromkeys(told)
        self._again = {(Path(path), home): dict.fromkeys(ids) for path, home, *ids in again}

    def _is_as_read(self, name: str, kept: Sequence[Any], identities: dict[str, Any]) -> bool:
        """Tell whether a file of lines still begins with what was read of it."""
        with open_regular(self._place / name, within=self._place) as file:
            found = identity_of(os.fstat(file.fileno()))
            if found != identities[name]:
                read, digest = kept
                made = digest_of_begin(file, read)
                if file.tell() != read or made.hexdigest() != digest:
                    return False
                self._digests[name] = made
                identities[name] = found
        return True

    def _is_other(self, name: str) -> bool:
        """Tell whether another file stands under a name than the one that was read, or less of it."""
        found, before = identity(self._place / name), self._identities[name]
        if found is None:
            return True
        if found == before:
            return False
        if found[:2] != before[:2] or found[2] <= before[2] or name not in self._read:
            return True
        try:
            with open_regular(self._place / name, within=self._place) as file:
                return digest_of_end(file, self._read[name]) != self._ends[name]
        except OSError:
            return True

    def _fault(self, what: str) -> None:
        self._faults[one_line(what)] = None

    def _read_lines(self, path: Path) -> None:
        name = path.name
        if name in self._endless:
            return
        start = self._read.get(name, 0)
        with open_regular(path, within=self._place) as file:
            found = os.fstat(file.fileno())
            if found.st_size <= start:
                return
            self._identities[name] = identity_of(found)
            if name not in self._digests:
                self._digests[name] = digest_of_begin(file, start)
            self._enter_lines(path, file, start)
            self._ends[name] = digest_of_end(file, self._read.get(name, 0))

    def _enter_lines(self, path: Path, file: BinaryIO, start: int) -> None:
        number = self._number(path.name.removesuffix(LINES_END))
        changed: dict[str, Row] = {}
        count = 0
        for at, lines in _blocks(file, start):
            if lines is None:
                self._endless.add(path.name)
                self._fault(f"{path}: the line at byte {at} has more than {LONGEST_LINE} bytes; the rest is left out")
                break
            self._digests[path.name].update(lines)
            self._read[path.name] = at + len(lines)
            for text in lines.split(b"\n")[:-1]:
                try:
                    enter(changed, read_object(text), number)
                except (CertificateError, ValueError, TypeError, KeyError, AttributeError) as error:
                    if text.strip():
                        self._fault(f"{path}: the line at byte {at} is left out, it cannot be read ({error})")
                    at += len(text) + 1
                    continue
                at += len(text) + 1
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
            own, has_lines = identity(file.path), file.has_lines
            if self._looked.get(file.path.name) == own or (has_lines and file.stem in self._seen):
                continue
            self._looked[file.path.name] = own
            self._seen.add(file.stem)
            number = self._number(file.stem)
            if not has_lines:
                self._identities[file.path.name] = own
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
        open_ones = [part.filter(undecided(part, everywhere, touched))["uid"] for part in self._parts]
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
                for row in part.filter(pc.is_in(part["uid"], some)).select(OF_FATES).to_pylist()
            ]
            joined = [joined_row(row, of_joins[row["join"]]) for row in rows if row["join"] is not None]
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
                    before, new = list(row.values()), changed[row["request_id"]]
                    if is_again(before, new):
                        self._note_again(row, new)
                    else:
                        merge(before, new)
                    changed[row["request_id"]] = before
                self._parts[place] = part.filter(pc.invert(known))
        self._parts = [part for part in self._parts if len(part)]
        made = without_invalid(table_of(list(changed.values())))
        self._touched.update(made["uid"].to_pylist())
        self._append(made)

    def _note_again(self, row: Mapping[str, Any], new: Row) -> None:
        home, other = str(self._place / self._files[row["file"]]), str(self._place / self._files[file_of(new)])
        key = (Path(other), other if home == other else home)
        self._again.setdefault(key, {})[row["request_id"]] = None

    def _append(self, table: pa.Table) -> None:
        if self._parts and len(self._parts[-1]) + len(table) <= _PART:
            table = pa.concat_tables([self._parts.pop(), table]).combine_chunks()
        self._parts.append(table)

    def _read_joins(self, starts: frozenset[str]) -> None:
        """Enter what the trainer made of the conversations; of one that two joins have, the later start's counts."""
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
            self._identities[f"{FOLDER}/{path.name}"] = identity(path)
            try:
                with open_join(path, name) as file:
                    table = table_in(file, OF_JOIN)
                found.append(joined(table.filter(pc.is_valid(table["request_id"])), len(self._joins) - 1))
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
        left = pa.array([True] * len(joined), pa.bool_())
        for place, part in enumerate(self._parts):
            at = pc.index_in(part["request_id"], joined["request_id"])
            known = pc.is_valid(at)
            if not pc.any(known).as_py():
                continue
            self._otherwise |= dict.fromkeys(otherwise_scored(part, joined["score"].take(at), joined[WHOLE].take(at)))
            left = pc.and_(left, pc.invert(pc.is_in(joined["request_id"], part["request_id"])))
            for name in GIVEN:
                values = pc.if_else(known, joined[name].take(at), part[name]).combine_chunks()
                part = part.set_column(part.schema.get_field_index(name), SCHEMA.field(name), values)
            self._parts[place] = without_invalid(part)
        rest = joined.filter(left)
        if len(rest):
            columns = [rest[name] if name in rest.column_names else pa.nulls(len(rest), kind) for name, kind in COLUMNS]
            self._append(pa.table(columns, SCHEMA))


def _blocks(file: BinaryIO, start: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield position and text of whole lines from a position on, many at a time; None: a line is too long."""
    file.seek(start)
    at, size = start, 0
    parts: list[bytes] = []
    while block := file.read(_BLOCK):
        end = block.rfind(b"\n") + 1
        if end:
            lines = b"".join([*parts, block[:end]])
            yield at, lines
            at += len(lines)
            parts, size = [], 0
        parts.append(block[end:])
        size += len(block) - end
        if size > LONGEST_LINE:
            yield at, None
            return

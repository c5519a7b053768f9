"""`Documents`: what the page is told, as plain JSON. Server and export give the same.

meta      folders, starts of runs, columns, faults          table    a page of the index
run       steps, fates, findings                            record   a conversation whole, with the trainer's side
step      a step's timeline                                 open     what runs now
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_multiturn.describe import one_line, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.points import read_points
from verl_multiturn.observe.explain.explanation import explain
from verl_multiturn.observe.view.flips import flips_of
from verl_multiturn.observe.view.index import Index
from verl_multiturn.observe.view.index_rows import HIDDEN, differing
from verl_multiturn.observe.view.pieces import Pieces, find
from verl_multiturn.observe.view.query import parse
from verl_multiturn.observe.view.steps import step_document, steps_document
from verl_multiturn.observe.view.table import Table
from verl_multiturn.records.joins import first_line, open_join, parse_name
from verl_multiturn.records.json_text import plain
from verl_multiturn.records.reader import Records
from verl_multiturn.records.schema import JOINED

_BATCH = 64
"""Rows of a join that are read at a time, so that a large one does not fill the memory."""
_STEP = 2_000
"""The most conversations of a step's timeline."""
_EXPLAINED = 20_000
"""The most conversations in which findings and flipped rows are looked for: all their records are read."""
_ANEW_S = 60.0
EXCERPTS = ("question", "answer")
"""The names of the excerpts, as the page shows them."""
_EXCERPT = 120
"""Characters of an excerpt."""
_SETTINGS = ("settings", "tools", "interactions", "schemas", "template")


class Documents:
    """What is shown of some folders of records.

    Args:
        folders: Folders of records, of runs that have one named `records`, or single files.
        tokenizer: Folder of the tokenizer whose ids the records have; None: the one that the run's file names.

    Raises:
        ConfigError: A folder or file is not there, or the tokenizer cannot be read.
    """

    def __init__(self, folders: Sequence[Path], tokenizer: Path | None = None) -> None:
        self.records = Records(*folders)
        self.folders: list[Path] = self.records.folders
        self._each = [Records(folder) for folder in self.folders]
        self.indices = [Index(each) for each in self._each]
        self.table = Table(self.indices)
        self._pieces: dict[int, Pieces | None] = {}
        self._tokenizer = tokenizer
        self._faults: dict[str, None] = {}
        self._found: tuple[int, float, list[dict[str, Any]]] | None = None
        self._flips: tuple[int, dict[str, Any] | None] | None = None
        if tokenizer is not None:
            try:
                self._pieces = dict.fromkeys(range(len(self.folders)), Pieces(tokenizer))
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"--tokenizer {str(tokenizer)!r} cannot be read ({error}); name a folder with a tokenizer.json"
                ) from None

    def refresh(self) -> bool:
        """Read what was written since, and tell whether anything was."""
        changed = [index.refresh() for index in self.indices]
        return any(changed)

    def save(self) -> str:
        """Keep the indices in the user's cache, and return why they stay in memory; "": they are kept."""
        return next(filter(None, [index.save() for index in self.indices]), "")

    def meta(self) -> dict[str, Any]:
        """Return what is known before anything is asked for."""
        runs = [
            {**{name: value for name, value in run.items() if name not in _SETTINGS}, **_about(run), "dir": number}
            for number, each in enumerate(self._each)
            for run in each.runs
        ]
        return {
            "dirs": [_shown(folder) for folder in self.folders],
            "runs": runs,
            "columns": {field.name: _kind(field.type) for field in self.table.whole.schema if field.name not in HIDDEN},
            "excerpts": list(EXCERPTS),
            "count": len(self.table.whole),
            "texts": [self.pieces(number) is not None for number in range(len(self.folders))],
            "faults": self.faults(),
        }

    def faults(self) -> list[str]:
        """Return what could not be read, a sentence each."""
        found = dict(self._faults)
        for index, each in zip(self.indices, self._each, strict=True):
            found |= index.faults | dict.fromkeys(each.faults)
        return list(found)

    def page(self, where: str, sort: str, descending: bool, offset: int, limit: int) -> dict[str, Any]:
        """Return a page of the table.

        Raises:
            ConfigError: The filter cannot be read, or names what is not there.
        """
        total, rows = self.table.page(parse(where), sort, descending, offset, limit)
        excerpts = [excerpts_of(self._record(row)) for row in rows]
        return {"total": total, "rows": [_row(row) | own for row, own in zip(rows, excerpts, strict=True)]}

    def record(self, request_id: str) -> dict[str, Any] | None:
        """Return a conversation whole; None: none has this id."""
        row = self.table.find(request_id)
        if row is None:
            return None
        record = self._record(row)
        joined = self._joined(row)
        return self.document(row, record, joined) | {"pieces": self._pieces_of(row["dir"], [record])}

    def document(
        self, row: Mapping[str, Any], record: Mapping[str, Any] | None, joined: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return a conversation whole, without the texts of its ids."""
        return {
            "row": _row(row) | excerpts_of(record),
            "record": record,
            "joined": [plain(dict(each)) for each in joined],
        }

    def every(self, where: str) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None, list[dict[str, Any]]]]:
        """Yield row, record and joined rows of all conversations that a filter leaves, file by file.

        A row has its place in the index in the entry `at`.

        Raises:
            ConfigError: The filter cannot be read, or names what is not there.
        """
        rows = [{**row, "at": at} for at, row in enumerate(self.table.select(parse(where)).to_pylist())]
        joins: dict[tuple[int, int], dict[str, list[dict[str, Any]]]] = {}
        for row in rows:
            if row["join"] is not None:
                joins.setdefault((row["dir"], row["join"]), {})[row["request_id"]] = []
        for (number, join), wanted in joins.items():
            for each in self._read_join(self.indices[number].join(join), wanted):
                wanted[each["request_id"]].append(each)
        none = (1 << 31, 0, 0)
        rows.sort(
            key=lambda row: (
                row["dir"],
                *(none if row["offset"] is None else (row["file"], row["offset"], row["place"])),
            )
        )
        for row in rows:
            joined = joins[row["dir"], row["join"]][row["request_id"]] if row["join"] is not None else []
            yield row, self._record(row), joined

    def pieces(self, number: int) -> Pieces | None:
        """Return the texts of a folder's ids; None: its tokenizer is not on this machine."""
        if number not in self._pieces:
            self._pieces[number] = None
            for run in self._each[number].runs:
                path = find(str((run.get("tokenizer") or {}).get("path") or ""), self.folders[number])
                if path is not None:
                    with contextlib.suppress(OSError, ValueError):
                        self._pieces[number] = Pieces(path)
                        break
        return self._pieces[number]

    def run(self) -> dict[str, Any]:
        """Return steps, fates and settings of all folders, and the rows that flipped between evaluations."""
        made = []
        for number, each in enumerate(self._each):
            settings = [{name: run.get(name) for name in ("start", *_SETTINGS)} for run in each.runs]
            points = [
                plain(point.model_dump())
                for folder in each.folders
                for point in read_points(folder.parent, self._fault)
            ]
            steps = steps_document(self.table.whole, number, each.steps())
            made.append(steps | {"settings": settings, "evaluations": points})
        count = len(self.table.whole)
        if self._flips is None or self._flips[0] != count:
            self._flips = count, flips_of(self.folders) if count <= _EXPLAINED else None
        return {"dirs": made, "flips": self._flips[1]}

    def step(self, number: int, step: int, validation: bool, where: str = "") -> dict[str, Any]:
        """Return the timeline of a step or a validation, as the trainer's clock had it.

        Args:
            number: Number of the folder.
            step: Number of the step.
            validation: Whether the validation after it is meant.
            where: Filter that its conversations must hold, too.

        Raises:
            ConfigError: There is no such folder, or the filter cannot be read.
        """
        if not 0 <= number < len(self.folders):
            raise ConfigError(f"dir={number}: there is no such folder; expected 0 to {len(self.folders) - 1}")
        term = f"dir={number} validation={str(validation).lower()} {where}"
        rows = self.table.select(parse(f"{term} trained_step={step}")).to_pylist()
        basis = "trained"
        if not rows:
            rows, basis = self.table.select(parse(f"{term} trained_step=none step={step}")).to_pylist(), "begun"
        left_out = max(0, len(rows) - _STEP)
        rows = rows[:_STEP]
        lines = [line for line in self._each[number].steps() if line.get("step") == step]
        offsets = {clock["file"]: float(clock["offset_s"]) for clock in self._each[number].clocks()}
        pairs = []
        for row in rows:
            offset = 0.0 if row["file"] is None else offsets.get(self.indices[number].stem(row["file"]), 0.0)
            pairs.append((row, self._record(row), offset))
        kind = "validation" if validation else "step"
        made = step_document(step, pairs, [line for line in lines if line.get("event") == kind])
        return made | {"basis": basis, "left_out": left_out}

    def findings(self) -> dict[str, Any]:
        """Return what `verl-multiturn explain` finds, looked for anew at most once a minute.

        It reads all records, with readers of its own: another thread may ask for something else meanwhile.
        """
        count = len(self.table.whole)
        if count > _EXPLAINED:
            said = f"{count} conversations are too many to look for findings here; run verl-multiturn explain DIR"
            return {"findings": None, "said": said}
        if self._found is None or (self._found[0] != count and time.monotonic() - self._found[1] > _ANEW_S):
            found = [
                {**each.as_json(), "dir": number}
                for number, folder in enumerate(self.folders)
                for each in explain(Records(folder))
            ]
            self._found = count, time.monotonic(), found
        return plain({"findings": self._found[2], "said": ""})  # type: ignore[no-any-return]

    def open(self) -> dict[str, Any]:
        """Return what runs now, by the workers' snapshots."""
        made = []
        for number, each in enumerate(self._each):
            ended = {line["start"] for line in each.ends()}
            for shot in each.snapshots():
                over = shot["file"].split("-", 1)[0] in ended
                made.append({**shot, "dir": number, "over": over})
        return plain({"snapshots": made})  # type: ignore[no-any-return]

    def _record(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """Return the record of a row; None: there is none, or it cannot be read."""
        if row["offset"] is None:
            return None
        stem = self.indices[row["dir"]].stem(row["file"])
        found: dict[str, Any] | None = self._each[row["dir"]].record_at(stem, row["offset"], row["place"] or 0)
        if found is not None and found["request_id"] == row["request_id"]:
            self._correct(row, found)
            return found
        what = "cannot be read" if found is None else f"is that of {found['request_id']!r}"
        self._fault(f"{stem}, offset {row['offset']}: the record of {row['request_id']!r} {what}")
        return None

    def _correct(self, row: dict[str, Any], record: Mapping[str, Any]) -> None:
        """Correct what a row has of its line by its record, and say so: anybody may have written the line."""
        if found := differing(row, record):
            said = ", ".join(f"{name} {show(row[name], 60)} for {show(value, 60)}" for name, value in found.items())
            what = f"the line of request {row['request_id']!r} says {said}; the record is taken"
            self._fault(f"{self.indices[row['dir']].stem(row['file'])}, offset {row['offset']}: {what}")
            row.update(found)

    def _fault(self, what: str) -> None:
        self._faults[one_line(what)] = None

    def _joined(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        if row["join"] is None:
            return []
        return list(self._read_join(self.indices[row["dir"]].join(row["join"]), {row["request_id"]}))

    def _read_join(self, path: Path, wanted: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Yield the rows of a join that belong to some requests, by request and row."""
        asked, name = set(wanted), parse_name(path.name)
        try:
            if name is None:
                raise ValueError("it has no name of a join")
            with open_join(path, name) as opened:
                file = pq.ParquetFile(opened)
                names = [name for name in JOINED.names if name in file.schema_arrow.names]
                for group in range(file.num_row_groups):
                    ids = file.read_row_group(group, columns=["request_id"])["request_id"].to_pylist()
                    at = [place for place, each in enumerate(ids) if each in asked]
                    if not at:
                        continue
                    start, left = 0, set(at)
                    for batch in file.iter_batches(_BATCH, row_groups=[group], columns=names):
                        here = [place - start for place in left if start <= place < start + len(batch)]
                        if here:
                            yield from _with_arrays(batch.take(pa.array(sorted(here))))
                            left -= {place + start for place in here}
                        start += len(batch)
                        if not left:
                            break
        except (OSError, ValueError, pa.ArrowException) as error:
            self._fault(f"{path}: the join cannot be read ({first_line(error)})")

    def _pieces_of(self, number: int, records: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
        pieces = self.pieces(number)
        return None if pieces is None else pieces.of(ids_of(records))


def _with_arrays(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch; lists of numbers are arrays, which are written with as few digits as they have."""
    lists = [field.name for field in batch.schema if pa.types.is_list(field.type)]
    plain_columns = batch.select([name for name in batch.schema.names if name not in lists]).to_pylist()
    for at, row in enumerate(plain_columns):
        for name in lists:
            scalar = batch.column(name)[at]
            values = scalar.values.to_numpy(zero_copy_only=False) if scalar.is_valid else None
            row[name] = np.round(values.astype(np.float32), 5) if name == "entropy" and values is not None else values
        yield row


def ids_of(records: Iterable[Mapping[str, Any] | None]) -> set[int]:
    """Return all token ids of some records."""
    ids: set[int] = set()
    for record in records:
        for row in (record or {}).get("rows") or ():
            ids.update(row["ids"])
        for generation in (record or {}).get("generations") or ():
            ids.update(generation.get("ids") or ())
    return ids


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    return plain({name: value for name, value in row.items() if name not in HIDDEN and name != "at"})  # type: ignore[no-any-return]


def _about(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the name of a run, its model and the files of its rows; "": its settings do not say it."""
    settings = run.get("settings") or {}
    named = {"name": "trainer.experiment_name", "model": "actor_rollout_ref.model.path", "data": "data.train_files"}
    found = {}
    for name, path in named.items():
        value: Any = settings
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        values = value if isinstance(value, list) else [value]
        found[name] = ", ".join(str(each) for each in values if each is not None)
    return found


def _kind(kind: pa.DataType) -> str:
    if pa.types.is_string(kind):
        return "text"
    return "bool" if pa.types.is_boolean(kind) else "number"


def _shown(folder: Path) -> str:
    """Return the last parts of a folder's path: enough to tell runs apart, and no more of this machine."""
    parts = folder.resolve().parts[1:]
    return "/".join(parts[-2:]) if parts and parts[-1] == "records" else "/".join(parts[-1:])


def excerpts_of(record: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the beginning of the last user message of a conversation's data row, and of its last answer.

    Args:
        record: The record; None: there is none, and the excerpts are empty.
    """
    if record is None:
        return dict.fromkeys(EXCERPTS, "")
    messages, asked = record["messages"], record["asked"]
    return {"question": _last(messages[:asked], "user"), "answer": _last(messages[asked:], "assistant")}


def _last(messages: Iterable[Mapping[str, Any]], role: str) -> str:
    texts = [_text(each.get("content")) for each in messages if each.get("role") == role]
    words = " ".join((texts[-1] if texts else "").split())
    return words if len(words) <= _EXCERPT else f"{words[: _EXCERPT - 1]}…"


def _text(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""

"""`Documents`: the data of some folders for the viewer's page, as plain JSON. Server and export give the same.

meta        folders, starts of runs, columns, faults        table     a page of the index
run         each folder's run (`folder.py`), findings       record    a conversation whole, with the trainer's side
timeline    the waits of a step's conversations             open      running conversations
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from verl_multiturn.errors import ConfigError
from verl_multiturn.observe.documents.excerpts import EXCERPTS, excerpts_of
from verl_multiturn.observe.documents.flips import flips_of
from verl_multiturn.observe.documents.folder import SETTINGS, RunDocuments
from verl_multiturn.observe.documents.join_rows import joined_rows
from verl_multiturn.observe.documents.roles import roles_of
from verl_multiturn.observe.documents.steps import lines_of
from verl_multiturn.observe.documents.timeline import timeline
from verl_multiturn.observe.documents.token_text import Pieces, find
from verl_multiturn.observe.explain.explanation import explain
from verl_multiturn.records.index.query import parse
from verl_multiturn.records.index.rows import HIDDEN
from verl_multiturn.records.index.table import Table
from verl_multiturn.records.json_text import plain
from verl_multiturn.records.read.fates import start_of
from verl_multiturn.records.read.records import Records
from verl_multiturn.rows.reward_numbers import ROUNDING

_STEP = 2_000
"""The most conversations of a step's timeline."""
_EXPLAINED = 20_000
"""The most conversations in which findings and flipped rows are looked for: all their records are read."""
_ANEW_S = 60.0


class Documents:
    """The documents of some folders of records.

    Args:
        folders: Folders of records, of runs that have one named `records`, or single files.
        tokenizer: Folder of the tokenizer whose ids the records have; None: the one that the run's file names.

    Raises:
        ConfigError: A folder or file is not there, or the tokenizer cannot be read.
    """

    def __init__(self, folders: Sequence[Path], tokenizer: Path | None = None) -> None:
        self.records = Records(*folders)
        self.folders: list[Path] = self.records.folders
        self._each = [RunDocuments(Records(folder)) for folder in self.folders]
        self.table = Table([each.index for each in self._each])
        self._pieces: dict[int, Pieces | None] = {}
        self._tokenizer = tokenizer
        self._found: tuple[int, float, list[dict[str, Any]]] | None = None
        self._finding = threading.Lock()
        self._flips: tuple[int, dict[str, Any] | None] | None = None
        self._built = self._rebuilds()
        if tokenizer is not None:
            try:
                self._pieces = dict.fromkeys(range(len(self.folders)), Pieces(tokenizer))
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"--tokenizer {str(tokenizer)!r} cannot be read ({error}); name a folder with a tokenizer.json"
                ) from None

    def refresh(self) -> bool:
        """Read the data written since; return whether there was any."""
        changed = [each.refresh() for each in self._each]
        if (rebuilds := self._rebuilds()) != self._built:  # findings in the earlier files are no longer true
            self._built, self._found, self._flips = rebuilds, None, None
            self._pieces = self._pieces if self._tokenizer is not None else {}
        return any(changed)

    def _rebuilds(self) -> int:
        return sum(each.index.rebuilds for each in self._each)

    def save(self) -> str:
        """Keep the indices in the user's cache, and return why they stay in memory; "": they are kept."""
        return next(filter(None, [each.index.save() for each in self._each]), "")

    def meta(self) -> dict[str, Any]:
        """Return the data that is known before any request."""
        runs = [
            {**{name: value for name, value in run.items() if name not in SETTINGS}, **_about(run), "dir": number}
            for number, each in enumerate(self._each)
            for run in each.records.runs
        ]
        return {
            "dirs": [_shown(folder) for folder in self.folders],
            "runs": runs,
            "columns": {field.name: _kind(field.type) for field in self.table.whole.schema if field.name not in HIDDEN},
            "excerpts": list(EXCERPTS),
            "rounding": ROUNDING,
            "count": len(self.table.whole),
            "texts": [self.pieces(number) is not None for number in range(len(self.folders))],
            "faults": self.faults(),
        }

    def faults(self) -> list[str]:
        """Return the parts that could not be read, a sentence each."""
        return list(dict.fromkeys(fault for each in self._each for fault in each.faults()))

    def page(self, where: str, sort: str, descending: bool, offset: int, limit: int) -> dict[str, Any]:
        """Return a page of the table.

        Raises:
            ConfigError: The filter cannot be read, or names an unknown column.
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
        joined = self._each[row["dir"]].joined(row)
        return self.document(row, record, joined) | {"pieces": self._pieces_of(row["dir"], [record])}

    def document(
        self, row: Mapping[str, Any], record: Mapping[str, Any] | None, joined: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return a conversation whole, without the texts of its ids."""
        return {
            "row": _row(row) | excerpts_of(record) | plain(roles_of(row, joined)),
            "record": record,
            "joined": [plain(_short(each)) for each in joined],
        }

    def every(self, where: str) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None, list[dict[str, Any]]]]:
        """Yield row, record and joined rows of all conversations that a filter leaves, file by file.

        A row has its place in the index in the entry `at`.

        Raises:
            ConfigError: The filter cannot be read, or names an unknown column.
        """
        rows = [{**row, "at": at} for at, row in enumerate(self.table.select(parse(where)).to_pylist())]
        joined: dict[tuple[int, int], dict[str, list[dict[str, Any]]]] = {}
        for row in rows:
            if row["join"] is not None:
                joined.setdefault((row["dir"], row["join"]), {})[row["request_id"]] = []
        for (number, join), wanted in joined.items():
            each = self._each[number]
            for own in joined_rows(each.index.join(join), wanted, each.fault):
                wanted[own["request_id"]].append(own)
        none = (1 << 31, 0, 0)
        rows.sort(
            key=lambda row: (
                row["dir"],
                *(none if row["offset"] is None else (row["file"], row["offset"], row["place"])),
            )
        )
        for row in rows:
            rows_of = joined[row["dir"], row["join"]][row["request_id"]] if row["join"] is not None else []
            yield row, self._record(row), rows_of

    def pieces(self, number: int) -> Pieces | None:
        """Return the texts of a folder's ids; None: its tokenizer is not on this machine."""
        if number not in self._pieces:
            self._pieces[number] = None
            for run in self._each[number].records.runs:
                path = find(str((run.get("tokenizer") or {}).get("path") or ""), self.folders[number])
                if path is not None:
                    with contextlib.suppress(OSError, ValueError):
                        self._pieces[number] = Pieces(path)
                        break
        return self._pieces[number]

    def run(self) -> dict[str, Any]:
        """Return the known data of all folders' runs, and the rows that flipped between evaluations."""
        count = len(self.table.whole)
        if self._flips is None or self._flips[0] != count:
            self._flips = count, flips_of(self.folders) if count <= _EXPLAINED else None
        return {"dirs": [plain(each.run()) for each in self._each], "flips": self._flips[1]}

    def timeline(self, number: int, step: int, validation: bool, where: str = "") -> dict[str, Any]:
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
        offsets = {clock["file"]: float(clock["offset_s"]) for clock in self._each[number].records.clocks()}
        pairs = []
        for row in rows:
            offset = 0.0 if row["file"] is None else offsets.get(self._each[number].index.stem(row["file"]), 0.0)
            pairs.append((row, self._record(row), offset))
        made = timeline(step, pairs, lines_of(self._each[number].records.steps()).get((step, validation)))
        return made | {"basis": basis, "left_out": left_out}

    def findings(self) -> dict[str, Any]:
        """Return the findings of `verl-multiturn explain`, computed anew at most once a minute.

        It reads all records, with readers of its own: another thread may ask for something else meanwhile.
        """
        count = len(self.table.whole)
        if count > _EXPLAINED:
            said = f"{count} conversations are too many to look for findings here; run verl-multiturn explain DIR"
            return {"findings": None, "said": said}
        with self._finding:  # requests at one time share one search
            known = self._found
            if known is None or (known[0] != count and time.monotonic() - known[1] > _ANEW_S):
                found = [
                    {**each.as_json(), "dir": number}
                    for number, folder in enumerate(self.folders)
                    for each in explain(Records(folder))
                ]
                known = self._found = count, time.monotonic(), found
        return plain({"findings": known[2], "said": ""})  # type: ignore[no-any-return]

    def open(self) -> dict[str, Any]:
        """Return the running conversations, by the workers' snapshots."""
        made = []
        for number, each in enumerate(self._each):
            ended = {line["start"] for line in each.records.ends()}
            for shot in each.records.snapshots():
                over = start_of(shot["file"], ended) in ended
                made.append({**shot, "dir": number, "over": over})
        return plain({"snapshots": made})  # type: ignore[no-any-return]

    def _record(self, row: dict[str, Any]) -> dict[str, Any] | None:
        each: RunDocuments = self._each[row["dir"]]
        return each.record(row)

    def _pieces_of(self, number: int, records: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
        pieces = self.pieces(number)
        return None if pieces is None else pieces.of(ids_of(records))


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
    """Return the name of a run, its model and the files of its rows; "": its settings do not name it."""
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
    """Return the last parts of a folder's path: enough to distinguish runs, and no more of this machine."""
    parts = folder.resolve().parts[1:]
    return "/".join(parts[-2:]) if parts and parts[-1] == "records" else "/".join(parts[-1:])


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a join with as few digits of the entropy as it has."""
    entropy = row["entropy"]
    return {**row, "entropy": None if entropy is None else np.round(entropy.astype(np.float32), 5)}

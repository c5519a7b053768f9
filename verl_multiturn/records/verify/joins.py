"""Comparison of a record with the data beside it: the line of its end, and its rows in the trainer's joins.

A record that was changed alone contradicts them. They were written by others: the line by the worker's thread, the
joins by the trainer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.compute as pc

from verl_multiturn.certificate.check import SAMPLED, Violation
from verl_multiturn.describe import show
from verl_multiturn.records.read import joins
from verl_multiturn.records.read.contradictions import are_close
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.summaries import summary_of

_OF_LINE = ("request_id", "uid", "number", "rerolled_from", "validation", "step")
_COLUMNS = ["request_id", "row", "uid", "number", "validation", "role", "score", "otc_factor", "advantages", "trained",
            "untrained"]  # fmt: skip
_NEWER = {"role"}
"""Columns that older joins do not have."""


class _JoinEntry(NamedTuple):
    """A row of a join."""

    row: int
    uid: str
    number: int
    validation: bool
    role: str | None
    score: float | None
    otc_factor: float | None
    sampled: int | None
    trained: int | None
    untrained: str | None


class JoinCheck:
    """The joins of a folder of records.

    Args:
        folder: The folder; of a single file nothing is known.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder if folder.is_dir() else None
        """The folder; None: it is a file."""
        self._rows: dict[str, list[_JoinEntry]] = defaultdict(list)
        records = Records(folder)
        for _, table in records.joins() if self.folder else []:
            if not {*_COLUMNS} - _NEWER <= {*table.column_names}:
                continue
            table = joins.filled(table, _COLUMNS).filter(pc.is_valid(table["request_id"]))
            lengths = pc.list_value_length(table["advantages"])
            table = table.set_column(_COLUMNS.index("advantages"), "advantages", lengths)
            for request_id, *row in zip(*(column.to_pylist() for column in table.columns), strict=True):
                self._rows[request_id].append(_JoinEntry(*row))
        self.faults = [fault for fault in records.faults if f"{joins.FOLDER}/" in fault and "left out" in fault]
        """Which joins are excluded."""

    def violations(
        self, record: Mapping[str, Any], line: Mapping[str, Any] | None, score: float | None
    ) -> list[Violation]:
        """Return how a record differs from the data beside it.

        Args:
            record: The record, of schema 2 and in its form.
            line: The line of its end; None: there is none.
            score: The score in its line; None: there is none.
        """
        found = [] if line is None else [*_of_line(record, line)]
        rows = self._rows.get(record["request_id"], [])
        for row in rows:
            found += _of_join(record, row)
        scored = [row for row in rows if row.score is not None and row.otc_factor in (None, 1.0)]
        if len(scored) == len(record["rows"]):
            joined = math.fsum(row.score or 0.0 for row in scored)
            if score is not None and not are_close(joined, score):
                found.append(f"its line says that it scored {score}, the trainer's join {joined}")
            found += _of_rewards(record, scored)
        return [Violation(record["request_id"], None, None, what) for what in found]


def _of_line(record: Mapping[str, Any], line: Mapping[str, Any]) -> Iterator[str]:
    for name in _OF_LINE:
        if record[name] != line[name]:
            yield f"its {name} is {show(record[name], 60)}, by the line of its end {show(line[name], 60)}"
    if (line["event"] == "cancel") != (record["status"] == "cancelled"):
        yield f"its status is {record['status']}, and its line is of the event {line['event']}"
    summary = summary_of(record)
    for name, value in (line["summary"] or {}).items():
        if summary[name] != value:
            yield f"its {name} is {show(summary[name], 60)}, by the line of its end {show(value, 60)}"


def _of_rewards(record: Mapping[str, Any], rows: Sequence[_JoinEntry]) -> Iterator[str]:
    """Yield how the rewards that a session's agent gave, of each role, differ from those of its rows in a join.

    Args:
        record: The record.
        rows: All of its rows in the join.
    """
    session = record["session"]
    if session is None or session["task"] is not None or not record["valid"]:  # a gateway's rewards may change
        return
    for role in dict.fromkeys(row.role for row in rows):
        given = session["rewards"].get(role) if session["rewards"] else session["reward"]
        if given is None:  # the reward function's, or the row is of another role
            continue
        own = (each["reward"] for each in record["generations"] if each["role"] == role)
        said = math.fsum([float(given), *(float(each) for each in own if each is not None)])
        joined = math.fsum(row.score or 0.0 for row in rows if row.role == role)
        if not are_close(said, joined):
            whose = "its agent gave it" if role is None else f"its agent gave the role {show(role, 60)}"
            yield f"{whose} {said:g}, the trainer's join has {joined:g}"


def _of_join(record: Mapping[str, Any], row: _JoinEntry) -> Iterator[str]:
    where = f"row {row.row}"
    for name in ("uid", "number", "validation"):
        if record[name] != getattr(row, name):
            yield f"its {name} is {show(record[name], 60)}, by the trainer's join {show(getattr(row, name), 60)}"
    if row.row >= len(record["rows"]):
        yield f"the trainer's join has its {where}; it has {len(record['rows'])} rows"
        return
    roles = {each["role"] for each in record["generations"] if each["row"] == row.row}
    if roles and roles != {row.role}:
        spoken = ", ".join(sorted(show(role, 60) for role in roles))
        yield f"the role of {where} is {spoken}, by the trainer's join {show(row.role, 60)}"
    if row.sampled is not None:
        sampled = sum(run[0] for run in record["rows"][row.row]["runs"] if run[4] == SAMPLED)
        if sampled != row.sampled:
            yield f"{where} has {sampled} sampled tokens, by the trainer's join {row.sampled}"
    if row.trained and not record["valid"]:
        yield f"it is marked as invalid, and {row.trained} tokens of {where} were trained"
    if row.untrained == "invalid" and record["valid"]:
        yield f"it is marked as valid, and {where} was left out as invalid"
    if row.untrained == "void" and not record["void"]:
        yield f"it is marked as having no void turn, and {where} was left out for one"

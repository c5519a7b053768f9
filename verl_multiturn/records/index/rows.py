"""The columns of the index, and how a line or a record of a conversation becomes its row.

A row under way is a list with a value for each column; None: nothing is known of it, or it stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import orjson
import pyarrow as pa

from verl_multiturn.describe import show
from verl_multiturn.records import schema
from verl_multiturn.records.read.fates import Fate
from verl_multiturn.records.read.lines import defaults
from verl_multiturn.records.read.records import StoredRecord
from verl_multiturn.records.read.scores import LARGEST
from verl_multiturn.records.read.sessions import LiveSession
from verl_multiturn.records.summaries import summary_of

Row = list[Any]

_TEXT, _INT, _REAL, _BOOL = pa.string(), pa.int32(), pa.float64(), pa.bool_()
LINES = [
    ("request_id", _TEXT), ("uid", _TEXT), ("number", _INT), ("validation", _BOOL), ("step", _INT),
    ("rerolled_from", _TEXT), ("began", _REAL), ("ended", _REAL), ("event", _TEXT), ("why", _TEXT),
    ("data_source", _TEXT), ("index", _TEXT), ("stop_reason", _TEXT), ("valid", _BOOL), ("rows", _INT),
    ("turns", _INT), ("calls", _INT), ("failed_calls", _INT), ("prompt_tokens", _INT), ("response_tokens", _INT),
    ("sampled_tokens", _INT), ("seconds", _REAL), ("generate_s", _REAL), ("tools_s", _REAL), ("interaction_s", _REAL),
    ("score", _REAL), ("file", _INT), ("offset", pa.int64()), ("place", _INT), ("said", _TEXT),
]  # fmt: skip
JOIN = [
    ("trained_step", _INT), ("update", _INT), ("trained_tokens", _INT), ("untrained", _TEXT), ("group_mean", _REAL),
    ("group_std", _REAL), ("join", _INT), ("fate", _TEXT), ("acc", _REAL), ("fate_step", _INT), ("partly", _BOOL),
    ("undone", _BOOL), ("joined_rows", _INT), ("roles", _TEXT),
]  # fmt: skip
SCHEMA = pa.schema(LINES + JOIN)
HIDDEN = (
    "file", "offset", "place", "join", "event", "said", "acc", "fate_step", "partly", "joined_rows", "roles",
)  # fmt: skip
"""Columns that no table shows: where a conversation is stored, why it ended by its line (`why` is the fate's), what its
reward reported as `acc`, from which steps count who is right, the other fields of a `fates.Fate`, and the rewards by
role (`scores.rewards_in`)."""
NO_STEP = -1
"""The column `fate_step` of a conversation whose fate names no step; null: its join has the step."""
COLUMNS = LINES + JOIN
_WIDTH = len(COLUMNS)
_AT = {name: at for at, (name, _) in enumerate(COLUMNS)}
_NAMES = [name for name, _ in LINES[:6]]
# A line has no entry that has its default.
_OF_LINE, _OF_SUMMARY = defaults(schema.ConversationLine), defaults(schema.Summary)
"""Columns that every line has."""
_FIRST, _SUMMARY = 10, [name for name, _ in LINES[10:25]]
"""Columns of a summary, and where they begin."""
_VALIDATION, _BEGAN, _ENDED, _EVENT, _SAID, _WHY = (
    _AT[name] for name in ("validation", "began", "ended", "event", "said", "why")
)
_INDEX, _SCORE, _FILE, _OFFSET, _PLACE, _JOIN, _FATE, _FATE_STEP = (
    _AT[name] for name in ("index", "score", "file", "offset", "place", "join", "fate", "fate_step")
)
_OVER = ("end", "drop", "cancel")
_EVENTS = frozenset(get_args(schema.ConversationLine.model_fields["event"].annotation))


def fate_row(fate: Fate) -> Row:
    """Return the row of a conversation of which only the fate changes; no join has it."""
    row: Row = [None] * _WIDTH
    row[0], row[_FATE], row[_WHY] = fate.request_id, fate.fate, fate.why
    row[_FATE_STEP] = NO_STEP if fate.step is None else fate.step
    return row


def fate_of(row: Mapping[str, Any]) -> Fate:
    """Return the fate that a row of the index has, by column."""
    step = row["trained_step"] if row["join"] is not None else row["fate_step"]
    return Fate(
        row["request_id"],
        row["uid"] or "",
        row["number"] or 0,
        bool(row["validation"]),
        row["step"] if row["step"] is not None else step,
        row["fate"],
        None if step == NO_STEP else step,
        row["why"] or "",
        bool(row["partly"]),
        bool(row["undone"]),
    )


def merge(own: Row, changes: Row) -> None:
    """Change a row; a score from a join stays."""
    score, event = own[_SCORE], own[_EVENT]
    joined = own[_JOIN] is not None
    for at, value in enumerate(changes):
        if value is not None:
            own[at] = value
    if joined:
        own[_SCORE] = score
    if event not in (None, "begin"):
        own[_EVENT] = event


def is_again(own: Row, changes: Row) -> bool:
    """Return whether changes are of a conversation that another file, or another place of the file, has already."""
    if own[_FILE] is None or changes[_FILE] is None:
        return False
    if own[_FILE] != changes[_FILE]:
        return True
    known, new = own[_OFFSET : _OFFSET + 2], changes[_OFFSET : _OFFSET + 2]
    if None not in (known[0], new[0]) and known != new:
        return True
    if own[_SAID] is None and own[_EVENT] == "end":  # it was made of its record, and now its lines come
        return False
    if changes[_EVENT] == "begin":
        return own[_BEGAN] is not None
    return changes[_EVENT] is not None and changes[_EVENT] == own[_EVENT]


def file_of(row: Row) -> int:
    """Return the number of the file that a row is of."""
    return int(row[_FILE])


AGAIN, NO_SUMMARY = "again", "no summary"
"""A line that a file has already; a line of a record's end without a summary, as somebody may write it."""


def enter(changed: dict[str, Row], line: dict[str, Any], file: int) -> str:
    """Enter a line among changed conversations, and return its oddity; "": none.

    Args:
        changed: The conversations, by request id.
        line: The line, which need not fit its schema.
        file: Number of its file.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: It is not a line of ours.
    """
    request_id, event, at = line["request_id"], line["event"], float(line["at"])
    if event not in _EVENTS:
        raise ValueError(f"event is {show(event, 60)}; expected one of {', '.join(sorted(_EVENTS))}")
    score = line.get("score") if event == "score" else None
    number = None if score is None else float(score)
    if number is not None and not abs(number) <= LARGEST:
        number = None
    place = [_number(line, "offset", 62), _number(line, "place", 31)] if event in _OVER else [None, None]
    row = changed.get(request_id)
    if row is None:
        row = changed[str(request_id)] = [None] * _WIDTH
        row[: len(_NAMES)] = [line.get(name, _OF_LINE.get(name)) for name in _NAMES]
        row[_VALIDATION], row[_FILE] = bool(row[_VALIDATION]), file
    if event == "begin":
        if row[_BEGAN] is not None:
            return AGAIN
        row[_BEGAN] = at
        row[_EVENT] = row[_EVENT] or event
    elif event == "score":
        row[_SCORE] = number
    elif row[_EVENT] in (None, "begin"):
        row[_ENDED], row[_EVENT], row[_SAID] = at, event, line.get("why") or ""
        if event in _OVER:
            row[_OFFSET : _OFFSET + 2] = place
            if (summary := line.get("summary")) is not None:
                _summarize(row, {**_OF_SUMMARY, **summary})
            elif event == "end" and place[0] is not None:
                return NO_SUMMARY
    elif row[_EVENT] == event:
        return AGAIN
    return ""


def enter_session(changed: dict[str, Row], session: LiveSession) -> None:
    """Enter a gateway's session that has no line among changed conversations: a kill came first, or it is written yet.

    It names no file, so that a line that follows is not taken for one of another file.
    """
    row = changed[session.session_id] = [None] * _WIDTH
    row[: len(_NAMES)] = [session.session_id, session.task or "", session.number, False, 0, None]
    row[_BEGAN], row[_EVENT] = session.began, "begin"


def summarize(row: Row, record: Mapping[str, Any]) -> None:
    """Enter the summary of a record."""
    _summarize(row, summary_of(record))


def _number(line: Mapping[str, Any], name: str, bits: int) -> int | None:
    value = line.get(name)
    if value is not None and (type(value) is not int or value < 0 or value >> bits):
        raise ValueError(f"{name} is {show(value, 60)}; expected a place in a file")
    return value


def enter_record(changed: dict[str, Row], placed: StoredRecord, file: int) -> None:
    """Enter a record without a line among changed conversations."""
    record = placed.record
    row = changed[record["request_id"]] = [None] * _WIDTH
    row[: len(_NAMES)] = [record[name] for name in _NAMES]
    row[_BEGAN], row[_ENDED], row[_EVENT] = record["began"] or None, record["ended"] or None, "end"
    row[_FILE], row[_OFFSET], row[_PLACE] = file, placed.offset, placed.place
    _summarize(row, summary_of(record))


def _summarize(row: Row, summary: dict[str, Any]) -> None:
    row[_FIRST : _FIRST + len(_SUMMARY)] = [summary.get(name) for name in _SUMMARY]
    if (index := row[_INDEX]) is not None and not isinstance(index, str):
        row[_INDEX] = orjson.dumps(index).decode()


def differing(row: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record's values in the columns where a row, made of a line, differs from its record.

    Args:
        row: The row, by column; of a conversation that has a record.
        record: Its record.
    """
    own: Row = [None] * _WIDTH
    _summarize(own, summary_of(record))
    expected = {name: record[name] for name in _NAMES} | dict(zip(_SUMMARY, own[_FIRST:], strict=False))
    held = table_of([[expected.get(name) for name, _ in COLUMNS]]).to_pylist()[0]
    return {name: held[name] for name in expected if row[name] != held[name] and not _are_nan(row[name], held[name])}


def _are_nan(*values: Any) -> bool:
    return all(isinstance(value, float) and math.isnan(value) for value in values)


def table_of(rows: list[Row]) -> pa.Table:
    """Return rows as a table; a value of another type is omitted."""
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

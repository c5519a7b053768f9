"""Summaries of records, and the table of all conversations that began."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

HAS_RECORD = ("end", "cancel")
"""Events of lines that name the place of a record."""
_OF_LINE = ("request_id", "uid", "number", "validation", "step", "rerolled_from")
_SUMMARY = pa.schema(
    [
        ("data_source", pa.string()),
        ("index", pa.string()),  # a text as it is, any other value as JSON
        ("stop_reason", pa.string()),
        ("valid", pa.bool_()),
        *((name, pa.int32()) for name in ("rows", "turns", "calls", "failed_calls")),
        *((name, pa.int64()) for name in ("prompt_tokens", "response_tokens", "sampled_tokens")),
        *((name, pa.float64()) for name in ("seconds", "generate_s", "tools_s", "interaction_s")),
    ]
)
SUMMARIES = pa.schema(
    [
        ("file", pa.string()),  # stem of the worker's files; of an unpacked file, its name
        ("request_id", pa.string()),
        ("uid", pa.string()),
        ("number", pa.int32()),
        ("validation", pa.bool_()),
        ("step", pa.int32()),
        ("rerolled_from", pa.string()),
        ("began", pa.float64()),  # null: its begin was not written
        ("ended", pa.float64()),  # when it ended, was cancelled, raised or was dropped
        ("event", pa.string()),  # `begin`: nothing else is known of it; `end`, `cancel`, `raise`, `drop`
        ("why", pa.string()),
        ("offset", pa.int64()),
        ("place", pa.int32()),
        ("score", pa.float64()),
        *_SUMMARY,
    ]
)
"""Columns of the table of `Records.summaries`, a row for each conversation that began."""
_CHUNK = 50_000


def summary_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `schema.Summary` of a record."""
    rows, calls = record["rows"], record["calls"]
    return {
        "data_source": record["sample"]["data_source"],
        "index": record["sample"]["index"],
        "stop_reason": record["stop_reason"],
        "valid": record["valid"],
        "rows": len(rows),
        "turns": len(record["generations"]),
        "calls": len(calls),
        "failed_calls": sum(call["status"] != "ok" for call in calls),
        "prompt_tokens": rows[0]["prompt_length"] if rows else 0,
        "response_tokens": sum(len(row["ids"]) - row["prompt_length"] for row in rows),
        "sampled_tokens": sum(count * mask for row in rows for count, mask, *_ in row["runs"]),
        "seconds": round(record["ended"] - record["began"], 6),
        **{name: record[name] for name in ("generate_s", "tools_s", "interaction_s")},
    }


class SummaryTable:
    """The table, built from lines in their order, a file at a time; what is complete is packed as it comes."""

    def __init__(self) -> None:
        self._file = ""
        self._begun: dict[str, dict[str, Any]] = {}
        self._rows: list[dict[str, Any]] = []
        self._scores: dict[str, float] = {}
        self._batches: list[pa.RecordBatch] = []
        self._tables: list[pa.Table] = []

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line, a dictionary as `schema.Line`."""
        event, request_id = line["event"], line["request_id"]
        if event == "score":
            if line["score"] is not None:
                self._scores[request_id] = float(line["score"])
        elif event == "begin":
            row = {name: line[name] for name in _OF_LINE}
            self._begun[request_id] = {**row, "event": "begin", "began": line["at"], "file": self._file}
        else:
            row = self._begun.pop(request_id, {}) or {name: line[name] for name in _OF_LINE}
            row |= {"event": event, "ended": line["at"], "why": line["why"] or None, "file": self._file}
            if event != "cancel":  # whose record is none of the finished ones
                row |= {"offset": line["offset"], "place": line["place"]}
            if (summary := line["summary"]) is not None:
                row |= summary
                row["index"] = _as_text(summary["index"])
            self._rows.append(row)
            if len(self._rows) == _CHUNK:
                self._pack()

    def add_record(self, record: Mapping[str, Any], offset: int | None, place: int | None) -> None:
        """Add a record that has no line of its end."""
        line = {name: record[name] for name in _OF_LINE}
        if record["request_id"] not in self._begun and record["began"]:
            self.add({**line, "event": "begin", "at": record["began"]})
        ended = {"at": record["ended"] or None, "why": "", "offset": offset, "place": place}
        self.add({**line, **ended, "event": "end", "summary": summary_of(record)})

    def begin_file(self, file: str) -> None:
        """Close the file before, and begin the next: no conversation is in two files."""
        self._rows += self._begun.values()
        self._pack()
        if self._batches:
            table = pa.Table.from_batches(self._batches)
            self._tables.append(_with_scores(table, self._scores))
        self._file, self._begun, self._scores, self._batches = file, {}, {}, []

    def table(self) -> pa.Table:
        """Return the table of what was added."""
        self.begin_file("")
        return pa.concat_tables(self._tables) if self._tables else SUMMARIES.empty_table()

    def _pack(self) -> None:
        if self._rows:
            self._batches.append(pa.RecordBatch.from_pylist(self._rows, SUMMARIES))
            self._rows = []


def _with_scores(table: pa.Table, scores: Mapping[str, float]) -> pa.Table:
    if not scores:
        return table
    at = pc.index_in(table["request_id"], pa.array(scores, pa.string()))
    values = pa.array(scores.values(), pa.float64()).take(at.combine_chunks())
    return table.set_column(SUMMARIES.get_field_index("score"), "score", values)


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def ends_of(lines: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], Mapping[str, Any]]:
    """Return the lines of the records that were kept, by the offset and place of the record."""
    return {
        (line["offset"], line["place"]): line
        for line in lines
        if line["event"] in HAS_RECORD and line["offset"] is not None and line["place"] is not None
    }

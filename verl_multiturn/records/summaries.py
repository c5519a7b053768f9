"""Summaries of records, which their lines have, and the lines by the place of their record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

HAS_RECORD = ("end", "cancel")
"""Events of lines that name the place of a record."""


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


def ends_of(lines: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], Mapping[str, Any]]:
    """Return the lines of the records that were kept, by the offset and place of the record."""
    return {
        (line["offset"], line["place"]): line
        for line in lines
        if line["event"] in HAS_RECORD and line["offset"] is not None and line["place"] is not None
    }

"""Summaries of records: what a table shows of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
        "seconds": record["ended"] - record["began"],
        **{name: record[name] for name in ("generate_s", "tools_s", "interaction_s")},
    }

"""Parquet: a row for each conversation, in the columns of Inspect Scout's transcripts database, tokens beside them.

The columns up to `messages` have Scout's names and types, so that `scout` opens the folder as it is. After them come
the other data of the conversation, and its token columns: lists with a list for each row of the batch.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_multiturn.observe.convert.messages import as_json, asked_of, parts_of
from verl_multiturn.observe.convert.source import RunSource
from verl_multiturn.records.json_text import plain
from verl_multiturn.records.rows import columns
from verl_multiturn.rollout.limits import INVALID, StopReason

_AT_ONCE = 256
"""Records of a row group: a group is in memory as a whole."""
_TEXT = pa.large_string()
_INTEGERS, _FLOATS = pa.list_(pa.list_(pa.int32())), pa.list_(pa.list_(pa.float32()))
TOKENS = {"ids": "ids", "mask": "mask", "logprobs": "logprobs", "versions": "versions", "turns": "turn_ids"}
"""Token columns, and their names in `records.rows.columns`."""
COLUMNS = pa.schema(
    [
        ("transcript_id", _TEXT),
        ("source_type", _TEXT),
        ("source_id", _TEXT),
        ("date", _TEXT),
        ("task_set", _TEXT),
        ("task_id", _TEXT),
        ("task_repeat", pa.int64()),
        ("agent", _TEXT),
        ("model", _TEXT),
        ("model_options", _TEXT),
        ("score", _TEXT),
        ("success", pa.bool_()),
        ("message_count", pa.int64()),
        ("total_time", pa.float64()),
        ("total_tokens", pa.int64()),
        ("error", _TEXT),
        ("limit", _TEXT),
        ("messages", _TEXT),
        # Ours; Scout shows them as metadata.
        ("uid", _TEXT),
        ("validation", pa.bool_()),
        ("step", pa.int64()),  # begun in
        ("trained_step", pa.int64()),
        ("trained_tokens", pa.int64()),
        ("stop_reason", _TEXT),
        ("valid", pa.bool_()),
        ("score_value", pa.float64()),
        ("score_parts", _TEXT),
        ("score_roles", _TEXT),
        ("ground_truth", _TEXT),
        ("calls", _TEXT),
        ("prompt_lengths", pa.list_(pa.int32())),
        *((name, _FLOATS if name == "logprobs" else _INTEGERS) for name in TOKENS),
    ]
)
_LIMITS = frozenset(StopReason) - INVALID - {StopReason.FINISHED, StopReason.ENVIRONMENT_DONE, StopReason.AGENT_ERROR}


def write_parquet(source: RunSource, folder: Path) -> int:
    """Write `transcripts.parquet` into a folder, and return the number of conversations.

    Args:
        source: The run.
        folder: A folder for it alone; it is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, count = folder / "transcripts.parquet", 0
    unfinished = path.with_suffix(".part")
    with pq.ParquetWriter(unfinished, COLUMNS, compression="zstd") as writer:
        for rows in _batches(source):
            writer.write_table(pa.Table.from_pylist(rows, COLUMNS))
            count += len(rows)
    unfinished.replace(path)
    return count


def _batches(source: RunSource) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    for record in source.records():
        rows.append(_row(record, source))
        if len(rows) == _AT_ONCE:
            yield rows
            rows = []
    if rows:
        yield rows


def _row(record: dict[str, Any], source: RunSource) -> dict[str, Any]:
    reward = source.reward(record)
    sample = record.get("sample") or {}
    stop = str(record.get("stop_reason") or "")
    full = [columns(row) for row in record.get("rows") or []]
    messages = [_message(message) for message in record.get("messages") or []]
    generations = record.get("generations") or []
    return {
        "transcript_id": _text(record["request_id"]),
        "source_type": "verl-multiturn",
        "source_id": _text(source.start),
        "date": datetime.datetime.fromtimestamp(float(record["began"]), datetime.UTC).isoformat(),
        "task_set": _text(sample.get("data_source")),
        "task_id": _text(sample.get("index")),
        "task_repeat": record.get("number"),
        "agent": _text(record.get("loop")),
        "model": _text(source.model),
        "model_options": as_json(record.get("sampling")),
        "score": None if reward.score is None else as_json(reward.score),
        "success": source.is_right(reward),
        "message_count": len(messages),
        "total_time": float(record["ended"]) - float(record["began"]),
        "total_tokens": sum(int(each.get("prompt_tokens") or 0) + int(each.get("tokens") or 0) for each in generations),
        "error": _text(record.get("error") or None),
        "limit": stop if stop in _LIMITS else None,
        "messages": as_json(messages),
        "uid": _text(record.get("uid")),
        "validation": bool(record.get("validation")),
        "step": record.get("step"),
        "trained_step": None if record.get("validation") else reward.step,
        "trained_tokens": reward.trained,
        "stop_reason": stop,
        "valid": bool(record.get("valid", True)),
        "score_value": reward.score,
        "score_parts": as_json(reward.parts) if reward.parts else None,
        "score_roles": as_json(reward.of_roles) if reward.of_roles else None,
        "ground_truth": as_json(sample.get("ground_truth")),
        "calls": as_json(record.get("calls") or []),
        "prompt_lengths": [row["prompt_length"] for row in record.get("rows") or []],
        **{name: [each[column] for each in full] for name, column in TOKENS.items()},
    }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in Scout's form: calls have their name and arguments side by side."""
    role = message.get("role")
    found: dict[str, Any] = {
        "role": role if role in ("system", "user", "assistant", "tool") else "user",
        "content": "\n".join(parts_of(message.get("content"))),
    }
    if role == "assistant" and (asked := asked_of(message)):
        found["tool_calls"] = [
            {"id": call.id, "function": call.name, "arguments": call.arguments, "type": "function"} for call in asked
        ]
    if role == "tool":
        found |= {"tool_call_id": message.get("tool_call_id"), "function": message.get("name")}
    return found


def _text(value: Any) -> str | None:
    return None if value is None else plain(value if isinstance(value, str) else str(value))

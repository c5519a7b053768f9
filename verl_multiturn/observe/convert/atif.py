"""ATIF: a file for each conversation in Harbor's trajectory format, version 1.7.

A message of system or user is a step, a message of the model is a step with its calls and their answers. Data without a
place in ATIF is in `extra.verl_multiturn`: the identity, the score, and ids, masks, logprobs, versions and turns of
each row of the batch. Where the model's messages and its generations are as many, each step also has its own. With
roles (`proxy.roles`, `train`) rows and the model's steps have theirs.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from pathlib import Path
from typing import Any

from verl_multiturn.observe.convert.messages import MessageCall, asked_of, parts_of
from verl_multiturn.observe.convert.source import RunSource
from verl_multiturn.records.json_text import dumps, plain
from verl_multiturn.records.rows import columns

VERSION = "ATIF-v1.7"
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
OURS = "verl_multiturn"
"""Name under which everything of ours is in an `extra`."""


def write_atif(source: RunSource, folder: Path) -> int:
    """Write a file for each conversation into a folder, and return their number.

    Args:
        source: The run.
        folder: A folder for them alone; it is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for record in source.records():
        path = folder / f"{file_name(record['request_id'])}.json"
        path.write_bytes(dumps(plain(trajectory(record, source))))
        count += 1
    return count


def file_name(request_id: str) -> str:
    """Return a file's name for a request id: a client may have chosen the id, and `../x` is not a file's name."""
    if _SAFE.fullmatch(request_id):
        return request_id
    return hashlib.blake2b(request_id.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def trajectory(record: dict[str, Any], source: RunSource) -> dict[str, Any]:
    """Return a conversation in ATIF.

    Args:
        record: A `schema.Record`.
        source: The run that it is of.
    """
    reward = source.reward(record)
    sample = record.get("sample") or {}
    generations = record.get("generations") or []
    cached = [each["cached_tokens"] for each in generations if each.get("cached_tokens") is not None]
    agent: dict[str, Any] = {"name": record.get("loop") or "agent", "version": source.version}
    if source.model:
        agent["model_name"] = source.model
    if tools := source.schemas(sample.get("tools") or []):
        agent["tool_definitions"] = tools
    named = ("uid", "number", "validation", "step", "stop_reason", "valid", "void", "error", "sampling", "calc_rewards")
    ours = {name: record.get(name) for name in named}
    ours |= {"score": reward.score, "score_parts": reward.parts, "trained_step": reward.step, "sample": sample}
    roles = _roles_of_rows(record)
    ours["rows"] = [
        {"prompt_length": row["prompt_length"], **columns(row), **_named(roles.get(index))}
        for index, row in enumerate(record.get("rows") or [])
    ]
    if (session := record.get("session") or {}).get("roles"):
        ours |= {"roles": session["roles"], "trained": session.get("trained"), "score_roles": reward.of_roles}
        ours["opponents"] = session.get("opponents")
    elif trained := record.get("trained"):
        ours |= {"roles": trained, "trained": trained, "score_roles": reward.of_roles}
    return {
        "schema_version": VERSION,
        "session_id": record.get("uid") or record["request_id"],
        "trajectory_id": record["request_id"],
        "agent": agent,
        "steps": _steps(record),
        "final_metrics": {
            "total_prompt_tokens": sum(int(each.get("prompt_tokens") or 0) for each in generations),
            "total_completion_tokens": sum(int(each.get("tokens") or 0) for each in generations),
            **({"total_cached_tokens": sum(cached)} if cached else {}),
        },
        "extra": {OURS: ours},
    }


def _roles_of_rows(record: dict[str, Any]) -> dict[Any, str | None]:
    """Return the role of each row that holds a generation."""
    return {each.get("row"): each.get("role") for each in record.get("generations") or []}


def _named(role: str | None) -> dict[str, str]:
    return {} if role is None else {"role": role}


def _steps(record: dict[str, Any]) -> list[dict[str, Any]]:
    messages, asked = record.get("messages") or [], int(record.get("asked") or 0)
    own = [at for at, message in enumerate(messages) if message.get("role") == "assistant" and at >= asked]
    generations = _of_last_row(record)
    sampled = dict(zip(own, generations, strict=True)) if len(own) == len(generations) else {}
    statuses = {call.get("id"): call for call in record.get("calls") or []}
    speaks = _named(_roles_of_rows(record).get(len(record.get("rows") or []) - 1))
    steps: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        role, text = message.get("role"), _text(message.get("content"))
        if role == "tool" and steps and steps[-1]["source"] == "agent":
            asked_ids = {call["tool_call_id"] for call in steps[-1].get("tool_calls", ())}
            _observe(steps[-1], message.get("tool_call_id"), text, asked_ids, statuses)
            continue
        step = {"step_id": len(steps) + 1, "source": _source(role), "message": text}
        if role == "assistant":
            step |= _said(message, statuses)
            step |= _metrics(record, *sampled[at]) if at in sampled else {}
            step |= {"extra": {OURS: speaks}} if speaks and at >= asked else {}
        steps.append(step)
    return steps or [{"step_id": 1, "source": "user", "message": ""}]


def _of_last_row(record: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Return the generations in the row whose messages the record has, with their numbers."""
    last = len(record.get("rows") or []) - 1
    found = [each for each in enumerate(record.get("generations") or []) if each[1].get("row") == last]
    return sorted(found, key=lambda each: each[1].get("start") or 0)


def _source(role: Any) -> str:
    return "agent" if role == "assistant" else "system" if role == "system" else "user"


def _said(message: dict[str, Any], calls: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if isinstance(reasoning := message.get("reasoning_content"), str):
        found["reasoning_content"] = reasoning
    if asked := asked_of(message):
        found["tool_calls"] = [_call(call, calls.get(call.id)) for call in asked]
    return found


def _call(asked: MessageCall, made: dict[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {"tool_call_id": asked.id, "function_name": asked.name, "arguments": asked.arguments}
    if made is not None:
        kept = ("status", "attempts", "cached", "truncated", "queue_s", "seconds", "reward", "metrics")
        found["extra"] = {OURS: {name: made.get(name) for name in kept}}
    return found


def _observe(
    step: dict[str, Any],
    call_id: Any,
    text: str | list[dict[str, Any]],
    asked: set[str],
    calls: dict[Any, dict[str, Any]],
) -> None:
    result: dict[str, Any] = {"content": text}
    if call_id is not None and str(call_id) in asked:
        result["source_call_id"] = str(call_id)
    # The model may have read less than the tool answered.
    if (made := calls.get(call_id)) and made.get("truncated"):
        result["extra"] = {OURS: {"whole": made.get("text")}}
    step.setdefault("observation", {"results": []})["results"].append(result)


def _metrics(record: dict[str, Any], number: int, generation: dict[str, Any]) -> dict[str, Any]:
    row, start, count = record["rows"][generation["row"]], generation["start"], generation["tokens"]
    full = columns(row)
    here = slice(start, start + count)
    found = {
        "metrics": {
            "prompt_tokens": generation.get("prompt_tokens"),
            "completion_tokens": count,
            "completion_token_ids": full["ids"][here],
            "logprobs": full["logprobs"][here],
            "extra": {OURS: {"versions": full["versions"][here], "mask": full["mask"][here], "turn": number}},
        },
        "llm_call_count": 1,
    }
    if generation.get("cached_tokens") is not None:
        found["metrics"]["cached_tokens"] = generation["cached_tokens"]  # type: ignore[index]
    if generation.get("at"):
        found["timestamp"] = datetime.datetime.fromtimestamp(float(generation["at"]), datetime.UTC).isoformat()
    return found


def _text(content: Any) -> str | list[dict[str, Any]]:
    parts = parts_of(content)
    if isinstance(content, list):
        return [{"type": "text", "text": part} for part in parts]
    return parts[0] if parts else ""

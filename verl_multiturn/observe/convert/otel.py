"""OTLP: a trace for each conversation, after OpenTelemetry's GenAI conventions of version 1.41.0.

    invoke_agent LOOP
    ├─ chat MODEL              a generation
    ├─ execute_tool NAME       a call
    └─ KIND NAME               any other stretch of the timeline

It is the timeline of the tree of which live traces are made, too (`spans.tree_of`): the waits, flat.
The file has a line for each conversation: an `ExportTraceServiceRequest` as OTLP's JSON, as collectors read it (the
OTLP file format). Ids are hexadecimal there, not base64 as in Protobuf's own JSON. They come from the request id, so
that a run that is converted twice has the same traces.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.observe.convert.messages import as_json, asked_of, parts_of
from verl_multiturn.observe.convert.source import RunSource
from verl_multiturn.observe.spans import TraceSpan, tree_of
from verl_multiturn.records.json_text import dumps, plain

SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.0"
"""The last version in which the GenAI conventions are beside the others."""
_INTERNAL, _CLIENT = 1, 3
_OK, _ERROR = 1, 2
_LARGEST = range(-(1 << 63), 1 << 63)
_ASKED = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}


def write_otel(source: RunSource, path: Path) -> int:
    """Write a file with a line for each conversation, and return their number.

    Args:
        source: The run.
        path: The file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished, count = path.with_name(f"{path.name}.part"), 0
    with unfinished.open("wb") as file:
        for record in source.records():
            file.write(dumps(plain(_request(record, source))))
            count += 1
    unfinished.replace(path)
    return count


def _request(record: dict[str, Any], source: RunSource) -> dict[str, Any]:
    resource = {
        "service.name": "verl-multiturn",
        "service.version": source.version,
        "service.instance.id": source.start or None,
    }
    scope = {"name": "verl_multiturn", "version": source.version}
    spans = {"scope": scope, "schemaUrl": SCHEMA_URL, "spans": _spans(record, source)}
    return {
        "resourceSpans": [
            {"resource": {"attributes": _attributes(resource)}, "schemaUrl": SCHEMA_URL, "scopeSpans": [spans]}
        ]
    }


def _spans(record: dict[str, Any], source: RunSource) -> list[dict[str, Any]]:
    offset = source.offset_s(record["request_id"])
    timeline = tree_of(record).timeline
    ended = max([float(record["ended"]), *(float(wait["end"]) for wait, _ in timeline)])
    root = {
        "name": f"invoke_agent {record.get('loop') or 'agent'}",
        "kind": _INTERNAL,
        **_times(record["began"], ended, offset),
        "attributes": _attributes(_of_conversation(record, source)),
        "status": {"code": _OK if record.get("valid", True) else _ERROR, "message": str(record.get("error") or "")},
    }
    spans = [root]
    for wait, span in timeline:
        spans.append({**_span(wait, span, record, source), **_times(wait["start"], wait["end"], offset)})
    trace, first = _hex(record["request_id"], 16), _hex(f"{record['request_id']}/0", 8)
    for number, each in enumerate(spans):
        each |= {"traceId": trace, "spanId": _hex(f"{record['request_id']}/{number}", 8)}
        if number:
            each["parentSpanId"] = first
    return spans


def _of_conversation(record: dict[str, Any], source: RunSource) -> dict[str, Any]:
    reward = source.reward(record)
    sample, asked = record.get("sample") or {}, int(record.get("asked") or 0)
    messages = record.get("messages") or []
    generations = record.get("generations") or []
    return {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "sglang",
        "gen_ai.agent.name": record.get("loop"),
        "gen_ai.conversation.id": record["request_id"],
        "gen_ai.request.model": source.model or None,
        **{f"gen_ai.request.{ours}": (record.get("sampling") or {}).get(theirs) for theirs, ours in _ASKED.items()},
        "gen_ai.usage.input_tokens": sum(int(each.get("prompt_tokens") or 0) for each in generations),
        "gen_ai.usage.output_tokens": sum(int(each.get("tokens") or 0) for each in generations),
        "gen_ai.input.messages": as_json([_message(message) for message in messages[:asked]]),
        "gen_ai.output.messages": as_json([_message(message) for message in messages[asked:]]),
        "verl_multiturn.uid": record.get("uid"),
        "verl_multiturn.number": record.get("number"),
        "verl_multiturn.validation": bool(record.get("validation")),
        "verl_multiturn.step": record.get("step"),
        "verl_multiturn.trained_step": reward.step,
        "verl_multiturn.stop_reason": record.get("stop_reason"),
        "verl_multiturn.score": reward.score,
        **{f"verl_multiturn.score.{role}": own for role, own in reward.of_roles.items()},
        "verl_multiturn.data_source": sample.get("data_source"),
        "verl_multiturn.sample_index": sample.get("index"),
    }


def _span(wait: Mapping[str, Any], span: TraceSpan, record: dict[str, Any], source: RunSource) -> dict[str, Any]:
    kind, name, turn = wait["kind"], wait.get("name") or "", wait.get("turn")
    attributes: dict[str, Any] = {"verl_multiturn.kind": kind, "verl_multiturn.turn": turn}
    status: dict[str, Any] = {"code": _OK}
    if kind == "generation":
        title = f"chat {source.model}".rstrip()
        attributes |= _of_generation(record, span, source)
    elif kind == "call":
        title = f"execute_tool {name}".rstrip()
        attributes |= {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.type": "function",
        }
        if span.kind == "tool":
            call = span.entry
            attributes |= {
                "gen_ai.tool.call.id": call.get("id"),
                "gen_ai.tool.call.arguments": as_json(call.get("arguments")),
                "gen_ai.tool.call.result": call.get("text"),
                "verl_multiturn.status": call.get("status"),
                "verl_multiturn.attempts": call.get("attempts"),
                "verl_multiturn.reward": call.get("reward"),
            }
            if call.get("status") not in (None, "ok"):
                attributes["error.type"] = call["status"]
                status = {"code": _ERROR, "message": str(call.get("text") or "")[:1000]}
    else:
        title = f"{kind} {name}".rstrip()
    return {
        "name": title,
        "kind": _CLIENT if kind == "generation" else _INTERNAL,
        "attributes": _attributes(attributes),
        "status": status,
    }


def _of_generation(record: dict[str, Any], span: TraceSpan, source: RunSource) -> dict[str, Any]:
    common = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "sglang",
        "gen_ai.request.model": source.model or None,
        "gen_ai.conversation.id": record["request_id"],
    }
    if span.kind != "generation":  # the engine returned nothing
        return common
    found = span.entry
    return common | {
        "gen_ai.request.max_tokens": found.get("max_tokens"),
        "gen_ai.usage.input_tokens": found.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": found.get("tokens"),
        "gen_ai.usage.cache_read.input_tokens": found.get("cached_tokens"),
        "gen_ai.response.finish_reasons": [found["finish"]] if found.get("finish") else None,
        "verl_multiturn.role": found.get("role"),
    }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in the conventions' form: a role and parts."""
    role, texts = message.get("role"), parts_of(message.get("content"))
    if role == "tool":
        answer = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": "\n".join(texts)}
        return {"role": role, "parts": [answer]}
    parts: list[dict[str, Any]] = [{"type": "text", "content": text} for text in texts if text]
    for call in asked_of(message):
        parts.append({"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments})
    return {"role": role, "parts": parts}


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    """Return an `AnyValue`. OTLP writes an integer of 64 bits as text, and has no number that is none."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int) and value in _LARGEST:
        return {"intValue": str(value)}
    if isinstance(value, float) and math.isfinite(value):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": value if isinstance(value, str) else as_json(value)}


def _times(start: Any, end: Any, offset: float) -> dict[str, str]:
    began, ended = float(start) + offset, float(end) + offset
    return {"startTimeUnixNano": str(round(began * 1e9)), "endTimeUnixNano": str(round(max(began, ended) * 1e9))}


def _hex(name: str, size: int) -> str:
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=size).hexdigest()

"""A conversation's timeline: its spans, in order, and the calls and generations that they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def spans_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a conversation's spans (`schema.Span`) by their begin; [] where no times were recorded.

    Without a timeline they are made from the times of generations, calls and replies.

    Args:
        record: A `schema.Record`.
    """
    spans = list(record.get("timeline") or []) or list(_made(record))
    return sorted(spans, key=lambda span: (float(span["start"]), float(span["end"])))


def _made(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for turn, generation in enumerate(record.get("generations") or []):
        if generation.get("asked_at") and generation.get("at"):
            yield _span("generation", "", turn, generation["asked_at"], generation["at"])
    for call in record.get("calls") or []:
        if not call.get("at"):
            continue
        began = call["at"] - float(call.get("seconds") or 0.0)
        if call.get("queue_s"):
            yield _span("wait", call.get("tool") or "", call.get("turn"), began - call["queue_s"], began)
        if call.get("seconds"):
            yield _span("call", call.get("tool") or "", call.get("turn"), began, call["at"])


def _span(kind: str, name: str, turn: int | None, start: float, end: float) -> dict[str, Any]:
    return {"kind": kind, "name": name, "turn": turn, "start": float(start), "end": float(end)}


def calls_of(record: Mapping[str, Any], spans: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | None]:
    """Return for each span the call whose run it is; None for any other span.

    A span has no id of its call: of those of its turn and tool, it is the one that was answered when it ended.

    Args:
        record: A `schema.Record`.
        spans: Its spans.
    """
    left = list(record.get("calls") or [])
    found: list[dict[str, Any] | None] = []
    for span in spans:
        fitting = [
            call
            for call in left
            if span["kind"] == "call" and call.get("turn") == span.get("turn") and call.get("tool") == span.get("name")
        ]
        call = min(fitting, key=lambda call: abs(float(call.get("at") or 0.0) - float(span["end"])), default=None)
        if call is not None:
            left = [other for other in left if other is not call]
        found.append(call)
    return found

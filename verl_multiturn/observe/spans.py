"""`tree_of`: the tree of a conversation's spans; live traces and those that `convert` writes are made of it.

    agent_loop ............................. the record
    ├─ turn 0 ─┬─ generation ............... its entry in `generations`
    │          └─ tool search, tool search . their entries in `calls`    (or `interaction`: in `replies`)
    └─ turn 1 ─── generation

A tree is made from a record, which has the times, and not from spans that are opened and closed while the conversation
runs. So a conversation pays for no trace, a backend can neither delay nor fail one, calls that run at the same time
cannot nest in one another, and a conversation that was cancelled leaves no open span.

Below it lies the timeline: stretches of waiting, each part of a span of the tree. A pause, a wait for a slot and an
earlier attempt of a call are part of their turn; waits outside turns are part of the conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Kind = Literal["agent", "turn", "generation", "tool", "interaction"]


@dataclass
class TraceSpan:
    """A stretch of time in a conversation, with its input and its output, in plain types."""

    name: str
    kind: Kind
    began: float
    """Seconds since the epoch."""
    ended: float
    entry: Mapping[str, Any]
    """Entry of the record that it is made of: the record itself, a generation, a call, a reply. A turn has that of its
    generation."""
    error: str = ""
    """Description of its error; "" without one."""
    children: list[TraceSpan] = field(default_factory=list)
    inputs: dict[str, Any] = field(default_factory=dict)
    """Its inputs, as backends show them (`traces.trace_of`); so with the next two."""
    outputs: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def walk(self) -> Iterator[TraceSpan]:
        """Yield the span and all below it, each before those below it."""
        yield self
        for child in self.children:
            yield from child.walk()


class Stretch(NamedTuple):
    """A stretch of the timeline."""

    wait: Mapping[str, Any]
    """A `schema.Span`."""
    span: TraceSpan
    """The span of the tree that it is part of."""


class SpanTree(NamedTuple):
    """The spans of a conversation."""

    root: TraceSpan
    timeline: list[Stretch]
    """Its timeline, by begin."""


def tree_of(record: Mapping[str, Any]) -> SpanTree:
    """Return the tree of a conversation's spans.

    Args:
        record: A `schema.Record`, or the result of `encode.conversation_of` in plain types.
    """
    root = TraceSpan("agent_loop", "agent", float(record["began"]), float(record["ended"]), record)
    turns = [_turn(number, generation) for number, generation in enumerate(record.get("generations") or [])]
    root.children += turns
    of_call: dict[int, TraceSpan] = {}
    for call in record.get("calls") or []:
        of_call[id(call)] = _tool(call)
        _at(call, turns, root).children.append(of_call[id(call)])
    for reply in record.get("replies") or []:
        if (turn := _at(reply, turns, root)) is not root:  # the opening is not an answer
            began = turn.children[0].ended
            turn.children.append(TraceSpan("interaction", "interaction", began, float(reply.get("at") or 0.0), reply))
    for turn in turns:
        turn.ended = max(child.ended for child in turn.children)
    waits = spans_of(record)
    timeline = []
    for wait, call in zip(waits, calls_of(record, waits), strict=True):
        turn = _at(wait, turns, root)
        same = next((child for child in turn.children if child.kind == wait["kind"]), turn)
        timeline.append(Stretch(wait, same if call is None else of_call[id(call)]))
    _nest(root)
    return SpanTree(root, timeline)


def _at(entry: Mapping[str, Any], turns: Sequence[TraceSpan], root: TraceSpan) -> TraceSpan:
    """Return the turn that an entry names; the root where there is none."""
    turn = entry.get("turn")
    return turns[turn] if isinstance(turn, int) and 0 <= turn < len(turns) else root


def _turn(number: int, generation: Mapping[str, Any]) -> TraceSpan:
    began, ended = (float(generation.get(name) or 0.0) for name in ("asked_at", "at"))
    name = f"{'summary' if generation.get('summary') else 'turn'} {number}"
    asked = TraceSpan("generation", "generation", began, ended, generation)
    return TraceSpan(name, "turn", began, ended, generation, children=[asked])


def _tool(call: Mapping[str, Any]) -> TraceSpan:
    ended, seconds, queue_s = (float(call.get(name) or 0.0) for name in ("at", "seconds", "queue_s"))
    error = "" if call.get("status") in (None, "ok") else str(call.get("text") or "")
    return TraceSpan(f"tool {call.get('tool') or ''}".rstrip(), "tool", ended - seconds - queue_s, ended, call, error)


def _nest(span: TraceSpan) -> None:
    """Let every span lie within the one above it. They do, unless the machine's clock was set meanwhile."""
    span.ended = max(span.began, span.ended)
    for child in span.children:
        child.began = min(max(child.began, span.began), span.ended)
        child.ended = min(child.ended, span.ended)
        _nest(child)


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

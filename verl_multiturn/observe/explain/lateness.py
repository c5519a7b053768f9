"""The parts of a conversation's time, and the conversation that made a step late.

A conversation waits for whatever ends last: of two calls that run at the same time, for the longer one. Its critical
path is found from its end: the span that ends there, then the one that ended when that began, and so on. So the parts
add up to its seconds, also where calls run side by side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

OTHER = "other"
"""Part of the time that belongs to no span."""
OPPONENT = "opponent "
"""Begin of the name of a wait for an opponent; names of tools have no space."""
_PARTS = {"generation": "engine", "pause": "engine", "reward": "reward", "wait": "queue"}
# Spans that hold others, and therefore explain nothing.
_OUTER = frozenset({"request"})
_SAME_S = 1e-4


def part_of(kind: str, name: str) -> str:
    """Return the part of the system that a span belongs to: `engine`, `queue NAME`, `tool NAME`, `reward` and so on.

    The wait for an opponent of `proxy.opponents` is a part of its own, `opponent NAME`.
    """
    if kind == "wait" and name.startswith(OPPONENT):
        return name
    part = _PARTS.get(kind, "tool" if kind == "call" else kind)
    return f"{part} {name}" if name and part in ("queue", "tool", "interaction") else part


def critical_path(spans: Sequence[Mapping[str, Any]], began: float, ended: float) -> dict[str, float]:
    """Return the seconds of a conversation's critical path by part; {} without spans. They add up to its seconds.

    Args:
        spans: Its timeline, as `schema.Span`.
        began: When it began.
        ended: When it was over.
    """
    found: dict[str, float] = defaultdict(float)
    kept = [
        (min(float(span["end"]), ended), max(float(span["start"]), began), span["kind"], span.get("name") or "")
        for span in spans
        if span["kind"] not in _OUTER and float(span["end"]) > began
    ]
    if not kept:
        return {}
    # Where a wait and another call end together, it is the wait that the path goes through: a call begins as it ends.
    kept.sort(key=lambda span: (span[0], span[2] == "wait", span[1]))
    at = ended
    while kept and at > began:
        end, start, kind, name = kept.pop()
        if end <= start or start >= at:
            continue
        if end < at - _SAME_S:
            found[OTHER] += at - end
        found[part_of(kind, name)] += min(end, at) - start
        at = start
    if at > began:
        found[OTHER] += at - began
    return dict(found)


@dataclass(frozen=True)
class Straggler:
    """The last conversation of a step, compared with the median one."""

    step: int
    request_id: str
    part: str
    """Part in which it lost most."""
    part_s: float
    """Seconds that it lost there."""
    seconds: float
    """Seconds by which it exceeded the median."""
    by_length: float
    """Of the seconds that it lost in the engine, those that its larger number of tokens explains."""


def late_of_step(step: int, talks: Sequence[Any]) -> Straggler | None:
    """Return who made a step late; None: fewer than four conversations have a timeline.

    Args:
        step: Number of the step.
        talks: Its conversations (`facts.Talk`), which began together.
    """
    timed = [talk for talk in talks if talk.parts_s]
    if len(timed) < 4:
        return None
    last = max(timed, key=lambda talk: talk.ended - talk.began)
    usual = median(talk.ended - talk.began for talk in timed)
    lost = {
        part: seconds - median(talk.parts_s.get(part, 0.0) for talk in timed) for part, seconds in last.parts_s.items()
    }
    part = max(lost, key=lambda each: lost[each])
    pace = [talk.parts_s.get("engine", 0.0) / talk.generated for talk in timed if talk.generated]
    more = last.generated - median(talk.generated for talk in timed)
    by_length = max(0.0, min(lost[part], more * median(pace))) if part == "engine" and pace else 0.0
    return Straggler(step, last.request_id, part, lost[part], last.ended - last.began - usual, by_length)

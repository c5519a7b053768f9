"""`timeline`: the waits of each conversation of a step, and the one that made the step late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.observe.explain.lateness import critical_path, late_of_step
from verl_multiturn.records.json_text import plain

_SPANS = 400
"""The most spans of a conversation in a step's timeline."""


@dataclass(frozen=True)
class _Timed:
    """Columns of a conversation that `late_of_step` reads."""

    request_id: str
    began: float
    ended: float
    parts_s: dict[str, float]
    generated: int


def timeline(
    step: int,
    conversations: Sequence[tuple[Mapping[str, Any], Mapping[str, Any] | None, float]],
    line: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the timeline of a step, and who made it late.

    Args:
        step: Number of the step.
        conversations: Each one's row of the index, its record, and the seconds to add to its times.
        line: The trainer's line of the step; None: none.
    """
    shown, timed = [], []
    for row, record, offset in conversations:
        spans = list((record or {}).get("timeline") or ())
        began = row["began"] if record is None else record["began"]
        ended = row["ended"] if record is None else record["ended"]
        if began is None:
            continue
        over = max([ended or began, *(float(span["end"]) for span in spans)])
        parts = critical_path(spans, began, over) if record is not None else {}
        told = {part: round(took, 4) for part, took in parts.items()}
        if record is not None and record["status"] == "finished" and row["fate"] != "open":
            generated = sum(each["tokens"] for each in record["generations"])
            timed.append(_Timed(row["request_id"], began + offset, over + offset, parts, generated))
        entry = {name: row[name] for name in ("request_id", "uid", "number", "score", "fate", "stop_reason")}
        moved = [_moved(span, offset) for span in spans[:_SPANS]]
        shown.append({
            **entry, "began": began + offset, "ended": over + offset, "parts": told, "spans": moved,
            "cut_spans": max(0, len(spans) - _SPANS),
        })  # fmt: skip
    late = late_of_step(step, timed)
    trainer = None if line is None else {name: line[name] for name in ("began", "ended", "phases")}
    who = None if late is None else {name: getattr(late, name) for name in _LATE}
    return plain({"step": step, "conversations": shown, "trainer": trainer, "late": who})  # type: ignore[no-any-return]


_LATE = ("request_id", "part", "part_s", "seconds", "by_length")


def _moved(span: Mapping[str, Any], offset: float) -> list[Any]:
    times = (round(float(span[name]) + offset, 4) for name in ("start", "end"))  # more digits fill an exported page
    return [span["kind"], span["name"], span["turn"], *times]

"""What the run's view and a step's timeline show: curves, equal groups, fates, and who made a step late."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl_multiturn.observe.explain.lateness import critical_path, late_of_step
from verl_multiturn.records.json_text import plain
from verl_multiturn.records.scores import are_right
from verl_multiturn.reward_numbers import ScoreRange, within_rounding

_SPANS = 400
"""The most spans of a conversation in a step's timeline."""


def steps_document(
    whole: pa.Table, number: int, lines: Sequence[Mapping[str, Any]], undone: Collection[int] = ()
) -> dict[str, Any]:
    """Return the steps of a folder: what the trainer said of each, and what its conversations say.

    Args:
        whole: The index.
        number: Number of the folder in it.
        lines: Its lines in `steps.jsonl`.
        undone: Numbers of joins of steps that a later start did again; their conversations count in no step.
    """
    own = whole.filter(pc.equal(whole["dir"], number)) if pc.any(pc.not_equal(whole["dir"], number)).as_py() else whole
    steps: dict[tuple[int, bool], dict[str, Any]] = {}
    for line in lines:
        if line.get("event") in ("step", "validation"):
            key = (line["step"], line["event"] == "validation")
            steps[key] = {**line, **_EMPTY}  # a step that was done again counts as it was the last time
    for entry in _by_step(own, undone):
        key = (entry.pop("at"), entry["validation"])
        steps[key] = {**steps.get(key, {"step": key[0], **_EMPTY}), **entry}
    fates = [
        {"fate": fate, "validation": validation, "count": count}
        for fate, validation, count in _counted(own, ["fate", "validation"])
    ]
    stops = [
        {"stop_reason": stop, "count": count} for stop, count in _counted(own, ["stop_reason"]) if stop is not None
    ]
    ordered = [steps[key] for key in sorted(steps)]
    return plain({"steps": ordered, "fates": fates, "stops": stops})  # type: ignore[no-any-return]


_EMPTY = {"count": 0, "mean_score": None, "groups": None, "equal_groups": None, "all_right": None}
"""Where no group has two scores, none can be equal."""


def _counted(table: pa.Table, names: list[str]) -> list[tuple[Any, ...]]:
    made = table.select(names).group_by(names).aggregate([([], "count_all")]).to_pydict()
    return sorted(zip(*(made[name] for name in names), made["count_all"], strict=True), key=lambda row: -row[-1])


def _by_step(own: pa.Table, undone: Collection[int]) -> list[dict[str, Any]]:
    """Return counts, scores and groups of each step: of what it trained; without a join, of what began in it."""
    joined = pc.is_valid(own["trained_step"])
    known = pc.unique(own["trained_step"].filter(joined))
    # What is filtered is copied: of a million conversations all columns would be 250 MB.
    names = ["trained_step", "step", "validation", "uid", "score", "acc", "response_tokens", "seconds", "join"]
    counts = pc.or_(joined, pc.invert(pc.is_in(own["step"], known)))
    if undone:
        counts = pc.and_(counts, pc.invert(pc.is_in(own["join"], pa.array(undone, own["join"].type))))
    own = own.select(names).filter(counts)
    score = pc.if_else(pc.is_finite(own["score"]), own["score"], None)
    table = pa.table({
        "at": pc.coalesce(own["trained_step"], own["step"]), "validation": own["validation"], "uid": own["uid"],
        "score": score, "right": _rights(own, score), "tokens": own["response_tokens"], "seconds": own["seconds"],
    })  # fmt: skip
    keys = ["at", "validation"]
    sums = table.group_by(keys).aggregate(
        [([], "count_all"), ("score", "mean"), ("tokens", "mean"), ("seconds", "mean"), ("seconds", "max")]
    )
    scored = table.filter(pc.is_valid(table["score"])).group_by([*keys, "uid"])
    groups = scored.aggregate([("score", "min"), ("score", "max"), ("score", "count"), ("right", "all")])
    groups = groups.filter(pc.greater(groups["score_count"], 1))
    low, high, right = (groups[name].to_numpy() for name in ("score_min", "score_max", "right_all"))
    equal = within_rounding(low, high)
    for name, values in (("equal", equal), ("all_right", equal & right.astype(bool))):
        groups = groups.append_column(name, pa.array(values.astype(np.int32)))
    by_groups = groups.group_by(keys).aggregate([([], "count_all"), ("equal", "sum"), ("all_right", "sum")])
    found = {(row["at"], row["validation"]): row for row in by_groups.to_pylist()}
    made = []
    for row in sums.to_pylist():
        own_groups = found.get((row["at"], row["validation"]), {})
        made.append({
            "at": row["at"], "validation": row["validation"], "count": row["count_all"],
            "mean_score": row["score_mean"],
            "mean_tokens": row["tokens_mean"], "mean_seconds": row["seconds_mean"], "max_seconds": row["seconds_max"],
            "groups": own_groups.get("count_all"), "equal_groups": own_groups.get("equal_sum"),
            "all_right": own_groups.get("all_right_sum"),
        })  # fmt: skip
    return made


def _rights(own: pa.Table, score: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return who is right; training and validations have a range of scores each."""
    found = []
    for validation in (False, True):
        known = pc.min_max(score.filter(pc.equal(own["validation"], validation))).as_py()
        found.append(are_right(score, own["acc"], ScoreRange.of([known["min"], known["max"]])))
    return pc.if_else(own["validation"], found[1], found[0])


@dataclass(frozen=True)
class _Timed:
    """What `late_of_step` needs of a conversation."""

    request_id: str
    began: float
    ended: float
    parts_s: dict[str, float]
    generated: int


def step_document(
    step: int,
    conversations: Sequence[tuple[Mapping[str, Any], Mapping[str, Any] | None, float]],
    lines: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the timeline of a step, and who made it late.

    Args:
        step: Number of the step.
        conversations: Each one's row of the index, its record, and what has to be added to its times.
        lines: What the trainer said of the step; the last line counts.
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
    line = lines[-1] if lines else None
    trainer = None if line is None else {name: line.get(name) for name in ("began", "ended", "phases")}
    who = None if late is None else {name: getattr(late, name) for name in _LATE}
    return plain({"step": step, "conversations": shown, "trainer": trainer, "late": who})  # type: ignore[no-any-return]


_LATE = ("request_id", "part", "part_s", "seconds", "by_length")


def _moved(span: Mapping[str, Any], offset: float) -> list[Any]:
    times = (round(float(span[name]) + offset, 4) for name in ("start", "end"))  # more digits fill an exported page
    return [span["kind"], span["name"], span["turn"], *times]

"""What the viewer's index has of the trainer's joins, and which of its rows have a fate that others decide."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from verl_multiturn.observe.view.index_rows import JOIN, SCHEMA
from verl_multiturn.records import schema

OF_JOIN = (
    "request_id", "uid", "number", "row", "validation", "step", "update", "score", "trained", "untrained", "group_mean",
    "group_std",
)  # fmt: skip
GIVEN = [*(name for name, _ in JOIN), "score", "why"]
"""Columns that a join decides."""
OF_FATES = [
    "request_id",
    "uid",
    "number",
    "validation",
    "step",
    "began",
    "ended",
    "event",
    "said",
    "file",
    "join",
    "fate",
]
OF_FATES += ["trained_step", "trained_tokens", "untrained", "why"]
"""Columns of the index that fates are made of."""


def joined(rows: pa.Table, number: int) -> pa.Table:
    """Return what a join has of its conversations, a row for each: the columns `GIVEN` and its names."""
    names = [name for name in OF_JOIN if name not in ("request_id", "trained")]
    first = rows.sort_by([("row", "ascending")]).group_by("request_id", use_threads=False)
    found = first.aggregate([*((name, "first") for name in names), ("trained", "sum")])
    made = {name: found[f"{name}_first"] for name in names} | {"request_id": found["request_id"]}
    made |= {"trained_step": made.pop("step"), "trained_tokens": found["trained_sum"]}
    made |= {"join": pa.array([number] * len(found)), "why": pa.array([""] * len(found))}
    made["untrained"] = pc.fill_null(made["untrained"], "")
    trained = pc.if_else(pc.greater(pc.fill_null(made["trained_tokens"], 0), 0), "trained", "untrained")
    spared = pc.is_in(made["untrained"], pa.array(schema.SPARED))
    trained = pc.if_else(pc.and_(pc.equal(trained, "untrained"), spared), "spared", trained)
    made["fate"] = pc.if_else(pc.fill_null(made["validation"], False), "validated", trained)
    kept = [field for field in SCHEMA if field.name in made]
    return pa.table([made[field.name].cast(field.type) for field in kept], pa.schema(kept))


def undecided(part: pa.Table, everywhere: bool, touched: pa.Array) -> pa.ChunkedArray:
    """Return which rows have a fate that their group's new lines, or another group, a step or the run's end decide."""
    found = pc.is_in(part["uid"], touched)
    if everywhere:
        decided = pc.is_in(part["fate"], pa.array(["raised", "cut", "evicted", "filtered", "discarded", "failed"]))
        found = pc.or_(found, pc.invert(decided))
    return pc.and_(pc.is_null(part["join"]), found)


def joined_row(row: dict[str, Any], start: str) -> dict[str, Any]:
    """Return what `fates` reads of a join, of a row of the index.

    Args:
        row: The row, of which a join is known.
        start: Start of that join.
    """
    made = {name: row[name] for name in ("request_id", "uid", "number", "validation", "untrained")}
    return made | {"start": start, "step": row["trained_step"], "trained": row["trained_tokens"], "row": 0}

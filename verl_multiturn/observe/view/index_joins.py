"""What the viewer's index has of the trainer's joins, and which of its rows have a fate that others decide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from verl_multiturn.observe.view.index_rows import JOIN, SCHEMA
from verl_multiturn.records import schema
from verl_multiturn.records.oddities import are_close, place_fault, unbegun_fault
from verl_multiturn.records.scores import acc_of, rewards_in

OF_JOIN = (
    "request_id", "uid", "number", "row", "validation", "step", "update", "score", "parts", "trained", "untrained",
    "group_mean", "group_std", "otc_factor",
)  # fmt: skip
GIVEN = [*(name for name, _ in JOIN), "score", "why"]
"""Columns that a join decides."""
_ROWS = ("trained", "count", pc.CountOptions(mode="all"))
WHOLE = "whole"
"""Column of `joined`: whether the score is that of the whole conversation, as it was given."""
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
    names = [name for name in OF_JOIN if name not in ("request_id", "trained", "score", "parts")]
    first = rows.sort_by([("row", "ascending")]).group_by("request_id", use_threads=False)
    found = first.aggregate([*((name, "first") for name in names), ("trained", "sum"), _ROWS])
    made = {name: found[f"{name}_first"] for name in names} | {"request_id": found["request_id"]}
    made |= {"trained_step": made.pop("step"), "trained_tokens": found["trained_sum"]}
    made |= {"join": pa.array([number] * len(found)), "why": pa.array([""] * len(found))}
    earned = rewards_in(rows)
    earned = earned.take(pc.index_in(found["request_id"], earned["request_id"].combine_chunks()).combine_chunks())
    made |= {"score": earned["score"], "acc": _accs(earned["parts"])}
    whole = pc.and_(pc.equal(found["trained_count"], 1), pc.equal(pc.fill_null(made.pop("otc_factor"), 1.0), 1.0))
    made["untrained"] = pc.fill_null(made["untrained"], "")
    trained = pc.if_else(pc.greater(pc.fill_null(made["trained_tokens"], 0), 0), "trained", "untrained")
    spared = pc.is_in(made["untrained"], pa.array(schema.SPARED))
    trained = pc.if_else(pc.and_(pc.equal(trained, "untrained"), spared), "spared", trained)
    made["fate"] = pc.if_else(pc.fill_null(made["validation"], False), "validated", trained)
    kept = [field for field in SCHEMA if field.name in made]
    table = pa.table([made[field.name].cast(field.type) for field in kept], pa.schema(kept))
    return table.append_column(WHOLE, whole)


def _accs(parts: pa.ChunkedArray) -> pa.Array:
    """Return the `acc` of each text of a reward's parts, of which many are the same."""
    encoded = parts.combine_chunks().dictionary_encode()
    return pa.array([acc_of(text) for text in encoded.dictionary.to_pylist()], pa.float64()).take(encoded.indices)


def without_invalid(part: pa.Table) -> pa.Table:
    """Return rows of the index, of which an invalid conversation has no score: it says nothing of the model."""
    valid = pc.fill_null(part["valid"], True)
    if pc.all(valid, min_count=0).as_py():
        return part
    scores = pc.if_else(valid, part["score"], pa.scalar(None, pa.float64()))
    return part.set_column(part.schema.get_field_index("score"), SCHEMA.field("score"), scores)


def otherwise_scored(part: pa.Table, score: pa.Array, whole: pa.Array) -> list[str]:
    """Return the request ids of conversations of which a join has another score than their lines.

    Args:
        part: Rows of the index; of those that a join gave already, nothing is said.
        score: The score that a join has of each; null: it has none.
        whole: Whether that is the conversation's score; null: no join has it.
    """
    known = pc.and_(pc.and_(pc.is_valid(part["score"]), pc.is_valid(score)), pc.is_null(part["join"]))
    known = pc.and_(pc.and_(known, pc.equal(pc.fill_null(part["rows"], 1), 1)), pc.fill_null(whole, False))
    apart = pc.fill_null(pc.not_equal(part["score"], score), False)
    found = part.append_column("joined", score).filter(pc.and_(known, apart))
    return [
        request_id
        for request_id, one, other in zip(
            *(found[name].to_pylist() for name in ("request_id", "score", "joined")), strict=True
        )
        if not are_close(one, other)
    ]


def oddities(table: pa.Table, path_of: Callable[[int], Path]) -> list[str]:
    """Return what is odd of conversations that ended: a sentence each.

    Args:
        table: The index.
        path_of: Returns the file of lines that the column `file` names.
    """
    found = []
    ended = table.filter(pc.and_(pc.equal(table["event"], "end"), pc.is_valid(table["file"])))
    unbegun = ended.filter(pc.is_null(ended["began"]))
    for file in pc.unique(unbegun["file"]).to_pylist():
        if (path := path_of(file)).exists():
            found.append(unbegun_fault(path, unbegun.filter(pc.equal(unbegun["file"], file))["request_id"].to_pylist()))
    placed = ended.filter(pc.is_valid(ended["offset"])).select(["file", "offset", "place", "request_id"])
    # A conversation is named once, so that there are fewer places than rows where two rows have one.
    places = placed.group_by(["file", "offset", "place"]).aggregate([("request_id", "count"), ("request_id", "max")])
    again = places.filter(pc.greater(places["request_id_count"], 1))
    for file in pc.unique(again["file"]).to_pylist():
        own = again.filter(pc.equal(again["file"], file))
        found.append(place_fault(path_of(file), own["request_id_max"].to_pylist()))
    return found


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

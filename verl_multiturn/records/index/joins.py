"""Columns of the index from the trainer's joins, and its rows whose fate others decide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from verl_multiturn.records import schema
from verl_multiturn.records.index.rows import JOIN, SCHEMA
from verl_multiturn.records.read.contradictions import are_close, place_fault, unbegun_fault
from verl_multiturn.records.read.scores import acc_of, rewards_in_each

OF_JOIN = (
    "request_id", "uid", "number", "row", "validation", "step", "update", "role", "score", "parts", "trained",
    "untrained", "group_mean", "group_std", "otc_factor",
)  # fmt: skip
GIVEN = [*(name for name, _ in JOIN), "score", "why"]
"""Columns that a join decides."""
_ROWS = ("trained", "count", pc.CountOptions(mode="all"))
WHOLE = "whole"
"""Column of `joined`: whether the score is that of the whole conversation, as it was given."""
OF_FATES = [
    "request_id", "uid", "number", "validation", "step", "began", "ended", "event", "said", "file", "join", "fate",
    "fate_step", "trained_step", "trained_tokens", "untrained", "why", "partly", "undone",
]  # fmt: skip
"""Columns of the index that fates are made of."""


def joined(rows: pa.Table, number: int) -> pa.Table:
    """Return a join's data of its conversations, a row for each: the columns `GIVEN`, its names, and `WHOLE`.

    Args:
        rows: Its rows, with the columns `OF_JOIN`, each once. Those of another agent loop have no request id; a
            conversation of them is that of a `uid` and a `number`.
        number: Number of the join in the index.
    """
    is_named = pc.is_valid(rows["request_id"])
    place = pc.binary_join_element_wise(rows["uid"], rows["number"].cast(pa.string()), "/")
    rows = rows.append_column("is_named", is_named)
    rows = rows.set_column(0, "request_id", pc.if_else(is_named, rows["request_id"], place))
    rows = _with_causes(rows.sort_by([("row", "ascending")]))
    names = [name for name in OF_JOIN if name not in ("request_id", "trained", "role", "score", "parts", "untrained")]
    first = [(name, "first") for name in (*names, "is_named", *_CAUSES)]
    found = rows.group_by("request_id", use_threads=False).aggregate(
        [*first, ("trained", "sum"), _ROWS, ("is_partly", "any")]
    )
    made = {name: found[f"{name}_first"] for name in names}
    made |= {"trained_step": made.pop("step"), "trained_tokens": found["trained_sum"]}
    made |= {"join": pa.array([number] * len(found)), "undone": pa.array([False] * len(found))}
    made["fate_step"] = pa.nulls(len(found), pa.int32())
    earned = rewards_in_each(rows)
    earned = earned.take(pc.index_in(found["request_id"], earned["request_id"].combine_chunks()).combine_chunks())
    made |= {"score": earned["score"], "acc": _accs(earned["parts"]), "roles": earned["roles"]}
    made |= {"untrained": pc.fill_null(found["cause_first"], ""), "joined_rows": found["trained_count"]}
    whole = pc.and_(pc.equal(found["trained_count"], 1), pc.equal(pc.fill_null(made.pop("otc_factor"), 1.0), 1.0))
    made |= _fates(found)
    made["request_id"] = pc.if_else(found["is_named_first"], found["request_id"], pa.scalar(None, pa.string()))
    kept = [field for field in SCHEMA if field.name in made]
    table = pa.table([made[field.name].cast(field.type) for field in kept], pa.schema(kept))
    return table.append_column(WHOLE, whole)


_CAUSES = ("cause", "spared", "other")


def _with_causes(rows: pa.Table) -> pa.Table:
    """Return rows with the columns of causes that `_fates` reads of each conversation."""
    cause = pc.if_else(pc.equal(rows["untrained"], ""), pa.scalar(None, pa.string()), rows["untrained"])
    is_spared = pc.is_in(cause, pa.array(schema.SPARED))
    none = pa.scalar(None, pa.string())
    for name, values in (
        ("cause", cause),
        ("spared", pc.if_else(is_spared, cause, none)),
        ("other", pc.if_else(is_spared, none, cause)),
        ("is_partly", pc.invert(pc.is_in(cause, pa.array([None, "unsampled", *schema.SPARED], pa.string())))),
    ):
        rows = rows.append_column(name, values)
    return rows


def _fates(found: pa.Table) -> dict[str, Any]:
    """Return the fates of conversations that a join has, as `fates.fates` names them.

    Args:
        found: The row that `joined` found for each.
    """
    validated = pc.fill_null(found["validation_first"], False)
    trained = pc.greater(pc.fill_null(found["trained_sum"], 0), 0)
    spared = pc.is_valid(found["spared_first"])
    partly = pc.and_(pc.and_(trained, found["is_partly_any"]), pc.invert(validated))
    fate = pc.if_else(trained, "trained", pc.if_else(spared, "spared", "untrained"))
    of_trained = pc.if_else(partly, pc.fill_null(found["other_first"], ""), "")
    of_untrained = pc.coalesce(found["spared_first"], found["cause_first"], pa.scalar("unsampled"))
    collected = pc.fill_null(pc.equal(found["cause_first"], "collected"), False)
    why = pc.if_else(trained, of_trained, pc.if_else(collected, "", of_untrained))
    return {
        "fate": pc.if_else(validated, "validated", pc.if_else(collected, "collected", fate)),
        "why": pc.if_else(validated, pc.fill_null(found["cause_first"], ""), why),
        "partly": partly,
    }


def _accs(parts: pa.ChunkedArray) -> pa.Array:
    """Return the `acc` of each text of a reward's parts, of which many are the same."""
    encoded = parts.combine_chunks().dictionary_encode()
    return pa.array([acc_of(text) for text in encoded.dictionary.to_pylist()], pa.float64()).take(encoded.indices)


def without_invalid(part: pa.Table) -> pa.Table:
    """Return rows of the index, of which an invalid conversation has no score: it does not measure the model."""
    valid = pc.fill_null(part["valid"], True)
    if pc.all(valid, min_count=0).as_py():
        return part
    scores = pc.if_else(valid, part["score"], pa.scalar(None, pa.float64()))
    return part.set_column(part.schema.get_field_index("score"), SCHEMA.field("score"), scores)


def otherwise_scored(part: pa.Table, score: pa.Array, whole: pa.Array) -> list[str]:
    """Return the request ids of conversations of which a join has another score than their lines.

    Args:
        part: Rows of the index; those that a join gave already are skipped.
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
    """Return the oddities of conversations that ended: a sentence each.

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


_DECIDED = ["raised", "cut", "evicted", "filtered", "discarded", "failed", "collected", "dropped"]
"""Fates that no other group, step or end of a run changes."""


def undecided(part: pa.Table, everywhere: bool, touched: pa.Array) -> pa.ChunkedArray:
    """Return which rows have a fate that their group's new lines, or another group, a step or the run's end decide."""
    found = pc.is_in(part["uid"], touched)
    if everywhere:
        decided = pc.is_in(part["fate"], pa.array(_DECIDED))
        found = pc.or_(found, pc.invert(decided))
    return pc.and_(pc.is_null(part["join"]), found)


def joined_row(row: dict[str, Any], start: str) -> dict[str, Any]:
    """Return the fields of a join that `fates` reads, from a row of the index.

    Args:
        row: The row, of which a join is known.
        start: Start of that join.
    """
    made = {name: row[name] for name in ("request_id", "uid", "number", "validation", "untrained")}
    return made | {"start": start, "step": row["trained_step"], "trained": row["trained_tokens"], "row": 0}


def figures_of(rows: pa.Table) -> dict[str, Any]:
    """Return the figures that only a join's rows have: how many there are, and why they were untrained.

    Args:
        rows: Its rows, each once.

    Returns:
        `rows` and `untrained`: the number of rows by cause, those of most rows first.
    """
    counted = pc.value_counts(rows["untrained"].combine_chunks())
    causes = {each["values"]: each["counts"] for each in counted.to_pylist() if each["values"]}
    return {"rows": len(rows), "untrained": dict(sorted(causes.items(), key=lambda cause: -cause[1]))}

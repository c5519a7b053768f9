"""What of an evaluation has ended, read from its folder of records: where a start goes on that a kill has ended.

Invariant: a conversation has ended when its record and its score are both on disk, and can be read. What a kill or a
damaged file took of either is asked for again, and the half that stayed counts nowhere.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa

from verl_multiturn.evaluation.plan import Asked
from verl_multiturn.records.reader import Records

_COLUMNS = ["request_id", "uid", "number", "row", "score", "untrained"]


def ended_in(records: Path) -> dict[Asked, float]:
    """Return the score of each conversation that has ended, is valid and was judged.

    Args:
        records: The folder of records; it need not exist.
    """
    if not records.is_dir():
        return {}
    kept = recorded(records)
    found: dict[Asked, float] = {}
    for _, table in Records(records).joins(_COLUMNS):
        for request_id, row in _conversations(table).items():
            is_named = row["uid"].isdecimal()  # a stranger's join may say anything
            if request_id in kept and is_named and row["untrained"] is None and _is_judged(row["score"]):
                found[Asked(int(row["uid"]), int(row["number"]))] = row["score"]
    return found


def _is_judged(score: float | None) -> bool:
    return score is not None and math.isfinite(score)


def recorded(records: Path) -> set[str]:
    """Return the ids of the conversations whose records can be read."""
    return {record["request_id"] for record in Records(records).records()}


def _conversations(table: pa.Table) -> dict[str, dict[str, Any]]:
    """Return the rows of a join as conversations: of each the sum of its rows' scores."""
    found: dict[str, dict[str, Any]] = {}
    once = {(row["request_id"], row["row"]): row for row in table.to_pylist()}
    for row in once.values():
        first = found.setdefault(row["request_id"], row)
        if first is not row:
            first["untrained"] = first["untrained"] or row["untrained"]
            is_scored = first["score"] is not None and row["score"] is not None
            first["score"] = first["score"] + row["score"] if is_scored else None
    return found

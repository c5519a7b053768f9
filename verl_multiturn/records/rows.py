"""Rows of a record: token columns into runs, and back.

Tokens that have the same mask, weight version, turn and source are adjacent, so these four columns are written as
runs. A log-probability is written for sampled tokens alone: any other has 0.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_multiturn.certificate.check import SAMPLED

_IN_RUNS = ("mask", "versions", "turn_ids", "sources")


def row_of(
    prompt_length: int,
    ids: Sequence[int],
    mask: Sequence[int],
    logprobs: Sequence[float],
    versions: Sequence[int],
    turn_ids: Sequence[int],
    sources: Sequence[int],
    images: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return a `schema.Row` of full columns, each with one value for each token.

    The ids and the log-probabilities are arrays, which `json_text.line_of` writes as lists.
    """
    with np.errstate(over="ignore"):
        kept = np.asarray(logprobs, np.float32)
    return {
        "prompt_length": prompt_length,
        "ids": np.asarray(ids, np.int64),
        "logprobs": kept[np.asarray(sources, np.int64) == SAMPLED],
        "runs": _runs([mask, versions, turn_ids, sources]),
        "images": list(images),
    }


def version_runs(versions: Sequence[int] | NDArray[Any]) -> list[list[int]]:
    """Return the runs of equal weight versions, each with its count."""
    return _runs([versions])


def _runs(columns: Sequence[Sequence[int] | NDArray[Any]]) -> list[list[int]]:
    lists = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns]
    runs: list[list[int]] = []
    last: tuple[int, ...] | None = None
    for values in zip(*lists, strict=True):
        if values == last:
            runs[-1][0] += 1
        else:
            last = values
            runs.append([1, *map(int, values)])
    return runs


def columns(row: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the full columns of a row: `ids`, `mask`, `logprobs`, `versions`, `turn_ids` and `sources`.

    A token that was not sampled has the log-probability 0.0. NaN and infinities are numbers here.

    Raises:
        ValueError: The runs, the ids and the log-probabilities have different numbers of tokens.
    """
    runs = checked(row)
    found = {name: np.repeat(runs[:, index], runs[:, 0]).tolist() for index, name in enumerate(_IN_RUNS, start=1)}
    each = iter(row["logprobs"])
    logprobs = [float(next(each)) if source == SAMPLED else 0.0 for source in found["sources"]]
    return {"ids": list(row["ids"]), **found, "logprobs": logprobs}


def checked(row: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return the runs of a row, of which columns can be made.

    Raises:
        ValueError: The runs, the ids and the log-probabilities have different numbers of tokens.
    """
    runs = np.array([list(run) for run in row["runs"]], np.int64).reshape(-1, 1 + len(_IN_RUNS))
    counts, ids, given = runs[:, 0], len(row["ids"]), len(row["logprobs"])
    sampled = int(counts[runs[:, _IN_RUNS.index("sources") + 1] == SAMPLED].sum())
    if (counts < 0).any() or (counts > ids).any() or int(counts.sum()) != ids or sampled != given:
        raise ValueError(
            f"a row has {ids} ids, runs of {int(counts.sum())} tokens of which {sampled} are sampled, and "
            f"{given} logprobs; expected one id for each token, and one logprob for each sampled one"
        )
    return runs

"""The advantages of the completions of `branches.py`, computed anew from the records of a run, from the definition.

It shares nothing with the trainer's own computation: the scores are read from the sampled tokens. The actor wrote down
its training inputs (`written_loss.py`).
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from recipes.proxy_quickstart.branches import OWN_REWARD, PLANNER
from recipes.proxy_quickstart.same_prompts import turns_of
from recipes.quickstart.task import extract_answer, score_answer
from verl_multiturn.records.rows import columns

Row = list[tuple[int, float]]
"""A row of the batch: for each completion its number of tokens, and its advantage."""


@dataclass(frozen=True)
class Told:
    """The facts of a run that the computation needs."""

    credit: str
    """`proxy.credit`."""
    gamma: float
    """`proxy.gamma`."""
    decode: Callable[[Sequence[int]], str]
    """Returns the text of token ids, without special tokens."""
    answers: Mapping[str, str]
    """The right answers, by question."""


def difference(records: Sequence[Mapping[str, Any]], trained: Sequence[Row], told: Told) -> float | None:
    """Return the largest difference between the advantages that were trained and those expected; None without any.

    Args:
        records: Records of the sampled sessions.
        trained: Rows that the actor was given, in the order of the steps.
        told: The facts of the run.

    Raises:
        ValueError: The actor was given other rows: more or fewer, of other lengths, or with a value that is not a
            number.
    """
    by_step: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        by_step[record["step"]].append(record)
    found: list[float] = []
    begin = 0
    for step in sorted(by_step):
        expected = list(_rows(by_step[step], told))
        given = trained[begin : begin + len(expected)]
        begin += len(expected)
        if strange := [value for row in given for _, value in row if not math.isfinite(value)]:
            raise ValueError(f"step {step}: the actor was given the advantage {strange[0]}, expected a number")
        largest = largest_difference(expected, given)
        if largest is None:
            raise ValueError(f"step {step}: the actor was given {len(given)} rows, which are not those of the records")
        if any(given):
            found.append(largest)
    if begin != len(trained):
        raise ValueError(f"the actor was given {len(trained)} rows, and the records have {begin}")
    return max(found, default=None)


def largest_difference(expected: Sequence[Row], given: Sequence[Row]) -> float | None:
    """Return the largest difference between the advantages of two lots of rows, 0.0 without; None for other lengths.

    The rows have no names: rows with the same numbers of tokens are paired with the least sum of differences.
    """
    ours, theirs = _by_lengths(expected), _by_lengths(given)
    if {each: len(rows) for each, rows in ours.items()} != {each: len(rows) for each, rows in theirs.items()}:
        return None
    found = 0.0
    for lengths, rows in ours.items():
        apart = np.abs(np.array(rows)[:, None] - np.array(theirs[lengths])).max(axis=2, initial=0.0)
        found = max(found, float(apart[linear_sum_assignment(apart)].max()))
    return found


def read_written(path: Path) -> list[Row]:
    """Return the rows that `written_loss` wrote."""
    return [
        [(tokens, value) for tokens, value in json.loads(line)]
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def _by_lengths(rows: Sequence[Row]) -> dict[tuple[int, ...], list[list[float]]]:
    """Return the advantages of rows, by the numbers of tokens of their completions."""
    found: dict[tuple[int, ...], list[list[float]]] = defaultdict(list)
    for row in rows:
        found[tuple(tokens for tokens, _ in row)].append([value for _, value in row])
    return found


def _rows(records: Sequence[Mapping[str, Any]], told: Told) -> Iterator[Row]:
    """Yield the rows that the sessions of a step should be trained as."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        if record["valid"]:
            groups[record["uid"]].append(record)
    for group in groups.values():
        scored = [(record, *_scores(record, told)) for record in group]
        totals = [outcome + sum(own) for _, outcome, own in scored]
        mean = statistics.mean(totals)
        scale = statistics.stdev(totals) + 1e-6 if len(totals) > 1 else 1.0
        for record, outcome, own in scored:
            for row, earned in zip(record["rows"], own, strict=True):
                spans = turns_of(columns(row)["mask"])
                values = []
                for number in range(len(spans)):
                    after = told.gamma ** (len(spans) - 1 - number)
                    if max(totals) == min(totals):
                        value = 0.0
                    elif told.credit == "completion":
                        value = (after * (outcome + earned) - mean) / scale
                    else:
                        value = (outcome + sum(own) - mean) / scale * (after if told.credit == "discounted" else 1)
                    values.append(value if len(totals) > 1 else 0.0)
                yield [(end - start, value) for (start, end), value in zip(spans, values, strict=True)]


def _scores(record: Mapping[str, Any], told: Told) -> tuple[float, list[float]]:
    """Return the reward of a session, and those of the last completion of each of its rows.

    A session whose agent failed earned nothing: `error_reward` is 0.
    """
    if record["stop_reason"] != "finished":
        return 0.0, [0.0] * len(record["rows"])
    right, is_worker = [], []
    for row in record["rows"]:
        prompt = told.decode(row["ids"][: row["prompt_length"]])
        (answer,) = {answer for question, answer in told.answers.items() if question in prompt}
        start, end = turns_of(columns(row)["mask"])[-1]
        is_worker.append(PLANNER not in prompt)
        right.append(is_worker[-1] * score_answer(extract_answer(told.decode(row["ids"][start:end])), answer))
    return max(right), [OWN_REWARD * each for each in right]

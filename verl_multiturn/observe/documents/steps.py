"""Documents of a run's steps and validations: the trainer's line of each, and the rewards of its conversations.

- A step's data comes from its join; where there is none, from the conversations that began in it (`basis`).
- A step that was done again counts as it was the last time.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl_multiturn.observe.documents.roles import group_means, means_of
from verl_multiturn.records.read.joins import JoinName
from verl_multiturn.records.read.scores import are_right, by_role, key_of
from verl_multiturn.rows.reward_numbers import RoleRewards, ScoreRange, have_signal, within_rounding

Key = tuple[int, bool]
"""Number of a step, and whether the validation after it is meant."""
LEFT = ("evicted", "filtered", "failed", "discarded", "rerolled")
"""Fields of a step's line on groups that were not trained."""
_OF_LINE = ("start", "began", "ended", "phases", "join", "metrics")
_UNSAID: dict[str, Any] = {"start": None, "began": None, "ended": None, "phases": {}, "join": None, "metrics": {}}
_NO_ROWS: dict[str, Any] = {"rows": 0, "untrained": {}}
_NOTHING: dict[str, Any] = {
    "basis": "trained", "conversations": 0, "score": None, "groups": 0, "compared_groups": 0, "equal_groups": 0,
    "all_right": 0, "trained_tokens": 0, "mean_tokens": None, "mean_seconds": None, "max_seconds": None,
}  # fmt: skip


def lines_of(lines: Iterable[Mapping[str, Any]]) -> dict[Key, Mapping[str, Any]]:
    """Return the lines of steps and validations, of each the last."""
    return {(line["step"], line["event"] == "validation"): line for line in lines}


def step_entries(
    conversations: pa.Table,
    lines: Mapping[Key, Mapping[str, Any]],
    figures: Mapping[JoinName, Mapping[str, Any]],
    undone: Collection[int],
) -> dict[Key, dict[str, Any]]:
    """Return the entry of each step and validation, in their order.

    Args:
        conversations: The conversations of a folder, those without a request id, too; columns of the index.
        lines: The result of `lines_of`.
        figures: The result of `Index.figures`.
        undone: The result of `Index.undone`; the conversations of these joins count in no step.
    """
    rows = _rows_of(figures)
    is_split = len({(name.step, name.validation) for name in figures}) < len(figures)
    counted = _counted(conversations, undone, is_split)
    found = {}
    for key in sorted({*lines, *rows, *counted}):
        line = lines.get(key) or {**_UNSAID, "join": "" if key in rows else None}
        found[key] = {
            "event": "validation" if key[1] else "step",
            "step": key[0],
            **{name: line[name] for name in _OF_LINE},
            **rows.get(key, _NO_ROWS),
            **counted.get(key, _NOTHING),
            **{name: len(line.get(name) or ()) for name in LEFT},
        }
    return found


def _rows_of(figures: Mapping[JoinName, Mapping[str, Any]]) -> dict[Key, dict[str, Any]]:
    """Return how many rows each step had, and why some were not trained; an evaluation may have several joins."""
    found: dict[Key, dict[str, Any]] = {}
    for name, own in figures.items():
        before = found.get((name.step, name.validation), _NO_ROWS)
        untrained = Counter(before["untrained"])
        untrained.update(own["untrained"])
        found[name.step, name.validation] = {
            "rows": before["rows"] + own["rows"],
            "untrained": dict(untrained.most_common()),
        }
    return {key: own for key, own in found.items() if own["rows"]}


def _counted(own: pa.Table, undone: Collection[int], is_split: bool) -> dict[Key, dict[str, Any]]:
    """Return counts, scores and groups of each step: of its trained conversations; without a join, of those begun.

    Args:
        own: The conversations.
        undone: The joins whose conversations count in no step.
        is_split: Whether a step has several joins, as an evaluation that went on, where one conversation of the data's
            may be two of the index.
    """
    # A filtered table is copied: of a million conversations all columns would be 250 MB.
    names = ["trained_step", "step", "validation", "uid", "number", "score", "acc", "response_tokens", "seconds"]
    own = own.select([*names, "trained_tokens", "join", "roles"])
    trained, begun = _keys(own["trained_step"], own["validation"]), _keys(own["step"], own["validation"])
    joined = pc.is_valid(trained)
    counts = pc.or_(joined, pc.invert(pc.is_in(begun, pc.unique(trained.drop_null()))))
    if undone:
        counts = pc.and_(counts, pc.invert(pc.is_in(own["join"], pa.array(undone, own["join"].type))))
    own, key, joined = own.filter(counts), pc.coalesce(trained, begun).filter(counts), joined.filter(counts)
    score = pc.if_else(pc.is_finite(own["score"]), own["score"], None)
    table = pa.table({
        "key": key, "joined": joined, "uid": own["uid"], "number": own["number"], "score": score,
        "right": _rights(own, score), "tokens": own["response_tokens"], "seconds": own["seconds"],
        "trained": own["trained_tokens"], "roles": own["roles"],
    })  # fmt: skip
    of_steps = [("score", "list"), ("joined", "any"), ("trained", "sum"), ("tokens", "mean")]
    counted = table.group_by("key").aggregate([*of_steps, ("seconds", "mean"), ("seconds", "max")])
    scores = counted["score_list"].combine_chunks()
    every, ends = (
        scores.flatten().to_numpy(zero_copy_only=False),
        np.cumsum([0, *pc.list_value_length(scores).to_pylist()]),
    )
    steps, groups = counted.drop_columns("score_list").to_pydict(), _groups_counted(table, is_split)
    found = {}
    for at, step in enumerate(steps["key"]):
        known = every[ends[at] : ends[at + 1]]
        known = known[np.isfinite(known)]
        found[step // 2, bool(step % 2)] = {
            "basis": "trained" if steps["joined_any"][at] else "begun",
            "score": math.fsum(known.tolist()) / len(known) if len(known) else None,
            "trained_tokens": steps["trained_sum"][at] or 0,
            "mean_tokens": steps["tokens_mean"][at],
            "mean_seconds": steps["seconds_mean"][at],
            "max_seconds": steps["seconds_max"][at],
            **groups[step],
        }
    return found


def _keys(step: pa.ChunkedArray, validation: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return steps and validations as one number each."""
    return pc.add(pc.multiply(step.cast(pa.int64()), 2), pc.fill_null(validation, False).cast(pa.int64()))


def _groups_counted(table: pa.Table, is_split: bool) -> dict[int, dict[str, Any]]:
    """Return by step how many conversations and groups it had, and how many groups without a signal."""
    number = "count_distinct" if is_split else "count"
    groups = table.group_by(["key", "uid"]).aggregate(
        [("number", number), ("score", "min"), ("score", "max"), ("score", "count"), ("right", "all")]
    )
    several = pc.greater(groups["score_count"], 1).to_numpy()
    low, high = groups["score_min"].to_numpy(), groups["score_max"].to_numpy()
    with np.errstate(invalid="ignore"):  # of groups without a score
        equal = several & within_rounding(low, high)
    if unlike := _differing_by_role(table):
        names = zip(groups["key"].to_pylist(), groups["uid"].to_pylist(), strict=True)
        equal &= np.array([name not in unlike for name in names], bool)
    right = pc.fill_null(groups["right_all"], False).to_numpy()
    made = {"compared": several, "equal": equal, "right": equal & right}
    for name, values in made.items():
        groups = groups.append_column(name, pa.array(values.astype(np.int32)))
    sums = [(f"number_{number}", "sum"), ([], "count_all"), *((name, "sum") for name in made)]
    found = groups.group_by("key").aggregate(sums).to_pylist()
    return {
        row["key"]: {
            "conversations": row[f"number_{number}_sum"],
            "groups": row["count_all"],
            "compared_groups": row["compared_sum"],
            "equal_groups": row["equal_sum"],
            "all_right": row["right_sum"],
        }
        for row in found
    }


def _differing_by_role(table: pa.Table) -> set[tuple[int, str]]:
    """Return the groups whose conversations differ in the reward of a role, by step and uid: their sums may not."""
    own = table.filter(pc.and_(pc.is_valid(table["roles"]), pc.is_valid(table["score"])))
    found: dict[tuple[int, str], list[RoleRewards]] = defaultdict(list)
    for row in own.select(["key", "uid", "score", "roles"]).to_pylist():
        found[row["key"], row["uid"]].append(by_role(row["score"], row["roles"]))
    return {key for key, rewards in found.items() if have_signal(rewards)}


def _rights(own: pa.Table, score: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return who is right; training and validations have a range of scores each."""
    found = []
    for validation in (False, True):
        known = pc.min_max(score.filter(pc.equal(own["validation"], validation))).as_py()
        found.append(are_right(score, own["acc"], ScoreRange.of([known["min"], known["max"]])))
    return pc.if_else(own["validation"], found[1], found[0])


def groups_of(rows: Sequence[Mapping[str, Any]], rewards: Mapping[str, RoleRewards]) -> list[dict[str, Any]]:
    """Return the groups of a step or a validation; where there are roles, `roles` has the rewards of each.

    Args:
        rows: Its rows in the join.
        rewards: The conversations' rewards by role (`scores.by_role`), by their keys (`key_of`).
    """
    by_uid: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_uid.setdefault(row["uid"], []).append(row)
    found = []
    for uid, own in by_uid.items():
        numbers = {key_of(row): row["number"] for row in own}
        earned = [rewards.get(key) or {} for key in sorted(numbers, key=lambda key: (numbers[key], key))]
        known = [each for each in earned if each]
        kept = {"uid": uid, "equal": len(known) > 1 and not have_signal(known)}
        kept |= {"scores": [math.fsum(each.values()) if each else None for each in earned]}
        kept |= {"untrained": dict(Counter(row["untrained"] for row in own if row["untrained"]))}
        found.append({**kept, **group_means(means_of(own), earned)})
    return found

"""Add up the rewards of the conversations in a run's folder: one rule for all who read it.

    a gateway's reward lines ────────────────┐
    join that counts ──▶ rewards_in ──▶ joined_rewards ──┐
    lines ──▶ scores of conversations without a join ────┴─▶ rewards_of

- A conversation has a reward if it is valid, and each of its rows in the join has a finite score and no cause that
  voids a score (`NO_SCORE`).
- Its reward is the sum over its rows. verl's score lies on the last one, those of tools, of an interaction and of an
  agent's completions where they were earned.
- Where rows have roles, a role's reward is the sum over its rows.
- Of several joins that have a conversation the last one counts (`joins.order`).
- Where no join has it, the score of its line counts.
- The reward of a gateway's session is that of its reward lines (`sessions.reward_of_session`), whatever else has one: a
  join of it was made of the lines that were there by then.

Invariant: nothing else of the package adds scores of a join up to the reward of a conversation.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from verl_multiturn.records.read import joins
from verl_multiturn.records.read.joins import JoinName
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.sessions import LARGEST_REWARD
from verl_multiturn.rows.reward_numbers import RIGHT_ACC, RoleRewards, ScoreRange

FAILED, TIMED_OUT = "failed", "timed_out"
"""Numbers that a reward reports where it broke, and where it was late (`rewards/score.py`)."""
_LEFT_OUT = ("outage", "unjudgeable")
NO_SCORE = ("invalid", "outage", "reward_outage", "failed")
"""Causes in the join's column `untrained` that void the score of a row."""
COLUMNS = ("request_id", "uid", "number", "row", "role", "score", "parts", "trained", "untrained")
"""Columns of a join that `rewards_in` reads."""
LARGEST = LARGEST_REWARD
"""The largest size of a row's score: sums of 2^53 of these stay finite, and with them means."""
_KEY = ["request_id", "place"]
"""Columns that name a conversation as `key_of` does: its request id, or without one its place, `uid` and `number`."""


class Reward(NamedTuple):
    """Hold the reward of a conversation, as `rewards_of` returns it."""

    score: float | None = None
    """None: it has no reward that counts."""
    validation: bool = False
    parts_text: str | None = None
    """The column `parts` of its last row."""
    join: JoinName | None = None
    """The join that has it; None: no join has the conversation."""
    undone: bool = False
    """Whether a later start did the step again, so that the step's figures are those of other conversations."""
    uid: str = ""
    number: int = 0
    trained: int | None = None
    """Its tokens that the loss counted; None: no join has the conversation."""
    roles_text: str | None = None
    """The reward of each role, as `rewards_in` has it; None without roles."""

    @property
    def by_role(self) -> RoleRewards:
        """Return its rewards for `have_signal`: of each role, or without roles the whole; {} without a reward."""
        return by_role(self.score, self.roles_text)

    @property
    def of_roles(self) -> dict[str, float]:
        """Return the reward of each role; {} without roles, or without a reward."""
        return {role: reward for role, reward in self.by_role.items() if role is not None}

    @property
    def parts(self) -> dict[str, float]:
        """Return the reward's parts, and the other numbers that its function reported."""
        return parts_of(self.parts_text)

    @property
    def step(self) -> int | None:
        """Return the step that trained or validated it; None: it is not known."""
        return None if self.join is None else self.join.step

    @property
    def acc(self) -> float | None:
        """Return the value `acc` that its function reported; None without one."""
        return acc_of(self.parts_text)


def has_failed(parts: Mapping[str, float]) -> bool:
    """Return whether a reward broke, so that its score of 0 is no verdict; one that was left out for it does not count.

    Args:
        parts: Numbers that the reward function reported, by name.
    """
    is_left_out = any(parts.get(name, 0.0) > 0 for name in _LEFT_OUT)
    return _is_ours(parts) and parts.get(FAILED, 0.0) > 0 and not is_left_out


def was_late(parts: Mapping[str, float]) -> bool:
    """Return whether the time of a reward ran out, so that its score of 0 is no verdict.

    Args:
        parts: As in `has_failed`.
    """
    return _is_ours(parts) and parts.get(TIMED_OUT, 0.0) > 0


def _is_ours(parts: Mapping[str, float]) -> bool:
    """Return whether parts are those of our `compute_score`: another function may mean something else by a name."""
    return all(name in parts for name in (FAILED, TIMED_OUT, *_LEFT_OUT))


def parts_of(text: str | None) -> dict[str, float]:
    """Return the finite numbers in the column `parts` by name, those of an object within it as `outer/inner`."""
    named = leaves_of(_read(text)).items()
    return {name: number for name, value in named if (number := _finite(value)) is not None}


def leaves_of(parts: Any) -> dict[str, Any]:
    """Return the values of the column `parts` by name, those of an object within it, as `verdicts`, as `outer/inner`.

    Args:
        parts: The value of its JSON, also a stranger's; what is in no object has the name "".
    """
    found: dict[str, Any] = {}
    waiting = [("", parts)]  # no recursion: a stranger's may be nested as deep as the reader allows
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            inner = [(f"{name}/{key}" if name else str(key), item) for key, item in value.items()]
            waiting += reversed(inner)
        else:
            found[name] = value
    return found


def by_role(score: float | None, roles_text: str | None) -> RoleRewards:
    """Return a conversation's rewards for `have_signal`: of each role, or without roles the whole; {} without a reward.

    Args:
        score: Its whole reward; None: it has none.
        roles_text: The column `roles` of `rewards_in`.
    """
    if score is None:
        return {}
    found = _read(roles_text) if roles_text else None
    if not isinstance(found, dict):
        return {None: score}
    return {str(role): number for role, value in found.items() if (number := _finite(value)) is not None}


def _read(text: str | None) -> Any:
    try:
        return orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        pass  # it knows no NaN
    with contextlib.suppress(ValueError, RecursionError):  # a join of a stranger
        return json.loads(text or "{}")
    return {}


def _finite(value: Any) -> float | None:
    """Return a number of JSON as a float; None for one that is beyond a float, and for another type."""
    with contextlib.suppress(OverflowError):
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None


def acc_of(text: str | None) -> float | None:
    """Return the finite number `acc` in the column `parts`; None: there is none."""
    if text is None or '"acc"' not in text:
        return None
    value = _read(text)
    return _finite(value.get("acc")) if isinstance(value, dict) else None


def sum_of_rows(scores: Iterable[float | None]) -> float | None:
    """Return the reward of a conversation from the scores of its rows; None: a row has none of a usable size."""
    total = 0.0
    for score in scores:
        if score is None or not abs(score) <= LARGEST:
            return None
        total += score
    return total


def rewards_in(rows: pa.Table) -> pa.Table:
    """Return the rewards of a join's conversations by it.

    Args:
        rows: Rows of a join; a column of `COLUMNS` that is missing is null. Of a row that occurs twice, as in a
            stranger's join, the last counts.

    Returns:
        A row for each conversation: `request_id`, `uid`, `number`; `score`, null where it has no reward that counts;
        `parts`, those of its last row that has some; `trained`, its tokens that the loss counted; `roles`, the reward
        of each role as a JSON object, null where it has no reward or its rows no role.
    """
    return rewards_in_each(each_once(joins.filled(rows, COLUMNS)))


def rewards_in_each(rows: pa.Table) -> pa.Table:
    """Return the same as `rewards_in`, of rows that occur in the join once each, with all of `COLUMNS`."""
    rows = _named(rows).sort_by([("row", "ascending")])
    said = pc.invert(pc.is_in(rows["untrained"], pa.array(NO_SCORE)))
    counts = pc.and_(said, pc.fill_null(pc.less_equal(pc.abs(rows["score"]), LARGEST), False))
    held = rows.select([*_KEY, "uid", "number", "parts", "trained"])
    held = held.append_column("score", pc.if_else(counts, rows["score"], 0.0)).append_column("counts", counts)
    held = held.append_column("role", rows["role"])
    wanted = [("uid", "first"), ("number", "first"), ("score", "sum"), ("counts", "all"), ("parts", "last")]
    found = held.group_by(_KEY, use_threads=False).aggregate([*wanted, ("trained", "sum")])
    return pa.table({
        "request_id": found["request_id"], "uid": found["uid_first"], "number": found["number_first"],
        "score": pc.if_else(found["counts_all"], found["score_sum"], pa.scalar(None, pa.float64())),
        "parts": found["parts_last"], "trained": found["trained_sum"], "roles": _roles(held, found),
    })  # fmt: skip


def _roles(held: pa.Table, found: pa.Table) -> pa.Array:
    """Return the column `roles` of conversations.

    Args:
        held: Their rows, with the columns `_KEY`, `role` and `score`.
        found: A row for each conversation, with `_KEY` and `counts_all`.
    """
    spoken = held.filter(pc.is_valid(held["role"]))
    if not len(spoken):
        return pa.nulls(len(found), pa.string())
    made: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    sums = spoken.group_by([*_KEY, "role"], use_threads=False).aggregate([("score", "sum")])
    for row in sums.to_pylist():
        made[row["request_id"], row["place"]][row["role"]] = row["score_sum"]
    keys = zip(*(found[name].to_pylist() for name in (*_KEY, "counts_all")), strict=True)
    texts = [json.dumps(made[key[:2]]) if key[2] and key[:2] in made else None for key in keys]
    return pa.array(texts, pa.string())


def _named(rows: pa.Table) -> pa.Table:
    """Return rows with the columns `_KEY`."""
    is_named = pc.is_valid(rows["request_id"])
    if pc.all(is_named, min_count=0).as_py():
        return rows.append_column("place", pa.nulls(len(rows), pa.string()))
    number = rows["number"].cast(pa.string())
    place = pc.binary_join_element_wise(rows["uid"], number, "/", null_handling="replace", null_replacement="None")
    return rows.append_column("place", pc.if_else(is_named, pa.scalar(None, pa.string()), place))


def each_once(rows: pa.Table) -> pa.Table:
    """Return rows of a join without those that occur again later, as in a stranger's: of each the last counts.

    Args:
        rows: Rows with the columns that name a row: `request_id`, `uid`, `number`, `row`.
    """
    keyed = _named(rows.select(["request_id", "uid", "number", "row"])).group_by([*_KEY, "row"])
    if len(keyed.aggregate([])) == len(rows):
        return rows
    at = _named(rows).select([*_KEY, "row"]).append_column("at", pa.array(range(len(rows)), pa.int64()))
    last = at.group_by([*_KEY, "row"]).aggregate([("at", "max")])["at_max"]
    return rows.take(pa.array(sorted(last.to_pylist())))


def joined_rewards(records: Records) -> dict[str, Reward]:
    """Return the reward of each conversation of a run by its key (`key_of`): by the join that counts, or by lines.

    The lines are those of a gateway's rewards, which are the truth where a join has the session, too.
    """
    found: dict[str, Reward] = {}
    tables = sorted(records.joins(COLUMNS), key=lambda joined: joins.order(joined[0]))
    counting = joins.counting((name for name, _ in tables), records.evaluations)
    for name, table in tables:
        for row in rewards_in(table).to_pylist():
            found[key_of(row)] = Reward(
                row["score"],
                name.validation,
                row["parts"],
                name,
                name not in counting,
                row["uid"] or "",
                row["number"] or 0,
                row["trained"] or 0,
                row["roles"],
            )
    for key, session in records.sessions().items():
        if (earned := session.earned) is not None:
            known = found.get(key, Reward(uid=session.task or "", number=session.number))
            found[key] = known._replace(score=earned.score, parts_text=earned.parts_text, roles_text=None)
    return found


def key_of(row: Mapping[str, Any]) -> str:
    """Return the name of a row's conversation: its request id; of another agent loop's, which has none, its place."""
    request_id = row["request_id"]
    return f"{row['uid']}/{row['number']}" if request_id is None else str(request_id)


def rewards_of(records: Records) -> dict[str, Reward]:
    """Return the reward of each conversation of a run, by its key (`key_of`).

    A conversation that neither a join nor the line of a score knows is not there.
    """
    found = joined_rewards(records)
    by_lines = {key for key, session in records.sessions().items() if session.rewards}
    invalid: set[str] = set()
    for line in records.lines():
        request_id, summary = line["request_id"], line.get("summary")
        if summary is not None and not summary["valid"]:
            invalid.add(request_id)
        if request_id in by_lines or line["event"] != "score":
            continue
        if (known := found.get(request_id)) is None or known.join is None:
            score = line["score"] if isinstance(line.get("score"), float) else None
            found[request_id] = Reward(sum_of_rows([score]), bool(line.get("validation")))
    return {key: each._replace(score=None) if key in invalid else each for key, each in found.items()}


def are_right(scores: pa.ChunkedArray, accs: pa.ChunkedArray, known: ScoreRange) -> pa.ChunkedArray:
    """Return which conversations of a column solved their tasks: `ScoreRange.is_right` of each; null without a score.

    Args:
        scores: Their rewards.
        accs: Their reported values `acc`; null: none.
        known: The range of the run's rewards.
    """
    by_score = pc.greater_equal(scores, known.bar)
    by_acc = pc.and_(pc.is_valid(scores), pc.greater(accs, RIGHT_ACC))
    return pc.if_else(pc.is_valid(accs), by_acc, by_score)


def ranges_of(rewards: Iterable[Reward]) -> tuple[ScoreRange, ScoreRange]:
    """Return the ranges of the rewards of a run's training and of its validations: they decide who is right."""
    found = ScoreRange(), ScoreRange()
    for reward in rewards:
        if not reward.undone:
            found[reward.validation].add([reward.score])
    return found


def is_right(reward: Reward, ranges: tuple[ScoreRange, ScoreRange]) -> bool:
    """Return whether a conversation solved its task; one without a reward has not.

    Args:
        reward: Its reward.
        ranges: Those of its run (`ranges_of`).
    """
    return reward.score is not None and ranges[reward.validation].is_right(reward.score, reward.acc)

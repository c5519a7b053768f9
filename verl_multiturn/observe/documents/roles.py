"""The parts of documents that are there only where conversations have roles (`proxy.roles`)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from verl_multiturn.records.read.scores import by_role
from verl_multiturn.rows.reward_numbers import RoleRewards

_UNKNOWN = {"mean": None, "std": None}


def group_means(means: Mapping[str | None, Mapping[str, Any]], rewards: Sequence[RoleRewards]) -> dict[str, Any]:
    """Return `mean` and `std` of a group's rewards; where there are roles, these are null, and `roles` has each one's.

    Args:
        means: `mean` and `std` of each role, as a join has them; without roles those under None.
        rewards: The rewards of the conversations by role (`scores.by_role`), in their order.
    """
    names = sorted({role for each in (means, *rewards) for role in each if role is not None})
    if not names:
        return {**means.get(None, _UNKNOWN)}
    scores = {role: [each.get(role) for each in rewards] for role in names}
    return {**_UNKNOWN, "roles": {role: {**means.get(role, _UNKNOWN), "scores": scores[role]} for role in names}}


def means_of(joined: Sequence[Mapping[str, Any]]) -> dict[str | None, dict[str, Any]]:
    """Return mean and deviation of a group by role, from the joined rows of its conversations."""
    return {row["role"]: {"mean": row["group_mean"], "std": row["group_std"]} for row in reversed(joined)}


def roles_of(row: Mapping[str, Any], joined: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `roles` of a conversation: of each role its score and the mean of its advantages; {} without roles.

    Args:
        row: Its row in the index.
        joined: Its rows in the join.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for each in joined:
        if each["role"] is not None:
            values[each["role"]] += [] if each["advantages"] is None else map(float, each["advantages"])
    scores = by_role(row["score"], row["roles"])
    made = {
        role: {"score": scores.get(role), "advantage": math.fsum(own) / len(own) if own else None}
        for role, own in sorted(values.items())
    }
    return {"roles": made} if made else {}

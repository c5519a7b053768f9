"""Figures of a conversation by role (`proxy.roles`), from the stats of its rows.

A row holds turns of one role. The stats of a role's last row have `session`, with the role's name and its `outcome`.
So the reward of a role is its outcome, the rewards of the completions in its rows, and those of its completions that
are in none (`outside`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_multiturn.rows.reward_numbers import RoleRewards

_UNUSABLE = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters that not every logger takes in the name of a metric."""


def role_of(stats: Mapping[str, Any]) -> str | None:
    """Return the role of a row; None: it has none.

    Args:
        stats: The row's stats, as the agent loop returned them.
    """
    turns = stats.get("turns") or [{}]
    role: str | None = turns[0].get("role") or stats.get("session", {}).get("role")
    return role


def role_rewards(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return the reward of each role of a conversation that has a row; {} without roles.

    Args:
        stats: Those of the conversation, as `observe.metrics.conversations` joins them.
    """
    return {
        role: math.fsum(
            [
                float(session["outcome"] or 0.0),
                *(turn["reward"] or 0.0 for turn in stats.get("turns", ()) if turn.get("role") == role),
                *(each["reward"] or 0.0 for each in session.get("outside", ())),
            ]
        )
        for role, session in stats.get("roles", {}).items()
    }


def rewards_by_role(stats: Mapping[str, Any]) -> RoleRewards:
    """Return a conversation's rewards for `have_signal`: of each role, or without roles its score.

    Args:
        stats: Those of the conversation, once its reward is there.
    """
    return role_rewards(stats) or {None: float(stats["conversation"]["score"])}


def metric_names(roles: Iterable[str]) -> dict[str, str]:
    """Return the name that each role has in metrics: letters, digits, `_`, `.` and `-`; two are never the same.

    Example: `metric_names(["white", "a b", "a/b"]) == {"a b": "a_b", "a/b": "a_b_2", "white": "white"}`.
    """
    names: dict[str, str] = {}
    for role in sorted(set(roles)):
        name = base = _UNUSABLE.sub("_", role) or "_"
        count = 1
        while name in names.values():
            count += 1
            name = f"{base}_{count}"
        names[role] = name
    return names


def of_roles(stats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of roles, `role/NAME/…`, by name; nothing where no conversation has roles.

    Args:
        stats: Those of conversations, as `observe.metrics.conversations` joins them.
    """
    names = metric_names(role for each in stats for role in each.get("roles", ()))
    if not names:
        return {}
    metrics: dict[str, float] = {}
    for role, name in names.items():
        having = [each for each in stats if role in each.get("roles", ())]
        turns = [sum(turn.get("role") == role for turn in each["turns"]) for each in having]
        scores = [role_rewards(each)[role] for each in having if each["valid"]]
        own: dict[str, float] = {
            "conversations": len(having),
            "silent": sum("session" in each for each in stats) - sum(count > 0 for count in turns),
            "turns/mean": sum(turns) / len(having),
            "turns/max": max(turns),
        }
        if scores:
            own["score/mean"] = math.fsum(scores) / len(scores)
        metrics |= {f"role/{name}/{key}": value for key, value in own.items()}
    return metrics

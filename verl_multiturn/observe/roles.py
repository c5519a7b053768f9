"""Figures of a conversation by role (`proxy.roles`, `train`), from the stats of its rows.

A row holds turns of one role. The stats of a role's last row of a session have `session`, with the role's name and its
`outcome`. So the reward of a role is its outcome, the rewards of the completions in its rows, and those of its
completions that are in none (`outside`). Those of a conversation have `role`, with the role's whole reward as `score`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from verl_multiturn.rows.reward_numbers import RoleRewards


def role_of(stats: Mapping[str, Any]) -> str | None:
    """Return the role of a row; None: it has none.

    Args:
        stats: The row's stats, as the agent loop returned them.
    """
    turns = stats.get("turns") or [{}]
    role: str | None = turns[0].get("role") or stats.get("session", {}).get("role")
    return role


def roles_of(stats: Mapping[str, Any]) -> set[str | None]:
    """Return all roles that a row's stats name, for the certificate: of its turns, and of its reward.

    Args:
        stats: As for `role_of`.
    """
    named = {turn.get("role") for turn in stats.get("turns", ())}
    return named | ({stats["session"].get("role")} if "session" in stats else set())


def role_rewards(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return the reward of each role of a conversation that has a row; {} without roles.

    Args:
        stats: Those of the conversation, as `observe.metrics.conversations` joins them.
    """
    return {
        role: float(last["score"])
        if "score" in last
        else math.fsum(
            [
                float(last["outcome"] or 0.0),
                *(turn["reward"] or 0.0 for turn in stats.get("turns", ()) if turn.get("role") == role),
                *(each["reward"] or 0.0 for each in last.get("outside", ())),
            ]
        )
        for role, last in stats.get("roles", {}).items()
    }


def rewards_by_role(stats: Mapping[str, Any]) -> RoleRewards:
    """Return a conversation's rewards for `have_signal`: of each role, or without roles its score.

    Args:
        stats: Those of the conversation, once its reward is there.
    """
    found: dict[str | None, float] = dict(role_rewards(stats).items())
    return found or {None: float(stats["conversation"]["score"])}


def of_roles(stats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of trained roles, `role/NAME/…`, by name; nothing where there are no roles.

    A setting's names of roles fit the names of metrics.

    Args:
        stats: Those of conversations, as `observe.metrics.conversations` joins them.
    """
    metrics: dict[str, float] = {}
    for role in trained_roles(stats):
        having = [each for each in stats if role in each.get("roles", ())]
        turns = [sum(turn.get("role") == role for turn in each["turns"]) for each in having]
        scores = [role_rewards(each)[role] for each in having if each["valid"]]
        own: dict[str, float] = {"conversations": len(having), "silent": len(silent(stats, role))}
        if having:
            own |= {"turns/mean": sum(turns) / len(having), "turns/max": max(turns)}
        if scores:
            own["score/mean"] = math.fsum(scores) / len(scores)
        metrics |= {f"role/{role}/{name}": value for name, value in own.items()}
    return metrics


def trained_roles(stats: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the roles that conversations train, in order."""
    return sorted({role for each in stats for role in speakers_of(each).get("trained", ())})


def speakers_of(stats: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the roles of a conversation or session: `trained`, and how often each spoke, `roles`; {} without roles."""
    speakers: Mapping[str, Any] = stats.get("speakers") or stats.get("session", {})
    return speakers


def silent(stats: Sequence[Mapping[str, Any]], role: str) -> list[Mapping[str, Any]]:
    """Return the valid conversations in which a trained role did not speak."""
    return [
        each
        for each in stats
        if each["valid"] and role in (speakers := speakers_of(each)).get("trained", ()) and not speakers["roles"][role]
    ]

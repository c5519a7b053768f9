"""Checks that a reward function can score a row, and that an agent loop takes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from verl_multiturn.describe import did_you_mean, show
from verl_multiturn.errors import ConfigError


def unscored(row: Mapping[str, Any]) -> str:
    """Return why a row cannot be scored, behind the words "row N"; empty where it can.

    Args:
        row: The row; of its columns, `data_source` and `reward_model` are looked at.
    """
    if row.get("data_source") is None:
        return "has no data_source"
    reward_model = row.get("reward_model")
    if reward_model is None:
        return "has no reward_model"
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        return f"has no ground_truth in its reward_model, which is {show(reward_model, 100)}"
    return ""


def check_scored(row: Mapping[str, Any], *, where: str) -> None:
    """Refuse a row that no reward function of verl's reward managers can score.

    Args:
        row: The row.
        where: Its name, for errors.

    Raises:
        ConfigError: The row has no `data_source`, or no `reward_model.ground_truth`.
    """
    if problem := unscored(row):
        raise ConfigError(
            f"{where} {problem}, and cannot be scored; write data_source and reward_model={{'ground_truth': …}} into it"
        )


def check_agent_name(row: Mapping[str, Any], *, where: str, known: Collection[str]) -> None:
    """Refuse a row whose column `agent_name` names no agent loop.

    Args:
        row: The row; without that column it has the run's default loop.
        where: Its name, for errors.
        known: The agent loops of verl and of ours; one that is like none of them may be the user's own.

    Raises:
        ConfigError: The name is null or no text, or a misspelt one.
    """
    if "agent_name" not in row:
        return
    name = row["agent_name"]
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{where}: agent_name={show(name, 100)} names no agent loop; name one of {sorted(known)}, or leave the "
            "column out of the whole file"
        )
    if name not in known and (hint := did_you_mean(name, known)):
        raise ConfigError(f"{where}: agent_name={name!r} is no agent loop; {hint}")

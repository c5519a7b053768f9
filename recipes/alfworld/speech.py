"""The model's view of a text world, and how its turn is read: the same for ALFWorld and our household.

The form follows verl-agent: the model sees the observation and the actions that are possible, thinks between
`<think>` and `</think>`, and names one of the actions between `<action>` and `</action>`.
"""

from __future__ import annotations

import re
from typing import Any

SYSTEM_PROMPT = (
    "You solve tasks in a household, one action at a time. Think first, between <think> and </think>. Then give one of "
    "the possible actions between <action> and </action>."
)
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)


def to_text(env: Any, observation: Any, info: Any) -> str:
    """Return the model's view; `StepEnv` calls it.

    Args:
        env: The environment, with the list `admissible`.
        observation: Its text.
        info: Not used.
    """
    return f"{observation}\nPossible actions: {', '.join(env.admissible)}."


def to_action(env: Any, text: str) -> str:
    """Return the action in a turn; `StepEnv` calls it.

    Args:
        env: The environment, with the list `admissible`.
        text: The model's text.

    Raises:
        ValueError: There is no action, or it is not possible.
    """
    found = _ACTION.findall(text)
    if not found:
        raise ValueError("there is nothing between <action> and </action>")
    action = " ".join(str(found[-1]).split()).lower()
    if action not in env.admissible:
        raise ValueError(f"{action[:60]!r} is none of the possible actions")
    return action

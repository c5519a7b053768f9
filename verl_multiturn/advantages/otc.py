"""Optimal Tool Calls (OTC, arXiv 2504.14870): a correct answer earns more, the fewer tool calls it took.

    reward = alpha · r_tool · r_correct

`r_tool` lies in (0, 1]. The paper has two forms of it. Let m be the number of tool calls in a conversation:

- OTC-PPO judges each conversation alone: r_tool = cos(m·π / (2m + c)).
- OTC-GRPO compares m with n, the fewest calls that the question needed: r_tool = sin(m·π / (m + n)), which is 1 at
  m = n. Where n is 0, the form of OTC-PPO is used. (The paper writes the sine as sin(f·π / 2n), f = 2nm / (m + n).)

Points that the paper leaves open, or where this module differs:
- n is the fewest calls among the correct answers of the current group. The paper uses the minimum over everything that
  the training has seen of a question. Here nothing is remembered from step to step, so that a resumed run, or one with
  an asynchronous trainer, gives the same rewards.
- A wrong answer keeps its score. If that score is 0, as in the paper, this is the paper's formula. A negative score, or
  a small score for the format, becomes neither better nor worse by calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Form = Literal["ppo", "grpo"]


def r_tool_ppo(calls: int, c: float) -> float:
    """Return OTC-PPO's coefficient of a conversation, which is 1 without a call.

    Args:
        calls: Tool calls of the conversation.
        c: Smoothing constant, above 0. The larger it is, the slower the coefficient falls towards 0.
    """
    return math.cos(calls * math.pi / (2 * calls + c))


def r_tool_grpo(calls: int, fewest: int, c: float) -> float:
    """Return OTC-GRPO's coefficient of a conversation.

    Args:
        calls: Tool calls of the conversation.
        fewest: Fewest calls of a correct answer to the question.
        c: Smoothing constant, above 0; it matters only when `fewest` is 0.
    """
    if fewest == 0:
        return r_tool_ppo(calls, c)
    return math.sin(calls * math.pi / (calls + fewest))


def r_tools(calls: Sequence[int], form: Form, c: float) -> list[float]:
    """Return the coefficients of the correct answers to one question.

    Args:
        calls: Tool calls of each correct answer.
        form: Form of the coefficient in the paper.
        c: Smoothing constant, above 0.
    """
    if form == "ppo":
        return [r_tool_ppo(m, c) for m in calls]
    fewest = min(calls, default=0)
    return [r_tool_grpo(m, fewest, c) for m in calls]

"""The reward of `researcher`: whether the answer is right, for a conversation that kept the rules.

A conversation breaks the rules with a call that cannot be executed as it was written, and where a limit ends it. It
then scores -`PENALTY`, whatever its answer is. A failure of a tool or a service breaks no rule: a call that
failed and a conversation whose time was up cost nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verl_multiturn.rewards import Score, Solution
from verl_multiturn.rewards.qa import QaOptions
from verl_multiturn.rewards.qa import reward as exact_match
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.tools.running.results import CallStatus

PENALTY = 0.5
INVALID = frozenset({CallStatus.MALFORMED, CallStatus.UNKNOWN_TOOL, CallStatus.BAD_ARGUMENTS, CallStatus.OVER_LIMIT})
LIMITS = frozenset(
    {
        StopReason.RESPONSE_LENGTH,
        StopReason.TURN_LENGTH,
        StopReason.MAX_ASSISTANT_TURNS,
        StopReason.MAX_USER_TURNS,
        StopReason.MAX_TOOL_CALLS,
        StopReason.MALFORMED_CALLS,
    }
)


async def reward(solution: Solution, ground_truth: Any) -> Score:
    """Score a conversation: 1 for the right answer, 0 for another one, -`PENALTY` where a rule was broken.

    Args:
        solution: The conversation. Its answer is between `<answer>` and `</answer>`; summaries are not read.
        ground_truth: As for the reward `qa`: `{"target": …}` of the right answers.
    """
    score = await exact_match(solution, ground_truth, QaOptions())
    if keeps_rules(solution):
        return score
    return replace(score, value=-PENALTY, format=0.0)


def keeps_rules(solution: Solution) -> bool:
    """Return whether each call could be executed and no limit ended the conversation."""
    return INVALID.isdisjoint(solution.statuses) and solution.extra_info.get("stop_reason") not in LIMITS

"""`reward_fields`: a conversation as a reward function reads it."""

from __future__ import annotations

from typing import Any

from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.rollout.transcript import plain_call, spoken_turns


def reward_fields(outcome: Outcome, void: bool = False) -> dict[str, Any]:
    """Return the entries of `extra_info` that a run adds for a reward function.

    A run adds them to the row's own; who tries a reward function on a scripted rollout gives them to it.

    Args:
        outcome: A conversation that is over.
        void: Whether it has a [void turn](../understand/training.md#void-turns).
    """
    said = [turn.said for turn in spoken_turns(outcome) if turn.said is not None]
    return {
        **outcome.extra_fields,
        "turn_scores": [reply.reward or 0.0 for reply in outcome.replies],
        "user_texts": [reply.text for reply in outcome.replies],
        "tool_rewards": [call.reward for call in outcome.calls],
        "stop_reason": str(outcome.stop_reason),
        "assistant_texts": [turn.content for turn in said],
        "assistant_calls": [[plain_call(call) for call in turn.calls] for turn in said],
        "void": void,
        "calc_rewards": dict(outcome.calc_rewards),
        "rendering_differences": [str(difference) for difference in outcome.differences],
        "call_tools": [call.tool for call in outcome.calls],
        "call_statuses": [str(call.status) for call in outcome.calls],
        "tool_metrics": [call.metrics for call in outcome.calls],
    }

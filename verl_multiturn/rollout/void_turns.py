"""Void turns (SimpleTIR, arXiv 2509.02479): turns that neither act nor answer."""

from __future__ import annotations

import re

from verl_multiturn.chat.parsing.turns import AssistantTurn, ToolCall
from verl_multiturn.rollout.outcome import Outcome


def has_void_turn(outcome: Outcome, answer: re.Pattern[str]) -> bool:
    """Tell whether an assistant turn neither makes a readable tool call nor gives a final answer.

    A turn that the engine or the clock cut off before it was read does not count, nor does one that an interaction
    answered, since it was said to somebody, nor a summary.

    Args:
        outcome: A conversation that is over.
        answer: Pattern that is found in the text of a turn with a final answer.
    """
    turns = (turn for turn in outcome.turns if turn.reply is None and not turn.summary)
    return any(_is_void(turn.said, answer) for turn in turns if turn.said is not None)


def _is_void(turn: AssistantTurn, answer: re.Pattern[str]) -> bool:
    calls = any(isinstance(call, ToolCall) for call in turn.calls)
    return not calls and answer.search(turn.content) is None

"""Why a conversation ends, and the order in which its limits are looked at.

After an assistant turn, in this order: `RESPONSE_LENGTH`, `TURN_LENGTH` (both: the turn was cut), `FINISHED` (it calls
no tool), `RESPONSE_LENGTH` (nothing is left), `MAX_ASSISTANT_TURNS`, `MAX_USER_TURNS`, `MAX_TOOL_CALLS`,
`MALFORMED_CALLS`. After the tools have run: whether their answer still fits (`RESPONSE_LENGTH`). The wall clock runs
beside all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Side = Literal["left", "middle", "right"]


class StopReason(StrEnum):
    """The one documented reason for the end of a conversation."""

    FINISHED = "finished"
    """The assistant ended its turn without calling a tool, or called one that ends the conversation."""
    RESPONSE_LENGTH = "response_length"
    """The response budget cut a turn short, or leaves no room for the tools' answer and a turn after it."""
    TURN_LENGTH = "turn_length"
    """The budget of a single turn cut it short."""
    MAX_ASSISTANT_TURNS = "max_assistant_turns"
    """The assistant has had all its turns, and called a tool in the last one."""
    MAX_USER_TURNS = "max_user_turns"
    """The environment (tools or user) has had all its turns."""
    MAX_TOOL_CALLS = "max_tool_calls"
    """The assistant was told that its tool calls are used up, and called again."""
    MALFORMED_CALLS = "malformed_calls"
    """So many turns in a row called tools in a way that could not be read, and in no other."""
    WALL_CLOCK = "wall_clock"
    """The request's time is up. What was sampled until then is kept; no tool is asked for its `calc_reward`."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt does not fit `rollout.prompt_length`, and no model gets to see it cut: invalid. The untrained row that
    verl gets holds the end of it."""
    ENGINE_ERROR = "engine_error"
    """The engine failed or was cut off: invalid, whatever was sampled before; records keep that."""


INVALID = frozenset({StopReason.PROMPT_TOO_LONG, StopReason.ENGINE_ERROR})
"""Ends that say nothing about the model: such a conversation is not trained on, and does not count in its group."""


@dataclass(frozen=True)
class Progress:
    """Where a conversation stands after an assistant turn."""

    response_tokens: int
    assistant_turns: int
    user_turns: int
    cut: Literal["response", "turn"] | None = None
    """The budget that cut the turn short."""
    calls: int = 0
    """Calls in this turn, readable or not."""
    told_calls_are_used_up: bool = False
    malformed_in_a_row: int = 0
    """Turns, this one included, with malformed calls and no other."""


@dataclass(frozen=True)
class Limits:
    """Budgets of one request. `None` means no limit of that kind."""

    prompt_length: int
    """Tokens."""
    response_length: int
    """Tokens after the prompt, sampled and observed together."""
    turn_length: int | None = None
    """Tokens that the assistant may sample in one turn."""
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    max_parallel_calls: int = 1
    """Tool calls executed in one turn; the model is told about each call beyond it."""
    max_tool_calls: int | None = None
    """Tool calls executed in the whole conversation; the model is told once, the next calls after that end it."""
    max_malformed_turns: int | None = None
    """Turns in a row in which every call was malformed."""
    observation_length: int | None = None
    """Tokens of one tool's answer."""
    max_tool_response_length: int = 256
    """Characters of one tool's answer; verl's key and default. Looked at only without `observation_length`."""
    tool_response_truncate_side: Side = "middle"
    """Where a longer answer loses its text."""
    turns_reminder: bool = False
    """Whether the tools' answers of a turn end with how many turns are left of `max_assistant_turns`."""
    wall_clock_s: float | None = None
    """For the whole conversation; a generation under way is not interrupted, and tools have 10 s to be released."""

    def turn_budget(self, response_tokens: int) -> int:
        """Tokens that the next assistant turn may have."""
        left = self.response_length - response_tokens
        return left if self.turn_length is None else min(left, self.turn_length)

    def after_assistant_turn(self, at: Progress) -> StopReason | None:
        """The first limit that ends the conversation after an assistant turn; this order is locked by a test."""
        ends = (
            (at.cut == "response", StopReason.RESPONSE_LENGTH),
            (at.cut == "turn", StopReason.TURN_LENGTH),
            (at.calls == 0, StopReason.FINISHED),
            (at.response_tokens >= self.response_length, StopReason.RESPONSE_LENGTH),
            (_reached(at.assistant_turns, self.max_assistant_turns), StopReason.MAX_ASSISTANT_TURNS),
            (_reached(at.user_turns, self.max_user_turns), StopReason.MAX_USER_TURNS),
            (at.told_calls_are_used_up, StopReason.MAX_TOOL_CALLS),
            (_reached(at.malformed_in_a_row, self.max_malformed_turns), StopReason.MALFORMED_CALLS),
        )
        return next((reason for ended, reason in ends if ended), None)

    def reminder(self, assistant_turns: int) -> str:
        """What the last of a turn's answers ends with, in SkyRL-SQL's words; empty where nothing is reminded of."""
        if not self.turns_reminder or self.max_assistant_turns is None:
            return ""
        left = self.max_assistant_turns - assistant_turns
        return f"\n<reminder>You have {left} turns left to complete the task.</reminder>"

    def truncate(self, text: str) -> str:
        """A tool's answer within its limit of characters, with a mark where text is missing."""
        return truncate(text, self.max_tool_response_length, self.tool_response_truncate_side)

    def fits_observation(self, response_tokens: int, observation_tokens: int) -> bool:
        """Whether an observation fits and leaves the model at least one token to answer with."""
        return response_tokens + observation_tokens < self.response_length


def truncate(text: str, length: int, side: Side) -> str:
    """At most `length` characters of the text, with a mark (beyond the length) where text is missing."""
    if len(text) <= length:
        return text
    if side == "left":
        return "(truncated)..." + text[len(text) - length :]
    if side == "right":
        return text[:length] + "...(truncated)"
    half = length // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]


def _reached(count: int, limit: int | None) -> bool:
    return limit is not None and count >= limit

"""Why a conversation ends, and the order in which its limits are looked at.

After an assistant turn: `RESPONSE_LENGTH`, `MAX_ASSISTANT_TURNS`, `MAX_USER_TURNS`, then whether it called a tool.
After the tools have run: whether their answer still fits (`RESPONSE_LENGTH`). The wall clock runs beside all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class StopReason(StrEnum):
    """The one documented reason for the end of a conversation."""

    FINISHED = "finished"
    """The assistant ended its turn without calling a tool."""
    RESPONSE_LENGTH = "response_length"
    """The response budget is used up, or the tools' answer would not fit into what is left."""
    MAX_ASSISTANT_TURNS = "max_assistant_turns"
    """The assistant has had all its turns."""
    MAX_USER_TURNS = "max_user_turns"
    """The environment (tools or user) has had all its turns."""
    WALL_CLOCK = "wall_clock"
    """The request's time is up. What was sampled until then is kept."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt does not fit `rollout.prompt_length`; it is never cut. Nothing was sampled: invalid."""
    ENGINE_ERROR = "engine_error"
    """The engine failed or was cut off. What was sampled before is kept; with nothing sampled: invalid."""


@dataclass(frozen=True)
class Limits:
    """Budgets of one request. `None` means no limit of that kind."""

    prompt_length: int
    """Tokens."""
    response_length: int
    """Tokens after the prompt, sampled and observed together."""
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    max_parallel_calls: int = 1
    """Tool calls executed in one turn; the model is told about each call beyond it."""
    max_tool_response_length: int = 256
    """Characters of one tool's answer; verl's key and default."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Where a longer answer loses its text."""
    wall_clock_s: float | None = None
    """For the whole conversation; a generation under way is not interrupted, and tools have 10 s to be released."""

    def after_assistant_turn(
        self, response_tokens: int, assistant_turns: int, user_turns: int, cut_short: bool
    ) -> StopReason | None:
        """The first limit that ends the conversation after an assistant turn; this order is locked by a test."""
        if response_tokens >= self.response_length or cut_short:
            return StopReason.RESPONSE_LENGTH
        if self.max_assistant_turns is not None and assistant_turns >= self.max_assistant_turns:
            return StopReason.MAX_ASSISTANT_TURNS
        if self.max_user_turns is not None and user_turns >= self.max_user_turns:
            return StopReason.MAX_USER_TURNS
        return None

    def truncate(self, text: str) -> str:
        """A tool's answer within its limit, with a mark where text is missing."""
        limit = self.max_tool_response_length
        if len(text) <= limit:
            return text
        if self.tool_response_truncate_side == "left":
            return "(truncated)..." + text[len(text) - limit :]
        if self.tool_response_truncate_side == "right":
            return text[:limit] + "...(truncated)"
        half = limit // 2
        return text[:half] + "...(truncated)..." + text[len(text) - half :]

    def fits_observation(self, response_tokens: int, observation_tokens: int) -> bool:
        """Whether an observation fits and leaves the model at least one token to answer with."""
        return response_tokens + observation_tokens < self.response_length

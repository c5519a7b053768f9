"""The reasons for the end of a conversation, and the order in which its limits are checked.

After an assistant turn, in this order:
- `RESPONSE_LENGTH`, then `TURN_LENGTH` (each only if that budget cut the turn);
- `FINISHED` (the turn calls no tool, and no interaction answers it);
- `RESPONSE_LENGTH` (no token remains);
- `MAX_ASSISTANT_TURNS`, `MAX_USER_TURNS`, `MAX_TOOL_CALLS`, `MALFORMED_CALLS`.

If a turn that was not cut calls a tool that ends the conversation, its calls are handled before a limit can end it.
A turn that was not cut and calls no tool is answered by the interaction, if there is one, before a limit can end the
conversation: `ENVIRONMENT_DONE` or `ENVIRONMENT_TRUNCATED` if the interaction ends it, then the limit.
After the answer: `RESPONSE_LENGTH` if it does not fit. The wall clock runs all the time, but pauses while a call waits
for the end of an outage. `OUTAGE` ends a conversation before its next turn, and before any limit. `UNJUDGED`
takes the place of the reason for which the conversation ended.

A session of an agent behind the endpoint (`proxy`) ends when its agent does. Limits refuse its requests, and do not end
it. In this order: `ENGINE_ERROR`; `OUTAGE`; `UNJUDGED`; `PROMPT_TOO_LONG`, `NO_COMPLETION` and `AGENT_FAILED` (no
completion was delivered); `WALL_CLOCK`; `AGENT_ERROR`; `FINISHED`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from verl_multiturn.chat.clipping import Side, truncate
from verl_multiturn.config import MultiTurnSettings


class StopReason(StrEnum):
    """The one documented reason for the end of a conversation."""

    FINISHED = "finished"
    """The assistant ended its turn without a tool call, or called a tool that ends the conversation.

    In a conversation with an interaction only the latter. In a session: its agent returned.
    """
    ENVIRONMENT_DONE = "environment_done"
    """The interaction ended the conversation."""
    ENVIRONMENT_TRUNCATED = "environment_truncated"
    """The interaction ended the conversation because of a limit of its own."""
    RESPONSE_LENGTH = "response_length"
    """The response budget cut a turn short, or leaves no room for the tool response and a token after it."""
    TURN_LENGTH = "turn_length"
    """The budget of a single turn cut the turn short."""
    MAX_ASSISTANT_TURNS = "max_assistant_turns"
    """The assistant has had all its turns, and called a tool in the last one."""
    MAX_USER_TURNS = "max_user_turns"
    """The environment (tools or user) has had all its turns."""
    MAX_TOOL_CALLS = "max_tool_calls"
    """The assistant called a tool after it had read that its tool calls are used up."""
    MALFORMED_CALLS = "malformed_calls"
    """Too many turns in a row had no readable call."""
    WALL_CLOCK = "wall_clock"
    """The request's time is up. Tokens sampled until then are kept. Neither `calc_reward` of a
    tool nor `score` of the interaction is called."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt is longer than `rollout.prompt_length`. The conversation is invalid.

    No model gets to see a prompt that was cut. The untrained row that verl gets holds the end of the prompt.
    """
    ENVIRONMENT_ERROR = "environment_error"
    """The interaction failed, or did not answer in time. The conversation is invalid; records keep its tokens."""
    OUTAGE = "outage"
    """A tool, an interaction or an agent hit an outage, or waited for its end for too long.

    The conversation is invalid; records keep its tokens.
    """
    UNJUDGED = "unjudged"
    """The model's work cannot be scored, for a cause of ours. The agent of a session, or a tool's `calc_reward`, raised
    `UnjudgedError`.

    The conversation is invalid; records keep its tokens.
    """
    ENGINE_ERROR = "engine_error"
    """The engine failed or cut a turn off. The conversation is invalid, but records keep the tokens before."""
    AGENT_ERROR = "agent_error"
    """The agent of a session failed after it had got a completion: it raised, or exited with another status than 0."""
    AGENT_FAILED = "agent_failed"
    """The agent of a session failed before it got a completion, or ended without one. The session is invalid."""
    NO_COMPLETION = "no_completion"
    """The agent of a session returned before the trained model had a turn: only opponents (`proxy.opponents`) spoke.

    The session is invalid.
    """


INVALID = frozenset(
    {
        StopReason.PROMPT_TOO_LONG,
        StopReason.ENVIRONMENT_ERROR,
        StopReason.OUTAGE,
        StopReason.UNJUDGED,
        StopReason.ENGINE_ERROR,
        StopReason.AGENT_FAILED,
        StopReason.NO_COMPLETION,
    }
)
"""Reasons that do not depend on the model.

A conversation that ended for one of them is not trained on and does not count in its group.
"""


@dataclass(frozen=True)
class ConversationProgress:
    """The state of a conversation after an assistant turn."""

    response_tokens: int
    """Tokens after the prompt, sampled and observed together."""
    assistant_turns: int
    """Assistant turns so far, this one included."""
    user_turns: int
    """Turns of the environment (tools or user) so far."""
    cut: Literal["response", "turn"] | None = None
    """The budget that cut the turn short; None if the turn ended by itself."""
    calls: int = 0
    """Calls in this turn, readable or not."""
    told_calls_are_used_up: bool = False
    """True once a call was refused because of `Limits.max_tool_calls`."""
    malformed_in_a_row: int = 0
    """Turns in a row, this one included, that had calls and no readable one."""
    has_interaction: bool = False
    """True when an interaction answers turns without calls."""


@dataclass(frozen=True)
class Limits:
    """The budgets of one request. `None` means no limit of that kind."""

    prompt_length: int
    """The most tokens of the prompt."""
    response_length: int
    """The most tokens after the prompt, sampled and observed together."""
    turn_length: int | None = None
    """The most tokens that the assistant may sample in one turn."""
    max_assistant_turns: int | None = None
    """The most assistant turns."""
    max_user_turns: int | None = None
    """The most turns of the environment (tools or user)."""
    max_parallel_calls: int = 1
    """The most tool calls executed in one turn. The model reads an error for each call beyond the limit."""
    max_tool_calls: int | None = None
    """The most tool calls executed in the whole conversation.

    A message informs the model when they are used up. If it calls a tool after that, the conversation ends.
    """
    max_malformed_turns: int | None = None
    """The most turns in a row with calls and no readable one. The last of them ends the conversation."""
    observation_length: int | None = None
    """The most tokens of one tool response."""
    max_tool_response_length: int = 256
    """The most characters of one tool response, used only without `observation_length`. verl's key and default."""
    tool_response_truncate_side: Side = "middle"
    """The side at which a longer tool response loses its text."""
    user_turn_length: int | None = None
    """The most tokens of one message of an interaction."""
    turns_reminder: bool = False
    """True if a turn's tool responses end with the number of turns that remain of `max_assistant_turns`."""
    wall_clock_s: float | None = None
    """Seconds of the whole conversation.

    A generation under way is cancelled; the engine may end it all the same. Tools get 10 s more to be released.
    """

    @classmethod
    def of(cls, rollout: Any, settings: MultiTurnSettings) -> Limits:
        """Return the limits of a run's requests.

        Args:
            rollout: verl's `actor_rollout_ref.rollout`.
            settings: Our settings in it.
        """
        multi_turn = rollout.multi_turn
        return cls(
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            turn_length=settings.turn_length,
            max_assistant_turns=multi_turn.max_assistant_turns,
            max_user_turns=multi_turn.max_user_turns,
            max_parallel_calls=multi_turn.max_parallel_calls,
            max_tool_calls=settings.max_tool_calls,
            max_malformed_turns=settings.max_malformed_turns,
            observation_length=settings.observation_length,
            max_tool_response_length=multi_turn.max_tool_response_length,
            tool_response_truncate_side=multi_turn.tool_response_truncate_side,
            user_turn_length=settings.user_turn_length,
            turns_reminder=settings.turns_reminder,
            wall_clock_s=settings.request_timeout_s,
        )

    def turn_budget(self, response_tokens: int) -> int:
        """Return the most tokens that the next assistant turn may have.

        It is the minimum of the per-turn limit and the rest of the response length.

        Args:
            response_tokens: Tokens after the prompt so far.
        """
        left = self.response_length - response_tokens
        return left if self.turn_length is None else min(left, self.turn_length)

    def after_assistant_turn(self, at: ConversationProgress) -> StopReason | None:
        """Return the first limit that ends the conversation after an assistant turn; None if none does.

        A test locks the order of the limits.
        """
        ends = (
            (at.cut == "response", StopReason.RESPONSE_LENGTH),
            (at.cut == "turn", StopReason.TURN_LENGTH),
            (at.calls == 0 and not at.has_interaction, StopReason.FINISHED),
            (at.response_tokens >= self.response_length, StopReason.RESPONSE_LENGTH),
            (_reached(at.assistant_turns, self.max_assistant_turns), StopReason.MAX_ASSISTANT_TURNS),
            (_reached(at.user_turns, self.max_user_turns), StopReason.MAX_USER_TURNS),
            (at.told_calls_are_used_up, StopReason.MAX_TOOL_CALLS),
            (_reached(at.malformed_in_a_row, self.max_malformed_turns), StopReason.MALFORMED_CALLS),
        )
        return next((reason for ended, reason in ends if ended), None)

    def reminder(self, assistant_turns: int) -> str:
        """Return the text at the end of a turn's last tool response, in SkyRL-SQL's words; "" without a reminder.

        Args:
            assistant_turns: Assistant turns so far.
        """
        if not self.turns_reminder or self.max_assistant_turns is None:
            return ""
        left = self.max_assistant_turns - assistant_turns
        return f"\n<reminder>You have {left} turns left to complete the task.</reminder>"

    def truncate(self, text: str) -> str:
        """Cut a tool response to its limit of characters, with a mark where text is missing."""
        return truncate(text, self.max_tool_response_length, self.tool_response_truncate_side)

    def fits_observation(self, response_tokens: int, observation_tokens: int) -> bool:
        """Return whether an observation fits and leaves room for at least one more token.

        Args:
            response_tokens: Tokens after the prompt so far.
            observation_tokens: Tokens of the observation.
        """
        return response_tokens + observation_tokens < self.response_length


def _reached(count: int, limit: int | None) -> bool:
    return limit is not None and count >= limit

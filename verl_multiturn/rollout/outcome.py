"""`Request`: what a conversation is given; `Outcome`: what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_multiturn.chat.codec import Message
from verl_multiturn.chat.parsing.turns import AssistantTurn
from verl_multiturn.chat.rendering import Difference
from verl_multiturn.rollout.limits import INVALID, StopReason
from verl_multiturn.rollout.trajectory import Trajectory
from verl_multiturn.tools.calls.results import CallResult


@dataclass(frozen=True)
class Request:
    """A sample to roll out."""

    request_id: str
    messages: list[Message]
    """The first messages, in the form of a chat template."""
    tools: Mapping[str, Any] = field(default_factory=dict)
    """The tools of this request, by name."""
    tools_kwargs: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Arguments for the tools' methods, as `read_tools_kwargs` returns them."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters, under the engine's own names."""
    interaction: Any = None
    """The `Interaction` that answers turns without calls; None: such a turn ends the conversation."""
    interaction_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the interaction's `start` and `reply`."""


@dataclass(frozen=True)
class TurnReply:
    """The interaction's answer to one turn."""

    turn: int
    """The assistant turn that was answered, counted from 0 in the whole conversation."""
    text: str
    reward: float | None
    state: str | None
    """Digest of the state in which the next turn is made; None where the interaction does not say."""
    metrics: dict[str, Any]


@dataclass(frozen=True)
class SessionReport:
    """The part of an outcome that only an agent's session has."""

    roots: int
    """Prompts that were rendered whole."""
    unenforced: Mapping[str, int]
    """Requests that had a field which changes nothing, by the field's name."""
    reward: float | None = None
    """The session's reward, by its agent or for its failure; None: `compute_score` decides."""
    stuck: bool = False
    """Whether the agent did not end when its time was up, so that its thread was abandoned."""
    by_id: bool = False
    """Whether the agent gave rewards to completions alone, and `reward` is 0."""


@dataclass(frozen=True)
class ConversationRow:
    """A stretch of a conversation in which ids were only appended: one row of the training batch."""

    trajectory: Trajectory
    images: list[Any]
    """Images in the order of their placeholders in the trajectory."""
    first_turn: int
    """Number of the conversation's assistant turn with which the row begins."""
    turn_numbers: Sequence[int] = ()
    """Numbers of the row's turns, where they do not count on from `first_turn`: in the rows of an agent's session."""

    def number(self, turn: int) -> int:
        """Return the number in the conversation of the row's turn `turn`, counted from 0."""
        return self.turn_numbers[turn] if self.turn_numbers else self.first_turn + turn


@dataclass
class Outcome:
    """The result of one request."""

    request_id: str
    trajectory: Trajectory
    """The tokens; those of the last row, where the conversation has several (`rows`)."""
    messages: list[Message]
    """The conversation as the model saw it, with the request's own messages first."""
    calls: list[CallResult] = field(default_factory=list)
    """Results of all tool calls, in order."""
    assistant_turns: list[AssistantTurn] = field(default_factory=list)
    """Text and calls of every assistant turn that was read."""
    call_turns: list[int] = field(default_factory=list)
    """Assistant turn that made each of `calls`, counted from 0 in the whole conversation."""
    asked: int = 0
    """Number of `messages` that are the request's own."""
    images: list[Any] = field(default_factory=list)
    """Images of the request's messages and of tools, in the order of their placeholders in `trajectory`."""
    earlier: list[ConversationRow] = field(default_factory=list)
    """The rows before the last one; empty unless `context.mode` begins new rows."""
    first_turn: int = 0
    """Number of the assistant turn with which `trajectory` begins."""
    turn_numbers: Sequence[int] = ()
    """Numbers of the turns of `trajectory`, as in `ConversationRow`."""
    parents: Sequence[int | None] = ()
    """For each generation of an agent's session, the number of the one that it continues; None where it begins anew.

    Empty for a conversation, in which each turn continues the one before.
    """
    completion_rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards that an agent gave to single completions, by their number."""
    summaries: dict[int, str] = field(default_factory=dict)
    """Summaries that the model was asked for, by the number of their assistant turn."""
    generation_rows: list[int | str] = field(default_factory=list)
    """For each generation of the engine, the index of its row; or why it is in none (`certificate.receipts.CAUSES`)."""
    calc_rewards: dict[str, float] = field(default_factory=dict)
    """The result of `calc_reward`, for each tool."""
    opening: str | None = None
    """The interaction's first message; None without one."""
    first_state: str | None = None
    """Digest of the state in which the first turn is made; None where there is no interaction, or it does not say."""
    replies: list[TurnReply] = field(default_factory=list)
    """The interaction's answers, in order. The last one may not have been shown to the model."""
    score: float = 0.0
    """The interaction's reward for the whole conversation."""
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Fields that tools written for verl 0.9 left for the reward function."""
    user_turns: int = 0
    """Turns of the environment that the model got to read: the responses of tools, or of a user."""
    differences: list[Difference] = field(default_factory=list)
    """Differences between the template's rendering of `messages` and the trajectory; empty if not compared."""
    session: SessionReport | None = None
    """Part that only an agent's session has; None for a conversation."""
    error: str = ""
    """Error after a stop reason in `INVALID`, or in a session whose agent failed; "" otherwise."""
    generate_s: float = 0.0
    """Seconds spent waiting for the engine."""
    tools_s: float = 0.0
    """Seconds spent executing tool calls."""
    interaction_s: float = 0.0
    """Seconds spent waiting for the interaction."""

    @property
    def stop_reason(self) -> StopReason:
        """Return why the conversation ended.

        Raises:
            RuntimeError: The conversation is not over.
        """
        if self.trajectory.stop_reason is None:
            raise RuntimeError("the conversation is not over")
        return self.trajectory.stop_reason

    @property
    def valid(self) -> bool:
        """Tell whether the conversation says anything about the model.

        A valid conversation has a sampled token and did not end for a reason in `INVALID`. A conversation that is not
        valid is not trained on and does not count in its group.
        """
        return self.stop_reason not in INVALID and any(any(row.trajectory.mask) for row in self.rows)

    @property
    def rows(self) -> list[ConversationRow]:
        """Return the rows of the conversation, in order; a last row without a sampled token only if it is the first."""
        last = ConversationRow(self.trajectory, self.images, self.first_turn, self.turn_numbers)
        return [*self.earlier, last] if any(self.trajectory.mask) or not self.earlier else self.earlier

    @property
    def delivered(self) -> list[int]:
        """Return the numbers of the completions of a session that its agent got, be they in a row or in none."""
        got = ("dropped_row", "not_selected")
        return [turn for turn, place in enumerate(self.generation_rows) if isinstance(place, int) or place in got]

    @property
    def turns(self) -> int:
        """Return the number of assistant turns in all rows, summaries included."""
        return sum(row.trajectory.turns for row in self.earlier) + self.trajectory.turns

"""`Request`: the input of a conversation; `Outcome`: its result."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_multiturn.chat.codec import Message
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.chat.rendering_check import RenderingDifference
from verl_multiturn.config import USER
from verl_multiturn.interactions.running.replies import CheckedReply
from verl_multiturn.rollout.engines.protocol import CacheUse
from verl_multiturn.rollout.limits import INVALID, StopReason
from verl_multiturn.rollout.trajectory import Trajectory
from verl_multiturn.rollout.turn import Turn
from verl_multiturn.tools.running.results import CallResult

Doing = Literal["generate", "tools", "interaction", "score"]
"""The work that a conversation waits for: the engine, its tools, its interaction, or the rewards for the whole."""


@dataclass(frozen=True)
class Request:
    """A sample to roll out."""

    request_id: str
    messages: list[Message]
    """The first messages, in the form of a chat template."""
    tools: Mapping[str, Any] = field(default_factory=dict)
    """The tools of this request, by name."""
    tools_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arguments for the tools' methods, and which are hidden, as `read_tools_kwargs` returns them."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters, under the engine's own names."""
    interaction: Any = None
    """The `Interaction` that answers turns without calls; None: such a turn ends the conversation."""
    interaction_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the interaction's `start` and `reply`."""
    row: str = ""
    """Name of the data row in errors, for example `data row 7`; "" where there is none."""


@dataclass
class SessionRequest:
    """One request of an agent, for records alone."""

    at: float
    """Time (`time.time`) at which it came."""
    protocol: str
    """`chat`, `messages` or `responses`; `count_tokens` asks for no completion."""
    role: str | None = None
    """Name of the model in it, where that has to be a role; also where it is none, so that it was refused."""
    parent: int | None = None
    """Number of the generation that it continues; None: it begins anew."""
    shared: int = 0
    """How many of its messages are those of the parent's whole conversation."""
    messages: Sequence[Message] = ()
    """Its other messages."""
    tools: Sequence[Any] = ()
    wishes: Mapping[str, Any] = field(default_factory=dict)
    """Further parameters of the request that change the answer."""
    generations: Sequence[int] = ()
    """Numbers of the generations that answered it."""
    delivered: bool = False
    """Whether its client got the whole answer."""
    order: int | None = None
    """Place in the order in which answers went to clients; None: none did."""
    refused: str | None = None
    """Code of the error that it got; None: none."""
    opponent: str | None = None
    """Name of the opponent that answered it (`proxy.opponents`); None: none did."""
    said: Sequence[Message] = ()
    """The opponent's answers."""


@dataclass(frozen=True)
class SessionReport:
    """The part of an outcome that only an agent's session has."""

    roots: int
    """Prompts that were rendered whole."""
    unenforced: Mapping[str, int]
    """Requests that had a field which changes nothing, by the field's name."""
    reward: float | None = None
    """The session's reward, by its agent or for its failure; None: `compute_score` decides."""
    by_id: bool = False
    """Whether the agent gave rewards to completions alone, and `reward` is 0."""
    end: str = ""
    """How the agent ended (`proxy.agents.end.EndKind`); `stuck`: it did not end when its time was up, so that its
    thread was abandoned."""
    problem: str = ""
    """The fault of the session; "" without one."""
    requests: Sequence[SessionRequest] = ()
    """Its requests, in the order in which they came; for records alone."""
    events: Sequence[tuple[str, int, int]] = ()
    """Its events in their order; for records alone."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards by role, where the agent gave such ones, and `reward` is None; empty: `reward` is that of each role."""
    roles: Sequence[str] = ()
    """Names of the roles in which it could ask; empty: there are none."""
    trained: Sequence[str] = ()
    """Names of those that are trained."""
    opponents: Mapping[str, str] = field(default_factory=dict)
    """Names of the opponents that played, by role."""

    @property
    def stuck(self) -> bool:
        """Return whether the agent's thread was abandoned."""
        return self.end == "stuck"


@dataclass(frozen=True)
class ConversationRow:
    """A stretch of a conversation in which ids were only appended: one row of the training batch."""

    trajectory: Trajectory
    images: list[Any]
    """Images in the order of their placeholders in the trajectory."""


@dataclass
class Outcome:
    """The result of one request."""

    request_id: str
    rows: list[ConversationRow]
    """Its rows, in order; the last one is open until the conversation ends."""
    messages: list[Message]
    """The conversation as the model saw it, with the request's own messages first."""
    turns: list[Turn] = field(default_factory=list)
    """A turn for each generation that the engine returned, in that order."""
    asked: int = 0
    """Number of `messages` that are the request's own."""
    summary: str | None = None
    """The last summary with words that the model wrote when a row was full (`rollout.context`); None: none."""
    calc_rewards: dict[str, float] = field(default_factory=dict)
    """The result of `calc_reward`, for each tool."""
    opening: CheckedReply | None = None
    """The interaction's first message; None without one."""
    state: str | None = None
    """Digest of the state in which the next turn is made; None without an interaction, or where it reports no state."""
    score: float = 0.0
    """The interaction's reward for the whole conversation; of rewards by role, the assistant's."""
    scores: dict[str, float] = field(default_factory=dict)
    """The interaction's rewards by role, where it gave such ones; empty: `score` is that of each role."""
    trained: Sequence[str] = ()
    """Names of the roles that are trained; empty: there are no roles."""
    user_rows: int = 0
    """How many rows, the first ones, hold turns of the user (`rollout.user_rows`)."""
    user_receipts: dict[int, Any] = field(default_factory=dict)
    """Receipts (`certificate.receipts.Receipt`) of these turns, by their numbers."""
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Fields for the reward function, set by tools that were written for verl 0.9."""
    user_turns: int = 0
    """Turns of the environment that the model got to read: the responses of tools, or of a user."""
    differences: list[RenderingDifference] = field(default_factory=list)
    """Differences between the template's rendering of `messages` and the trajectory; empty if not compared."""
    session: SessionReport | None = None
    """Part that only an agent's session has; None for a conversation."""
    outages: list[str] = field(default_factory=list)
    """Names whose outage a call hit, for example `tool search`; the run's keeper decides whether it was one."""
    doing: Doing | None = None
    """The work in progress, or the last one; None before the first request."""
    time_up: Doing | None = None
    """The work in progress when its time was up; None: it was not. The time of a conversation that had ended by itself
    may be up, too, while its rewards are computed."""
    error: str = ""
    """Error after a stop reason in `INVALID`, or in a session whose agent failed; "" otherwise."""
    generate_s: float = 0.0
    """Seconds spent waiting for the engine."""
    cache: CacheUse = field(default_factory=CacheUse)
    """How much of the generations' prompts the engine had in its cache."""
    tools_s: float = 0.0
    """Seconds spent executing tool calls."""
    interaction_s: float = 0.0
    """Seconds spent waiting for the interaction."""
    place_s: float | None = None
    """Seconds that it waited for a server of its own, before its first turn; None: it needs none."""

    @classmethod
    def begun(cls, request_id: str) -> Outcome:
        """Return the outcome of a conversation that begins, for `Conversation.run`."""
        return cls(request_id, [ConversationRow(Trajectory(), [])], [])

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
        """Return whether the conversation's result depends on the model.

        A valid conversation has a sampled token and did not end for a reason in `INVALID`. A conversation that is not
        valid is not trained on and does not count in its group.
        """
        return self.stop_reason not in INVALID and any(any(row.trajectory.mask) for row in self.rows)

    @property
    def trajectory(self) -> Trajectory:
        """Return the tokens of the last row."""
        return self.rows[-1].trajectory

    @property
    def images(self) -> list[Any]:
        """Return the images of the last row."""
        return self.rows[-1].images

    @property
    def sampled_turns(self) -> int:
        """Return the number of the assistant's turns whose tokens are in rows, summaries included."""
        return sum(row.trajectory.turns for row in self.rows[self.user_rows :])

    @property
    def assistant_turns(self) -> list[Turn]:
        """Return all turns but the user's; of a session, all."""
        return [turn for turn in self.turns if not self.trained or turn.role != USER]

    @property
    def calls(self) -> list[CallResult]:
        """Return the results of all tool calls, in order."""
        return [call for turn in self.turns for call in turn.calls]

    @property
    def replies(self) -> list[CheckedReply]:
        """Return the interaction's answers, in order. The last one may not have been shown to the model."""
        return [turn.reply for turn in self.turns if turn.reply is not None]

    def has_void_turn(self, answer: re.Pattern[str]) -> bool:
        """Return whether a turn neither makes a readable tool call nor gives a final answer: a void turn (SimpleTIR).

        A turn that the engine or the clock cut off before it was read does not count. Nor does a turn that an
        interaction answered, since it had a reader, nor a summary.

        Args:
            answer: Pattern that is found in the text of a turn with a final answer.
        """
        said = (turn.said for turn in self.assistant_turns if turn.reply is None and not turn.summary)
        return any(
            not any(isinstance(call, ToolCall) for call in turn.calls) and answer.search(turn.content) is None
            for turn in said
            if turn is not None
        )

    @property
    def places(self) -> list[int | str]:
        """Return the place of each generation: the index of its row, or why it is in none."""
        return [turn.place for turn in self.turns]

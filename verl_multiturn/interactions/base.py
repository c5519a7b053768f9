"""`Interaction`: the class that the author of a simulated user or of an environment derives from.

    class Guess(Interaction):
        def reply(self, instance_id, messages, **kwargs):
            right = str(kwargs["number"]) in messages[-1]["content"]
            return Reply("Yes!" if right else "No, guess again.", reward=float(right), done=right)

All conversations of a worker share one object. Keep the state of one conversation under its `instance_id`, from
`start` to `close`. Every method may be `async` or not; one that is not runs in a thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from verl_multiturn.calls.limits import OutageLimits

Score = float | Mapping[str, Mapping[str, float]]
"""The reward of a whole conversation, or rewards by role: `{"roles": {"assistant": 1.0, "user": -1.0}}`."""


@dataclass(frozen=True)
class Reply:
    """The answer of a user or an environment to one turn of the model."""

    text: str = ""
    """The text that the model reads, as a user message."""
    image: list[Any] | None = None
    """PIL images that the model sees, if it takes images; None for no image."""
    reward: float | None = None
    """Reward of the turn that is answered; None: it has none."""
    done: bool = False
    """True when the conversation is over: the text is not shown any more."""
    truncated: bool = False
    """True when it is over because of a limit of the environment, not by an act of the model."""
    state: Hashable | None = None
    """State in which the model has to act next. Estimators that compare equal states compare these values."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to report."""
    shows: Sequence[str] = ()
    """Names of hidden tools (`shown: false` in the row's `tools_kwargs`) that the model has from now on.

    Their schemas are written below the text. Not for the `Reply` of `start`.
    """


class PolicyModel(Protocol):
    """The model that is being trained, as an interaction may use it."""

    async def write(self, messages: Sequence[Mapping[str, Any]], max_tokens: int, sampling: Mapping[str, Any]) -> str:
        """Return the model's next turn as text.

        Args:
            messages: A conversation in the form of a chat template.
            max_tokens: Most tokens of the turn.
            sampling: Sampling parameters, under the engine's own names.

        Raises:
            EngineError: The engine failed.
        """


class Interaction:
    """A simulated user or an environment, which may keep state for each conversation.

    Args:
        config: The `config` mapping of the YAML entry.

    Attributes:
        config: As given.
        name: The entry's name, by which a row chooses it.
        policy: The model that is being trained; set by the worker before the first conversation, None elsewhere.
        is_trained: Whether the text of `policy` is trained, under `role`; set by the worker, too.
    """

    outage_limits: ClassVar[OutageLimits] = OutageLimits()
    """Rules for outages; `limits.outage` of the YAML entry goes before them."""

    role: ClassVar[Literal["user"] | None] = None
    """Role in which the text of `policy` is trained, if `custom.multiturn.train` names it; None: it never is."""

    name: str = ""
    policy: PolicyModel | None = None
    is_trained: bool = False

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def start(self, instance_id: str, **kwargs: Any) -> Reply | Awaitable[Reply | None] | None:
        """Begin a conversation. Runs once for each, before the prompt is rendered.

        Args:
            instance_id: Id of the conversation, the same for all methods, and for its tools.
            kwargs: The row's `extra_info.interaction_kwargs[name]`.

        Returns:
            The first message of the user or environment, which comes after the row's messages; None: there is none.
        """
        return None

    def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply | Awaitable[Reply]:
        """Answer a turn of the model that calls no tool.

        Args:
            instance_id: Id of the conversation.
            messages: The conversation so far, as the model saw it; the last message is the turn to answer.
            kwargs: As for `start`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define reply()")

    def score(self, instance_id: str) -> Score | Awaitable[Score]:
        """Return the reward of the whole conversation; called once, at its end.

        Where the user is trained, too, a number is the reward of both speakers; `{"roles": {"assistant": 1.0, "user":
        -1.0}}` gives each its own.
        """
        return 0.0

    def close(self, instance_id: str) -> Awaitable[None] | None:
        """End a conversation and free the resources of `start`. Runs exactly once for every `start` that began."""

    def aclose(self) -> Awaitable[None] | None:
        """Close the resources that all conversations share; called once, when the worker ends."""

"""`TauUser`: a customer of τ², whom a model behind an endpoint plays, and whose end brings τ²'s verdict.

A row names the task: `interaction_kwargs: {"tau2": {"task": "12"}}`. How a conversation ends:

| event | end | reward |
|---|---|---|
| the user writes a stop word | `environment_done` | τ²'s verdict |
| the user has sent `max_user_turns` messages | `environment_truncated` | 0, as in τ² |
| ten calls failed, and the agent speaks to the user | `environment_truncated` | 0, as in τ² |
| a limit of the run | that of the limit | 0, as in τ² |
| the user stops with the first message, before the agent's turn | `environment_error` | none: invalid |
| the user's model is down, or gives no text | `outage` or `environment_error` | none: invalid |

Invariants:
- the model that plays the user reads only as much as in τ²: its part, and the agent's turns without calls;
- only the model's text counts as the agent's. A user who speaks for the agent earns nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from verl_multiturn.chat.model_text import spoken
from verl_multiturn.config import read_model
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.base import Reply
from verl_multiturn.interactions.errors import EnvironmentFailedError
from verl_multiturn.interactions.llm_user import LlmUser, LlmUserSettings
from verl_multiturn.interactions.simulated_user import SimulatedUser, UserSettings
from verl_multiturn.task_sets.tau2.package import GREETING, MAX_ERRORS, STOP_WORDS, check_domain, tasks_of, user_prompt
from verl_multiturn.task_sets.tau2.worlds import World, close_world, close_worlds, open_world


class CustomerSettings(UserSettings):
    """Settings of every customer of τ²."""

    domain: str
    """The domain, `airline` or `retail`; the tools have to be of the same one."""

    stop_words: list[str] = Field(default_factory=lambda: list(STOP_WORDS))
    """Words with which the user ends the conversation: τ²'s own."""

    max_user_turns: int = Field(30, gt=0)
    """Most messages of the user. τ² itself counts 200 messages of all sides."""

    temperature: float = Field(0.0, ge=0, allow_inf_nan=False)


class TauUserSettings(CustomerSettings, LlmUserSettings):
    """Settings of `TauUser`: those of `LlmUser`, and the domain."""


@dataclass
class _TaskState:
    task: str
    world: World
    do_nothing: float | None
    reward: float = 0.0

    def reported(self, **metrics: float) -> dict[str, float]:
        """Return the metrics of an end, with the reward of an agent that does nothing beside them."""
        return metrics if self.do_nothing is None else {**metrics, "do_nothing": self.do_nothing}


class Customer(SimulatedUser):
    """A customer of τ²; a subclass plays the customer in `write`.

    Args:
        config: As in `Interaction`.
        settings: The settings in it.

    Raises:
        ConfigError: There is no such domain, or something is not installed.
    """

    def __init__(self, config: dict[str, Any], settings: CustomerSettings) -> None:
        self._domain = check_domain(settings.domain, f"{type(self).__name__}: config.domain")
        self._tasks = tasks_of(self._domain)  # imports τ² here, and not in the first conversation
        self._conversations: dict[str, _TaskState] = {}
        super().__init__(config, settings)

    def part(self, texts: Sequence[str]) -> str:
        """Return the customer's part as it is: τ²'s own system message."""
        return "\n\n".join(texts)

    async def start(  # type: ignore[override]  # a row's kwargs have names
        self, instance_id: str, *, task: str, do_nothing: float | None = None
    ) -> Reply:
        """Open the conversation's world, and let the customer answer the agent's greeting.

        Args:
            instance_id: Id of the conversation.
            task: Id of the task.
            do_nothing: The reward of an agent that does nothing, which is reported beside the reward.

        Raises:
            ConfigError: There is no such task.
            EnvironmentFailedError: The customer stopped at once, or cannot be played.
        """
        if task not in self._tasks:
            raise ConfigError(
                f"interaction_kwargs of {type(self).__name__}: task: expected the id of a task of {self._domain!r}, "
                f"'0' to {list(self._tasks)[-1]!r}, got {show(task)}; mend the row"
            )
        await super().start(instance_id, persona=user_prompt(self._domain, task))
        self._conversations[instance_id] = _TaskState(task, await open_world(instance_id, self._domain), do_nothing)
        left, text = await self.say(instance_id, [{"role": "assistant", "content": GREETING}])
        if left or not text:
            raise EnvironmentFailedError(
                f"the user of task {task!r} stopped before the agent's first turn; look at the model that plays it"
            )
        return Reply(text=text)

    async def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        """Let the customer answer; where the customer leaves, ask τ² for its verdict."""
        here = self._conversations[instance_id]
        if here.world.errors >= MAX_ERRORS:
            return Reply(done=True, truncated=True, metrics=here.reported(right=0.0, too_many_errors=1.0))
        reply = await super().reply(instance_id, [each for each in messages if not each.get("tool_calls")])
        if reply.truncated:
            return Reply(done=True, truncated=True, metrics=here.reported(right=0.0))
        if not reply.done:
            return reply
        texts = [text for each in messages if each.get("role") == "assistant" and (text := spoken(each))]
        verdict = await here.world.judge(here.task, texts)
        here.reward = verdict.reward
        metrics = here.reported(right=verdict.reward, db=verdict.db, said=verdict.communicate, actions=verdict.actions)
        return Reply(done=True, metrics=metrics)

    def score(self, instance_id: str) -> float:
        """Return the verdict's reward; 0 where the customer did not end the conversation."""
        return self._conversations[instance_id].reward

    async def close(self, instance_id: str) -> None:
        """End the conversation's world."""
        self._conversations.pop(instance_id, None)
        try:
            await close_world(instance_id)
        finally:
            await super().close(instance_id)

    async def aclose(self) -> None:
        """End the processes of all worlds."""
        await close_worlds(self._domain)


class TauUser(Customer, LlmUser):  # type: ignore[misc]  # `start`: a row of it has a task in place of a persona
    """A customer of τ² whom an endpoint plays.

    Args:
        config: `TauUserSettings`.

    Raises:
        ConfigError: A setting is wrong, there is no such domain, or something is not installed.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config, read_model(TauUserSettings, config, "TauUser: config"))

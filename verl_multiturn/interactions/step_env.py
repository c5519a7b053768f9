"""`StepEnv`: any environment with `reset(seed)` and `step(action)`, each episode in a process of its own.

    interaction:
      - name: lake
        class_name: verl_multiturn.interactions.step_env.StepEnv
        config: {env: FrozenLake-v1, env_kwargs: {render_mode: ansi}, actions: [left, down, right, up]}

A row chooses the episode: `interaction_kwargs: {"lake": {"seed": 7, "env_kwargs": {"map_name": "8x8"}}}`.
"""

from __future__ import annotations

import importlib.util
import json
import operator
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from verl_multiturn.calls.per_loop import PerLoop
from verl_multiturn.chat.model_text import spoken
from verl_multiturn.config import read_model
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.actions import asking, plain
from verl_multiturn.interactions.base import Interaction, Reply
from verl_multiturn.interactions.environments.episode import is_gymnasium_id
from verl_multiturn.interactions.environments.process import EnvProcess, EnvProcesses
from verl_multiturn.rows.reward_numbers import USABLE, as_reward

_INSTALLS = {"gymnasium": "'verl-multiturn[gymnasium]'", "gem": "gem-llm"}
"""Names on the package index of packages that are called otherwise there."""
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class StepEnvSettings(BaseModel):
    """Settings of `StepEnv`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: str = Field(min_length=1)
    """The environment: `package.module:factory`, which is called with `env_kwargs`, or an id of Gymnasium.

    An id that a package registers when it is imported is behind its module: `minigrid:MiniGrid-Empty-5x5-v0`.
    """

    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keywords for the factory; a row's `env_kwargs` are added to them."""

    to_text: str | None = None
    """`module:function` with `(env, observation, info)`, which returns the text for the model.

    None: `render()` where the environment's `render_mode` is `ansi`, with coloured text in brackets; the messages of
    the game for TextArena; else `str(observation)`.
    """

    to_action: str | None = None
    """`module:function` with `(env, text)`, which returns the action in the model's text, or raises a `ValueError`.

    None: the last `<action>…</action>`, or the last line. It is the name of an action in `actions`, or a number where
    the action space is `Discrete`. Other environments get the text of the tag, or the whole turn.
    """

    actions: list[str] | None = None
    """Names of the actions 0, 1, …"""

    invalid: Literal["ask again"] | float = "ask again"
    """Answer to a turn in which no action can be read: the environment stays as it is, and the model answers again.

    A number is the turn's reward, too.
    """

    state: str | None = None
    """`module:function` with `(env, observation, info)`, which returns the state that estimators compare.

    None: the text.
    """

    score: Literal["none", "sum", "last"] = "none"
    """Place of the steps' rewards.

    - `none`: each to its turn; the whole conversation has no reward beside them.
    - `sum`, `last`: to the whole conversation, as their sum or the last of them; the turns have none.
    """

    @field_validator("to_text", "to_action", "state")
    @classmethod
    def _is_function(cls, name: str | None) -> str | None:
        if name is not None and not _FUNCTION.fullmatch(name):
            raise ValueError("expected 'module:function'")
        return name

    @field_validator("invalid", mode="before")
    @classmethod
    def _is_answer(cls, invalid: Any) -> Any:
        try:
            return invalid if invalid == "ask again" else as_reward(float(invalid))
        except (TypeError, ValueError, ArithmeticError):
            raise ValueError(f"expected 'ask again' or a {USABLE}") from None

    @field_validator("actions")
    @classmethod
    def _are_names(cls, names: list[str] | None) -> list[str] | None:
        if names is not None and (len({name.casefold() for name in names}) < len(names) or not all(names) or not names):
            raise ValueError("expected names that differ")
        return names


@dataclass
class _EnvEpisode:
    process: EnvProcess
    rewards: list[float] = field(default_factory=list)
    state: Hashable = None


class StepEnv(Interaction):
    """An environment as the user of a conversation: each turn of the model is an action.

    Args:
        config: `StepEnvSettings`.

    Raises:
        ConfigError: A setting is wrong, or a package is not installed.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._settings = read_model(StepEnvSettings, config, "StepEnv: config")
        _check_installed(self._settings.env)
        self._episodes: dict[str, _EnvEpisode] = {}
        self._processes = PerLoop(EnvProcesses.aclose)

    async def start(  # type: ignore[override]
        self, instance_id: str, *, seed: int | None = None, env_kwargs: Mapping[str, Any] | None = None
    ) -> Reply:
        """Fork a process, make the environment there and reset it; return its first observation.

        Args:
            instance_id: Id of the conversation.
            seed: Seed of the episode; None: any.
            env_kwargs: Keywords for the factory, beside those of the config. One that is None counts as absent.

        Raises:
            ConfigError: The row has something that is wrong, or the environment cannot be imported.
            InteractionFailedError: The environment raised an error, or no process could be had.
            InteractionContractError: The environment returned something of the wrong type.
        """
        request = self._reset(seed, env_kwargs)
        process = await self._processes.get(self._make_processes).fork()
        episode = self._episodes[instance_id] = _EnvEpisode(process)
        return self._reply(episode, await process.ask(request))

    async def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        """Play the action in the last turn, and return the environment's observation."""
        episode = self._episodes[instance_id]
        answer = await episode.process.ask({"do": "step", "text": spoken(messages[-1])})
        if problem := answer.get("unreadable"):
            invalid = self._settings.invalid
            reward = None if invalid == "ask again" else float(invalid)
            episode.rewards += [] if reward is None else [reward]
            text = asking(problem, self._settings.actions, own=self._settings.to_action is not None)
            shown = self._of_turn(reward)
            return Reply(text=text, reward=shown, state=episode.state, metrics={"unreadable_actions": 1.0})
        if answer["reward"] is not None:
            episode.rewards.append(answer["reward"])
        return self._reply(episode, answer)

    def score(self, instance_id: str) -> float:
        """Return the sum of the rewards, or the last one; 0 without any, or where the turns have them."""
        rewards = self._episodes[instance_id].rewards
        return {"none": 0.0, "sum": sum(rewards), "last": (rewards or [0.0])[-1]}[self._settings.score]

    async def close(self, instance_id: str) -> None:
        """Close the environment, and end its process."""
        if (episode := self._episodes.pop(instance_id, None)) is not None:
            await episode.process.close()

    async def aclose(self) -> None:
        """End all processes."""
        while self._episodes:
            await self._episodes.popitem()[1].process.close()
        await self._processes.aclose()

    def _of_turn(self, reward: float | None) -> float | None:
        """Return the reward that a turn has; None where the whole conversation has it."""
        return reward if self._settings.score == "none" else None

    def _make_processes(self) -> EnvProcesses:
        return EnvProcesses(self._settings.model_dump(include={"env", "to_text", "to_action", "state", "actions"}))

    def _reset(self, seed: Any, env_kwargs: Any) -> dict[str, Any]:
        where = "interaction_kwargs of StepEnv"
        try:
            seed = None if seed is None else operator.index(seed)
        except TypeError:
            raise ConfigError(f"{where}: expected a whole number as 'seed', got {show(seed)}; mend the row") from None
        if env_kwargs is not None and not isinstance(env_kwargs, Mapping):
            raise ConfigError(f"{where}: expected a mapping as 'env_kwargs', got {show(env_kwargs)}; mend the row")
        own = {str(name): value for name, value in (env_kwargs or {}).items() if value is not None}
        request = {"do": "reset", "seed": seed, "kwargs": {**self._settings.env_kwargs, **own}}
        try:
            return dict(json.loads(json.dumps(request, default=plain)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}: 'env_kwargs' must be plain values, as JSON has them: {error}") from None

    def _reply(self, episode: _EnvEpisode, answer: Mapping[str, Any]) -> Reply:
        episode.state = answer["text"] if self._settings.state is None else _hashable(answer["state"])
        return Reply(
            text=answer["text"],
            reward=self._of_turn(answer.get("reward")),
            done=answer.get("done", False),
            truncated=answer.get("truncated", False),
            state=episode.state,
            metrics={"unreadable_actions": 0.0} if "done" in answer else {},
        )


def _hashable(value: Any) -> Hashable:
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value


def _check_installed(env: str) -> None:
    """Refuse an environment whose package is not installed, without importing it.

    Raises:
        ConfigError: It is not installed, or a factory is written with a point before its name.
    """
    module, _, name = env.rpartition(".")
    if module and all(part.isidentifier() for part in env.split(".")):
        raise ConfigError(f"StepEnv: config.env: {env!r} is no id of Gymnasium; write a factory as '{module}:{name}'")
    packages = ["gymnasium"] if is_gymnasium_id(env) else []
    packages += [env.partition(":")[0].partition(".")[0]] if ":" in env else []
    for package in packages:
        try:
            is_there = importlib.util.find_spec(package) is not None
        except ValueError:  # a module without a spec, such as `__main__`; or no name at all
            is_there = True
        if not is_there:
            raise ConfigError(
                f"StepEnv: config.env: {env!r} needs the package {package!r}, which is not installed; "
                f"pip install {_INSTALLS.get(package, package)}, or set PYTHONPATH to the folder where it lies"
            )

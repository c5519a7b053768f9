"""One episode of an environment, in the process that was forked for it.

Three forms of an environment are known:

| form | `reset` | `step` |
|---|---|---|
| Gymnasium, GEM | `reset(seed=…)` returns `(observation, info)` | returns `(observation, reward, terminated, truncated, info)` |
| TextArena | `reset(num_players=1, seed=…)`, then `get_observation()` returns `(player, observation)` | returns `(done, info)`; `close()` returns the rewards |

Invariant: an episode returns plain JSON: finite numbers, texts, lists.
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_multiturn.calls.loading.dotted_names import import_module, resolve
from verl_multiturn.describe import describe, message_of, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.actions import UnreadableError, read_action
from verl_multiturn.processes.zygote import seed_process
from verl_multiturn.rows.reward_numbers import USABLE, NoNumberError, UnusableNumberError, as_reward, plain_scalar

_PLAYER = 0
_GAME = -1
# Text that an environment's `render()` colours, such as the field of the player.
_COLOURED = re.compile(r"\x1b\[[0-9;]*m([^\x1b]*)\x1b\[0?m")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class WrongTypeError(TypeError):
    """An environment, or a function of its author, returned something of the wrong type."""


@dataclass(frozen=True)
class EnvironmentCode:
    """An environment's code, imported.

    Attributes:
        make: Makes an environment from keywords.
        to_text: `to_text(env, observation, info)` returns the text for the model; None: the default.
        to_action: `to_action(env, text)` returns the action in the model's text; None: the default.
        state: `state(env, observation, info)` returns the state to compare; None: the text.
        actions: Names of the actions 0, 1, …; None: there is no list.
    """

    make: Callable[..., Any]
    to_text: Callable[[Any, Any, Any], Any] | None
    to_action: Callable[[Any, str], Any] | None
    state: Callable[[Any, Any, Any], Any] | None
    actions: list[str] | None


def load(spec: Mapping[str, Any]) -> EnvironmentCode:
    """Import the objects that the settings of an environment name.

    Args:
        spec: The settings `env`, `to_text`, `to_action`, `state` and `actions` of `StepEnvSettings`.

    Raises:
        ConfigError: Something cannot be imported, or an id is unknown.
    """
    to_text, to_action, state = (
        resolve(name.replace(":", "."), f"StepEnv: config.{key}") if (name := spec[key]) else None
        for key in ("to_text", "to_action", "state")
    )
    return EnvironmentCode(_maker(spec["env"]), to_text, to_action, state, spec["actions"])


def is_gymnasium_id(env: str) -> bool:
    """Return whether an environment is named by its id in Gymnasium, not as `package.module:factory`.

    An id may have the module before it whose import registers it: `minigrid:MiniGrid-Empty-5x5-v0`.
    """
    module, colon, name = env.partition(":")
    return not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split(".")))


def _maker(env: str) -> Callable[..., Any]:
    if not is_gymnasium_id(env):
        made: Callable[..., Any] = resolve(env.replace(":", "."), "StepEnv: config.env")
        if not callable(made):
            raise ConfigError(f"StepEnv: config.env: {env!r} is {show(made, 100)}, expected a function or a class")
        return made
    import gymnasium

    where, (module, _, name) = "StepEnv: config.env", env.rpartition(":")
    if module:
        import_module(module, where)
    try:
        entry = gymnasium.spec(name).entry_point
        if isinstance(entry, str):
            gymnasium.envs.registration.load_env_creator(entry)  # imported here, once, not in every fork
    except gymnasium.error.UnregisteredEnv as error:
        known = f"{module!r} registers no {name!r}" if module else describe(error).rstrip(".")
        remedy = "" if module else f"write 'package.module:{name}' if a package registers it when it is imported, "
        raise ConfigError(
            f"{where}: {known}; {remedy}correct the id, or name a factory as 'package.module:factory'"
        ) from None
    except (gymnasium.error.Error, ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: {describe(error)}; install what {name!r} needs") from None
    return lambda **kwargs: gymnasium.make(name, **kwargs)


class Episode:
    """An environment that is being played.

    Args:
        loaded: Its code.
        seed: The seed of the episode; None: any.
        kwargs: Keywords for the factory.
    """

    def __init__(self, loaded: EnvironmentCode, seed: int | None, kwargs: Mapping[str, Any]) -> None:
        self._loaded = loaded
        self._seed = seed
        seed_process(seed)
        self._env = loaded.make(**kwargs)
        # Some wrappers answer every name by looking it up in the environment that they wrap.
        self._is_text_arena = callable(getattr(self._env, "get_observation", None))
        self._is_closed = False

    def reset(self) -> dict[str, Any]:
        """Begin, and return the `text` and the `state` of the first observation."""
        if self._is_text_arena:
            self._env.reset(num_players=1, seed=self._seed)
            return self._seen(self._turn(), {})
        self._check_actions()
        result = self._env.reset(seed=self._seed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise WrongTypeError(f"reset() returned {show(result)}, expected (observation, info)")
        return self._seen(*result)

    def step(self, said: str) -> dict[str, Any]:
        """Play the action that a turn gives.

        Returns:
            `text`, `state`, `reward`, `done` and `truncated`; or `unreadable`, the reason why no action could be read.
        """
        try:
            action = self._action(said)
        except UnreadableError as error:
            return {"unreadable": str(error)}
        result = self._env.step(action)
        if self._is_text_arena:
            return self._text_arena_step(result)
        if not isinstance(result, tuple) or len(result) != 5:
            raise WrongTypeError(
                f"step() returned {show(result)}, expected (observation, reward, terminated, truncated, info)"
            )
        observation, reward, terminated, truncated, info = result
        ends = {"done": _flag(terminated, "terminated"), "truncated": _flag(truncated, "truncated")}
        answer = {"reward": _reward(reward), **ends, **self._seen(observation, info)}
        answer["done"] = answer["done"] or answer["truncated"]
        return answer

    def close(self) -> None:
        """Close the environment, if it can be closed and is not yet."""
        if not self._is_closed and callable(close := getattr(self._env, "close", None)):
            self._is_closed = True
            close()

    def _check_actions(self) -> None:
        """Refuse names of actions that the environment does not have: a model could choose the error of one."""
        space: Any = getattr(self._env, "action_space", None)
        if self._loaded.to_action or not self._loaded.actions or type(space).__name__ != "Discrete":
            return
        first, count, named = int(getattr(space, "start", 0)), int(space.n), len(self._loaded.actions)
        if first > 0 or named > first + count:
            raise WrongTypeError(
                f"its actions are the numbers from {first} to {first + count - 1}, but `actions` in the config names "
                f"those from 0 to {named - 1}"
            )

    def _action(self, said: str) -> Any:
        if self._loaded.to_action is None:
            return read_action(said, self._loaded.actions, getattr(self._env, "action_space", None))
        try:
            return self._loaded.to_action(self._env, said)
        except ValueError as error:
            raise UnreadableError(message_of(error)) from None

    def _text_arena_step(self, result: Any) -> dict[str, Any]:
        if not isinstance(result, tuple) or len(result) != 2:
            raise WrongTypeError(f"step() returned {show(result)}, expected (done, info), as it has get_observation()")
        if not _flag(result[0], "done"):
            return {"reward": None, "done": False, "truncated": False, **self._seen(self._turn(), result[1])}
        self._is_closed = True
        closed = self._env.close()
        rewards = closed[0] if isinstance(closed, tuple) and closed else closed
        if not isinstance(rewards, Mapping) or _PLAYER not in rewards:
            raise WrongTypeError(f"close() returned {show(closed)}, expected the rewards, {{0: …}}")
        return {"reward": _reward(rewards[_PLAYER]), "done": True, "truncated": False, "text": "", "state": None}

    def _turn(self) -> Any:
        seen = self._env.get_observation()
        if not isinstance(seen, tuple) or len(seen) != 2:
            raise WrongTypeError(f"get_observation() returned {show(seen)}, expected (player, observation)")
        if seen[0] != _PLAYER:
            raise WrongTypeError(f"it is the turn of player {show(seen[0], 40)}; only games for one player are played")
        return seen[1]

    def _seen(self, observation: Any, info: Any) -> dict[str, Any]:
        text = self._loaded.to_text(self._env, observation, info) if self._loaded.to_text else self._text(observation)
        if not isinstance(text, str):
            raise WrongTypeError(f"to_text returned {show(text)}, expected a text")
        state = _plain(self._loaded.state(self._env, observation, info)) if self._loaded.state else None
        return {"text": text, "state": state}

    def _text(self, observation: Any) -> Any:
        if getattr(self._env, "render_mode", None) == "ansi":
            rendered = self._env.render()
            if not isinstance(rendered, str):
                raise WrongTypeError(f"render() returned {show(rendered)}, expected a text, as its mode is 'ansi'")
            return _ESCAPE.sub("", _COLOURED.sub(r"[\1]", rendered)).strip("\n")
        if self._is_text_arena and isinstance(observation, list):
            return "\n".join(str(message) for sender, message, *_ in observation if sender == _GAME)
        return str(observation)


def _flag(value: Any, name: str) -> bool:
    flag = plain_scalar(value)
    if not isinstance(flag, bool):
        raise WrongTypeError(f"step() returned {show(value)} as {name}, expected True or False")
    return flag


def _reward(value: Any) -> float:
    try:
        return as_reward(value)
    except NoNumberError:
        raise WrongTypeError(f"the reward is {show(value)}, expected a number") from None
    except UnusableNumberError:
        raise ArithmeticError(f"the reward is {show(value)}, expected a {USABLE}") from None


def _plain(value: Any) -> Any:
    """Return a state as JSON can hold it."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # of NumPy or PyTorch
        return _plain(value.tolist())
    raise WrongTypeError(f"state returned {show(value)}, expected a text, a number, or a tuple of such")

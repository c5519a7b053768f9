"""`OpenEnvClient`: an environment behind an OpenEnv server, such as those of Meta's and Hugging Face's hub.

    interaction:
      - name: echo
        class_name: verl_multiturn.interactions.openenv_client.OpenEnvClient
        config: {base_url: "http://envs:8000", action_field: message}

An OpenEnv server keeps an episode for as long as a WebSocket at `/ws` is open. Its plain `/reset` and `/step` make a
new environment for every request, so that nothing can be played over them. Messages, of `openenv-core` 0.3:

    → {"type": "reset", "data": {"seed": 7}}
    → {"type": "step", "data": {"message": "hello"}}
    ← {"type": "observation", "data": {"observation": {…}, "reward": 0.5, "done": false}}
    ← {"type": "error", "data": {"message": "…", "code": "…"}}
    → {"type": "close"}

Invariants:
- a conversation has one connection, which `close` ends;
- every request ends within `timeout_s`;
- never more than 16 MB of an answer are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

from verl_multiturn.calls.loading.dotted_names import resolve
from verl_multiturn.calls.outages.causes import next_try_s
from verl_multiturn.chat.model_text import last_tag, spoken
from verl_multiturn.clients.chat_endpoint import check_address
from verl_multiturn.clients.http_connections import Route, open_session, remedy, route_to
from verl_multiturn.config import read_model
from verl_multiturn.describe import describe, message_of, show
from verl_multiturn.errors import ConfigError, InteractionContractError
from verl_multiturn.interactions.actions import asking, plain
from verl_multiturn.interactions.base import Interaction, Reply
from verl_multiturn.interactions.errors import EnvironmentFailedError, EnvironmentLateError, EnvironmentOutageError
from verl_multiturn.rows.reward_numbers import USABLE, NoNumberError, UnusableNumberError, as_reward

_MOST_BYTES = 2**24
_CLOSE_S = 2.0


class OpenEnvSettings(BaseModel):
    """Settings of `OpenEnvClient`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    """Address of the server, such as `http://envs:8000`."""

    action_field: str | None = None
    """Field of the environment's action that gets the model's text: the last `<action>…</action>`, or the turn."""

    to_action: str | None = None
    """`module:function` with `(text)`, which returns the action as a mapping, or raises a `ValueError`.

    Either this or `action_field` is needed.
    """

    to_text: str | None = None
    """`module:function` with `(observation)`, a mapping, which returns the text for the model.

    None: the one text of an observation that has exactly one, else the observation as JSON.
    """

    score: Literal["sum", "last"] = "sum"
    """The reward of the whole conversation: the sum of the steps' rewards, or the last one."""

    timeout_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    """Seconds for one request. Keep it below `limits.timeout_s` of the entry."""


class _RemoteEpisode:
    """The connection of one conversation."""

    def __init__(self) -> None:
        self.http: aiohttp.ClientSession | None = None
        self.socket: aiohttp.ClientWebSocketResponse | None = None
        self.rewards: list[float] = []
        self.seen = ""


class OpenEnvClient(Interaction):
    """An environment of an OpenEnv server as the user of a conversation. A row's kwargs go into the server's `reset`.

    Args:
        config: `OpenEnvSettings`.

    Raises:
        ConfigError: A setting is wrong.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._settings = settings = read_model(OpenEnvSettings, config, "OpenEnvClient: config")
        where = "OpenEnvClient: config"
        self._address = check_address(settings.base_url, f"{where}.base_url", takes_socks=False).rstrip("/") + "/ws"
        if (settings.action_field is None) == (settings.to_action is None):
            raise ConfigError(
                f"{where}: expected either 'action_field' or 'to_action', got {show(settings.action_field)} and "
                f"{show(settings.to_action)}; name the field of the environment's action that gets the text"
            )
        self._to_action = _function(settings.to_action, f"{where}.to_action")
        self._to_text = _function(settings.to_text, f"{where}.to_text")
        self._sessions: dict[str, _RemoteEpisode] = {}

    async def start(self, instance_id: str, **kwargs: Any) -> Reply:
        """Connect, reset the environment with the row's kwargs, and return its first observation.

        Raises:
            EnvironmentOutageError: The server cannot be reached, is full, fails, is late, or breaks off.
            EnvironmentFailedError: Its answer is none of the protocol.
            InteractionContractError: `to_text` returned no text.
        """
        session = self._sessions[instance_id] = _RemoteEpisode()
        data = {name: value for name, value in kwargs.items() if value is not None}
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                session.http = open_session(self._route())
                session.socket = await session.http.ws_connect(self._address, max_msg_size=_MOST_BYTES)
        except TimeoutError:
            raise self._out(f"did not take the connection within {self._settings.timeout_s:g} s") from None
        except aiohttp.ClientResponseError as error:
            raise self._refused(error) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._out(f"cannot be reached{self._route().words}: {describe(error)}") from None
        return self._reply(session, await self._ask(session, "reset", data))

    async def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        """Send the action in the last turn, and return the server's answer."""
        session = self._sessions[instance_id]
        said = spoken(messages[-1])
        try:
            found = await self._ask(session, "step", self._action(said))
        except ValueError as error:
            text = asking(message_of(error), None, own=self._settings.to_action is not None)
            return Reply(text=text, state=session.seen, metrics={"unreadable_actions": 1.0})
        return self._reply(session, found)

    def score(self, instance_id: str) -> float:
        """Return the sum of the rewards, or the last one; 0 without any."""
        rewards = self._sessions[instance_id].rewards
        return sum(rewards) if self._settings.score == "sum" else (rewards or [0.0])[-1]

    async def close(self, instance_id: str) -> None:
        """End the episode, and close the connection."""
        session = self._sessions.pop(instance_id, None)
        if session is None or session.http is None:
            return
        try:
            if session.socket is not None and not session.socket.closed:
                with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
                    async with asyncio.timeout(_CLOSE_S):
                        await session.socket.send_str(json.dumps({"type": "close"}))
                        await session.socket.close()
        finally:
            await session.http.close()

    async def aclose(self) -> None:
        """Close all connections."""
        for instance_id in list(self._sessions):
            await self.close(instance_id)

    def _action(self, said: str) -> Mapping[str, Any]:
        if self._to_action is None:
            inside = last_tag(said, "action")
            text = said if inside is None else inside
            if not text:
                raise ValueError("it is empty")
            return {str(self._settings.action_field): text}
        action = self._to_action(said)
        if not isinstance(action, Mapping):
            raise InteractionContractError(
                f"{self._settings.to_action!r} returned {show(action)}, expected a mapping; correct the function"
            )
        return action

    async def _ask(self, session: _RemoteEpisode, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a request, and return the data of the observation that answers it.

        A step may be late, break off or fail by the model's action in it; a reset cannot.

        Raises:
            ValueError: The server does not take the action of a step; the text is for the model.
        """
        failed = self._out if kind == "reset" else self._failed
        assert session.socket is not None
        request = json.dumps({"type": kind, "data": dict(data)}, default=plain)
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await session.socket.send_str(request)
                message = await session.socket.receive()
        except TimeoutError:
            late = f"did not answer {kind!r} within {self._settings.timeout_s:g} s"
            raise (failed(late) if kind == "reset" else EnvironmentLateError(self._say(late))) from None
        except (aiohttp.ClientError, OSError) as error:
            raise failed(f"broke off in {kind!r}: {describe(error)}") from None
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise failed(f"broke off in {kind!r}: {message.type.name} {show(message.extra or message.data, 99)}")
        try:
            answer = json.loads(message.data)
        except (ValueError, RecursionError):
            answer = None
        if isinstance(answer, dict) and answer.get("type") == "error":
            told = answer.get("data")
            if kind == "step" and isinstance(told, dict) and told.get("code") == "VALIDATION_ERROR":
                raise ValueError(_mistakes(told))
            raise failed(f"answered {kind!r} with an error: {show(told)}{_advice(told)}")
        found = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(found, dict) or not isinstance(found.get("observation"), dict):
            raise self._failed(f"answered {kind!r} with {show(message.data)}, expected an observation")
        return found

    def _reply(self, session: _RemoteEpisode, found: Mapping[str, Any]) -> Reply:
        given, done = found.get("reward"), found.get("done", False)
        try:
            reward = None if given is None else as_reward(given)
        except (NoNumberError, UnusableNumberError):
            raise self._failed(f"answered with reward {show(given, 60)}, expected a {USABLE}") from None
        if not isinstance(done, bool):
            raise self._failed(f"answered with done {show(done, 60)}, expected true or false")
        text = (self._to_text or _text)(found["observation"])
        if not isinstance(text, str):
            raise InteractionContractError(
                f"{self._settings.to_text!r} returned {show(text)}, expected a text; correct the function"
            )
        session.seen = text
        if reward is not None:
            session.rewards.append(reward)
        return Reply(text=text, reward=reward, done=done, state=text)

    def _failed(self, problem: str) -> EnvironmentFailedError:
        return EnvironmentFailedError(self._say(problem))

    def _out(self, problem: str) -> EnvironmentOutageError:
        return EnvironmentOutageError(self._say(problem))

    def _refused(self, error: aiohttp.ClientResponseError) -> EnvironmentOutageError:
        where, route = "config.base_url", self._route()
        advice = remedy(error.status, route, where, where)
        failed = self._out(f"gives no connection (HTTP {error.status}){route.words}{advice}")
        failed.next_try_s = next_try_s(error)
        return failed

    def _route(self) -> Route:
        return route_to(self._address, "OpenEnvClient: config.base_url", takes_socks=False)

    def _say(self, problem: str) -> str:
        return f"the OpenEnv server at {self._address} {problem}"


def _function(name: str | None, where: str) -> Callable[[Any], Any] | None:
    if name is None:
        return None
    found: Any = resolve(name.replace(":", ".", 1), where)
    if not callable(found):
        raise ConfigError(f"{where}: {name!r} is {show(found, 100)}, expected a function; name one")
    function: Callable[[Any], Any] = found
    return function


def _text(observation: Mapping[str, Any]) -> str:
    texts = [value for value in observation.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else json.dumps(observation, ensure_ascii=False)


def _mistakes(told: Mapping[str, Any]) -> str:
    """Return the mistakes that a server has found in an action, such as `add: Field required`."""
    errors = told.get("errors")
    found = [each for each in (errors if isinstance(errors, list) else []) if isinstance(each, dict)]
    loc = [".".join(map(str, each["loc"])) if isinstance(each.get("loc"), list) else "" for each in found]
    said = [
        f"{place}: {each.get('msg')}" if place else str(each.get("msg")) for place, each in zip(loc, found, strict=True)
    ]
    return show("; ".join(said) or told.get("message"), 300)


def _advice(problem: Any) -> str:
    if isinstance(problem, dict) and problem.get("code") == "CAPACITY_REACHED":
        return "; start it with more max_concurrent_envs than there are conversations at once"
    return ""

"""`LlmUser`: a user whom a language model behind an OpenAI-compatible endpoint plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.calls.per_loop import PerLoop
from verl_multiturn.chat.model_text import spoken
from verl_multiturn.clients.chat_endpoint import AskAgainError, ChatEndpoint, EndpointError, check_address, key_of
from verl_multiturn.config import fixed, read_model
from verl_multiturn.interactions.base import Reply
from verl_multiturn.interactions.errors import EnvironmentFailedError, EnvironmentLateError, EnvironmentOutageError
from verl_multiturn.interactions.simulated_user import SimulatedUser, UserSettings

_CONNECTIONS = 64
"""Requests at once in one worker; further ones wait."""


class LlmUserSettings(UserSettings):
    """Settings of `LlmUser`, beside those of every simulated user."""

    GONE: ClassVar = fixed(connections="64 in each worker")

    base_url: str
    """Address of the endpoint, such as `http://users:8000/v1`."""

    model: str
    """Name of the model at the endpoint."""

    api_key_env: str | None = None
    """Name of the environment variable, in the agent-loop workers, that holds the API key; None: no key."""

    timeout_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    """Seconds for one message of the user, all attempts together. Keep it below `limits.timeout_s` of the entry."""

    attempts: int = Field(4, gt=0)
    """Most requests for one message. The endpoint is called again when it failed, was overloaded, or gave no text."""


class LlmUser(SimulatedUser):
    """A user whom an endpoint plays.

    Args:
        config: `LlmUserSettings`.
        settings: The settings in it, where a class that derives from this one has more; None: they are read.

    Raises:
        ConfigError: A setting is wrong, or the key's variable is not set.
    """

    outage_limits = OutageLimits(timeouts="outage")

    def __init__(self, config: dict[str, Any], settings: LlmUserSettings | None = None) -> None:
        settings = settings or read_model(LlmUserSettings, config, "LlmUser: config")
        super().__init__(config, settings)
        self._llm = settings
        self._where = f"{type(self).__name__}: config"
        check_address(settings.base_url, f"{self._where}.base_url")
        self._key()
        self._endpoints = PerLoop(ChatEndpoint.close, counted=True)

    async def start(self, instance_id: str, *, persona: str | None = None) -> Reply | None:  # type: ignore[override]
        """Begin a conversation, as in `SimulatedUser`; connections stay open for it."""
        reply = await super().start(instance_id, persona=persona)
        self._endpoints.enter(instance_id)
        return reply

    async def write(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the endpoint's next turn, without its reasoning.

        Raises:
            EnvironmentOutageError: The endpoint gave no text.
            EnvironmentFailedError: It refuses the conversation, for which a turn of the model may be the reason.
            EnvironmentLateError: It gave none in time.
        """
        endpoint = self._endpoints.get(self._open)
        try:
            return await endpoint.ask(messages, _read)
        except TimeoutError:
            problem = f"{endpoint.address} did not answer within {self._llm.timeout_s:g} s"
            raise EnvironmentLateError(f"the user's model at {problem}") from None
        except EndpointError as error:
            if error.is_refusal:
                raise EnvironmentFailedError(f"the user's model at {error}") from None
            out = EnvironmentOutageError(f"the user's model at {error}")
            out.next_try_s = error.next_try_s
            raise out from None

    async def close(self, instance_id: str) -> None:
        """Forget the conversation; the last one closes the connections."""
        await super().close(instance_id)
        await self._endpoints.leave(instance_id)

    def _key(self) -> str | None:
        return key_of(self._llm.api_key_env, f"{self._where}.api_key_env")

    def _open(self) -> ChatEndpoint:
        return ChatEndpoint(
            self._llm.base_url,
            self._key(),
            {"model": self._llm.model, "temperature": self._llm.temperature, "max_tokens": self._llm.max_tokens},
            timeout_s=self._llm.timeout_s,
            attempts=self._llm.attempts,
            connections=_CONNECTIONS,
            settings=(f"{self._where}.base_url", f"{self._where}.api_key_env"),
        )


def _read(text: str) -> str:
    said = spoken({"content": text})
    if not said:
        raise AskAgainError("an empty turn")
    return said

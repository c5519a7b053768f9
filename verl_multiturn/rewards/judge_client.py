"""`JudgeClient`: questions to the language model that scores answers, for every reward that needs one.

The model is behind any endpoint with OpenAI's `chat/completions`. `judge` and `rubric` call it.

Invariant: a judge that fails, is late, or gives no verdict has not scored, and the error names who may be to blame:

    its last reply was without a verdict, or it replies to one of ours   TimeoutError, WorkerError: the row scores 0
    the judge is not there at all                                        OutageError: the row is not trained
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import Field

from verl_multiturn.clients.chat_endpoint import AskAgainError, ChatEndpoint, EndpointError, check_address, key_of
from verl_multiturn.errors import ConfigError, OutageError
from verl_multiturn.processes.pool import WorkerError
from verl_multiturn.records.json_text import plain
from verl_multiturn.rewards.score import RewardOptions

T = TypeVar("T")

Question = Sequence[Mapping[str, Any]]
"""The messages of a question, in the form of the endpoint."""

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
"""A string of a JSON text."""
_TOKEN_EDGES = str.maketrans({each: f"\\u{ord(each):04x}" for each in "<[]"})
_CONNECTIONS = 32
"""Requests at once in each of verl's reward workers; further ones wait."""


def json_of(value: Any) -> str:
    """Return a value as JSON text without half a character: a lone surrogate becomes U+FFFD."""
    return json.dumps(plain(value), ensure_ascii=False)


def content_of(value: Any) -> str:
    """Return a value as the content of a message: JSON text in whose strings no control token of a tokenizer can stand.

    Servers make one token of `<|im_end|>` or `[INST]` wherever it is in a content, so that a text could end its message
    and begin another one. Within strings `<`, `[` and `]`, with which such tokens begin, are written as escapes.

    Args:
        value: The value, with texts of a model's.
    """
    return _STRING.sub(lambda found: found[0].translate(_TOKEN_EDGES), json_of(value))


class EndpointOptions(RewardOptions):
    """Options of a reward whose verdict is a language model's."""

    url: str | None = None
    """Address of the endpoint, such as `http://judge:8000/v1`; required."""

    model: str | None = None
    """Name of the judge's model at the endpoint; required."""

    api_key_env: str | None = None
    """Name of the environment variable, in the reward workers, that holds the API key; None: no key."""

    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_tokens: int = Field(default=512, gt=0)
    """Most tokens of the judge's reply."""

    timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds for one answer, all attempts together."""

    attempts: int = Field(default=4, gt=0)
    """Most requests for one answer. The judge is called again when it failed, was overloaded, or gave no verdict."""


class JudgeClient:
    """The judge as one event loop asks it.

    Args:
        options: Where it is, and its sampling parameters.
        reward: Name of the reward, under which the options are in `reward_kwargs`.
        control: A question of ours, with which the judge is tried when it gave no reply.

    Raises:
        ConfigError: No judge is configured, or its address or its key cannot be used.
    """

    def __init__(self, options: EndpointOptions, reward: str, control: Question) -> None:
        where = f"reward_kwargs.{reward}"
        if not options.url or not options.model:
            raise ConfigError(
                f"{where}: expected 'url' and 'model' of an OpenAI-compatible endpoint, got "
                f"{options.url!r} and {options.model!r}; start one (sglang.launch_server) and name it"
            )
        self._control = control
        self._endpoint = ChatEndpoint(
            check_address(options.url, f"{where}.url"),
            key_of(options.api_key_env, f"{where}.api_key_env"),
            {"model": options.model, "temperature": options.temperature, "max_tokens": options.max_tokens},
            timeout_s=options.timeout_s,
            attempts=options.attempts,
            connections=_CONNECTIONS,
            settings=(f"{where}.url", f"{where}.api_key_env"),
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._endpoint.close()

    async def ask(self, question: Question, read: Callable[[str], T]) -> T:
        """Ask the judge, and return its verdict.

        Args:
            question: The question.
            read: Reads the verdict in the text of a reply, and raises `AskAgainError` where there is none.

        Raises:
            TimeoutError: All attempts together took too long, and the answer may be to blame: the judge replies
                to another question.
            WorkerError: No attempt brought a verdict, and the answer may be to blame: the last one brought a reply, or
                the judge replies to another question.
            OutageError: The judge is not there.
        """
        unread: AskAgainError | None = None

        def noted(said: str) -> T:
            nonlocal unread
            try:
                return read(said)
            except AskAgainError as error:
                unread = error
                raise

        try:
            return await self._endpoint.ask(question, noted)
        except (TimeoutError, EndpointError) as error:
            is_late = isinstance(error, TimeoutError)
            has_replied = isinstance(error, EndpointError) and unread is not None and error.last is unread
            if not (has_replied or await self._is_there()):
                problem = "no reply in time" if is_late else error
                raise OutageError(f"the judge is not there: {problem}") from error
            if is_late:
                raise  # an answer can keep the judge's model writing until the time is up
            raise WorkerError(f"the judge has given no verdict: {error}") from error

    async def _is_there(self) -> bool:
        """Return whether the judge replies to a question of our own."""
        try:
            return await self._endpoint.ask(self._control, lambda said: True)
        except (TimeoutError, EndpointError):
            return False

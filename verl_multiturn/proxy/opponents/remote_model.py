"""`RemoteModel`: an opponent behind OpenAI's chat completions, which answers requests of a session.

Its answers come as words, of its own template and tokenizer: there are no ids, no log-probabilities and no receipts,
and nothing of them is trained. Its words are in the session's record.

Invariants:
- a server that does not answer is an outage (`calls/outages`): the session waits for its end where it may, else it
  becomes invalid. It is never a reward. So the session's clock is stopped while an opponent answers;
- a request that the server refuses, such as one that is too long for it, is refused in the same words.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from verl_multiturn.calls.outages.guarded_call import GuardedCall
from verl_multiturn.calls.outages.process import OutageEndError, Watch
from verl_multiturn.chat.codec import Message
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.clients.chat_endpoint import AskAgainError, ChatEndpoint, EndpointError
from verl_multiturn.describe import describe, show
from verl_multiturn.errors import OutageError
from verl_multiturn.proxy.protocols.requests import ChatRequest, Completion, FinishReason, RefusedError

Answer = TypeVar("Answer")
_FINISH: Mapping[Any, FinishReason] = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}
_ATTEMPTS = 3
_SHOWN = 200


class OpponentLostError(Exception):
    """An opponent that does not answer, so that its session cannot go on.

    Args:
        problem: The fault.
        outage: Name of the outage that the run's keeper knows of; "": outages are not tracked.
    """

    def __init__(self, problem: str, outage: str) -> None:
        super().__init__(problem)
        self.outage = outage


async def answer_of(watch: Watch | None, session: str, who: str, question: Callable[[], Awaitable[Answer]]) -> Answer:
    """Return the answer to a question about an opponent, which waits for the end of an outage where it may.

    Args:
        watch: The watch over the outages of the one who answers; None: they are not tracked.
        session: Id of the session.
        who: The one who answers, for messages.
        question: Puts it once.

    Raises:
        OpponentLostError: There is no answer.
    """
    call = GuardedCall(watch, session, "repeatable")
    while True:
        try:
            async with call:
                await call.wait()
                return await question()
        except (OutageError, OutageEndError, TimeoutError) as error:
            if call.again:
                continue
            outage = call.name if call.met or isinstance(error, OutageEndError) else ""
            raise OpponentLostError(f"{who}: {describe(error)}", outage) from None


class RemoteModel:
    """An opponent, for one event loop.

    Args:
        name: Its name in records.
        address: Returns where it is served now, as `http://…/v1`; asked again after a failure.
        model: Its name there; "": that of the role.
        key: API key; None: none is sent.
        sampled: Names of the sampling parameters that its server takes.
        timeout_s: Seconds for one answer.
        connections: Requests at once; others wait.
        watch: The watch over its outages; None: they are not tracked.
        setting: The setting that has it, for messages.
    """

    def __init__(
        self,
        name: str,
        address: Callable[[], Awaitable[str]],
        *,
        model: str = "",
        key: str | None = None,
        sampled: Sequence[str],
        timeout_s: float,
        connections: int,
        watch: Watch | None,
        setting: str,
    ) -> None:
        self.name = name
        self._address = address
        self._model = model
        self._key = key
        self._sampled = tuple(sampled)
        self._timeout_s = timeout_s
        self._connections = connections
        self._watch = watch
        self._setting = setting
        self._endpoint: ChatEndpoint | None = None
        self._finding = asyncio.Lock()

    async def aclose(self) -> None:
        """Close the connections."""
        if self._endpoint is not None:
            await self._endpoint.close()
            self._endpoint = None

    async def complete(
        self, request: ChatRequest, sampling: Mapping[str, Any], most: int, session: str
    ) -> list[Completion]:
        """Answer a request with as many completions as it wants.

        Args:
            request: The request.
            sampling: Sampling parameters of the session, under the engine's own names.
            most: The most tokens of a completion.
            session: Id of the session.

        Raises:
            RefusedError: The server refuses the request.
            OpponentLostError: There is no answer.
        """
        taken = {name: sampling[name] for name in self._sampled if name in sampling}
        body = _body(request, most, self._model or request.model, taken)
        return list(await asyncio.gather(*(self._one(body, session) for _ in range(request.n))))

    async def _one(self, body: Mapping[str, Any], session: str) -> Completion:
        answered = await answer_of(self._watch, session, f"the opponent {self.name}", lambda: self._ask(body))
        if isinstance(answered, RefusedError):
            raise answered
        return answered

    async def _ask(self, body: Mapping[str, Any]) -> Completion | RefusedError:
        endpoint = await self._found()
        try:
            return await endpoint.ask_fields(body, read_completion)
        except (EndpointError, TimeoutError) as error:
            if isinstance(error, EndpointError) and error.is_refusal:
                return RefusedError(400, "opponent_refused", f"the opponent {self.name} refuses the request: {error}")
            if self._endpoint is endpoint:  # a server that was started again has another address
                self._endpoint = None
                await endpoint.close()
            if isinstance(error, TimeoutError):  # it depends on the server alone
                raise OutageError(f"no answer within {self._timeout_s:g} s") from error
            raise

    async def _found(self) -> ChatEndpoint:
        async with self._finding:
            if self._endpoint is None:
                self._endpoint = ChatEndpoint(
                    await self._address(),
                    self._key,
                    {},
                    timeout_s=self._timeout_s,
                    attempts=_ATTEMPTS,
                    connections=self._connections,
                    settings=(self._setting, "OPENAI_API_KEY"),
                )
            return self._endpoint


def _body(request: ChatRequest, most: int, model: str, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request to the opponent's server."""
    tokens = most if request.max_tokens is None else max(1, min(most, request.max_tokens))
    body: dict[str, Any] = {**sampling, "model": model, "max_tokens": tokens}
    body["messages"] = [_sent(message) for message in request.messages]
    if request.tools and request.reads_calls:
        body["tools"] = list(request.tools)
    if request.stop:
        body["stop"] = list(request.stop)
    return body


def _sent(message: Message) -> dict[str, Any]:
    """Return a message in OpenAI's form, in which an image is an address."""
    sent = dict(message)
    if isinstance(content := message.get("content"), list):
        sent["content"] = [
            {"type": "image_url", "image_url": {"url": part["image"]}} if part.get("type") == "image" else part
            for part in content
        ]
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [{"type": "function", **call} for call in calls]
    return sent


def read_completion(body: str) -> Completion:
    """Read the answer of an OpenAI-compatible server.

    Args:
        body: The answer.

    Raises:
        AskAgainError: It is no chat completion.
    """
    try:
        answer = json.loads(body)
        choice = answer["choices"][0]
        message, usage = choice["message"], answer.get("usage") or {}
        content = message.get("content") or ""
        reasoning = message.get("reasoning_content") or ""
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [(function["name"], function["arguments"]) for function in functions]
        given, sampled = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
        finish = _FINISH.get(choice["finish_reason"])
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise AskAgainError(f"no chat completion: {body[:_SHOWN]!r}") from None
    if not all(isinstance(each, str) for each in (content, reasoning, *(part for call in calls for part in call))):
        raise AskAgainError(f"a content that is no text: {body[:_SHOWN]!r}")
    if finish is None:
        raise AskAgainError(f"an end of the turn that is unknown: {show(choice['finish_reason'], 60)}")
    return Completion(
        secrets.token_hex(12),
        content,
        reasoning,
        _named(calls),
        "tool_calls" if calls else finish,
        prompt_tokens=given,
        completion_tokens=sampled,
    )


def _named(calls: Sequence[tuple[str, str]]) -> list[ToolCall]:
    """Return calls with ids of nine letters and digits, unlike those of any server."""
    return [ToolCall(name, arguments, secrets.token_hex(5)[:9]) for name, arguments in calls]

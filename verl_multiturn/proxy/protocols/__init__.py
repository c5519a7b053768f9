"""The protocols in which agents ask: bodies to `ChatRequest`, `Completion`s to bodies and streams of events.

A stream is written when its generation is done. Until then `ping` keeps the connection alive.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_multiturn.proxy.protocols.anthropic_messages import AnthropicMessages
from verl_multiturn.proxy.protocols.chat_completions import ChatCompletions
from verl_multiturn.proxy.protocols.requests import ChatRequest, Completion, RefusedError, Sent, nothing_sent
from verl_multiturn.proxy.protocols.responses import Responses


class Protocol(typing.Protocol):
    """One protocol."""

    name: str
    """Name of the protocol in records."""

    def read(self, body: Mapping[str, Any], sent: Sent = nothing_sent) -> ChatRequest:
        """Read a request from the JSON object in its body.

        Args:
            body: The object.
            sent: Finds an earlier item of the session, for a request that names it by its id.

        Raises:
            RefusedError: A field does not fit the protocol, or requests something unsupported.
        """
        ...

    def answer(self, request: ChatRequest, completions: Sequence[Completion], created: int) -> dict[str, Any]:
        """Return the body of the answer.

        Args:
            request: The request.
            completions: One for each of its `n`.
            created: Seconds since 1970.
        """
        ...

    def events(self, request: ChatRequest, completions: Sequence[Completion], created: int) -> Iterator[bytes]:
        """Return the answer as a stream of server-sent events, from its first to its last."""
        ...

    def ping(self) -> bytes:
        """Return bytes that keep a stream alive before its first event."""
        ...

    def error(self, refused: RefusedError) -> dict[str, Any]:
        """Return the body of an error."""
        ...

    def error_events(self, refused: RefusedError) -> bytes:
        """Return an error for a stream that has begun, in the place of its events."""
        ...


PROTOCOLS: Mapping[str, Protocol] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/messages": AnthropicMessages(),
}
"""The protocols by the path of their requests."""


def models(names: Sequence[str]) -> dict[str, Any]:
    """Return the answer of `GET /v1/models`, in the forms of OpenAI and of Anthropic at once."""
    data = [model(name) for name in names]
    return {"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def model(name: str) -> dict[str, Any]:
    """Return the answer of `GET /v1/models/NAME`."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "verl-multiturn"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}

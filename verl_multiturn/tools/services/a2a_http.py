"""Clients of HTTP for A2A agents: bounded answers, and statuses that are outages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx

from verl_multiturn.calls.outages.causes import OUT, retry_after_s, status_kind
from verl_multiturn.clients.http_connections import Route, say_status
from verl_multiturn.tools.services.http_client import LateError, ServiceFailedError, UnavailableError

MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Bytes of one answer, also of one that is streamed; a larger one is an error."""


class MessageRefusedError(ValueError):
    """An agent refuses a message, or its answer is too large. The model reads it."""


class BoundedClient(httpx.AsyncClient):
    """A client that reads no more than `MAX_ANSWER_BYTES` of an answer."""

    async def send(self, request: httpx.Request, *, stream: bool = False, **options: Any) -> httpx.Response:
        """Send a request, and return its answer.

        Raises:
            MessageRefusedError: The answer is too large; raised where it is read.
        """
        response = await super().send(request, stream=True, **options)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _BoundedStream(response.stream)
        response.aiter_lines = partial(_lines, response)  # type: ignore[method-assign]
        try:
            self._look_at(response)
            if not stream:
                await response.aread()
        except BaseException:  # cancelled, too: the connection stays open otherwise
            await response.aclose()
            raise
        return response

    def _look_at(self, response: httpx.Response) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ServiceFailedError("the agent's answer is compressed, which was not asked for")


class AgentClient(BoundedClient):
    """A client whose agent can answer with a status that is an outage.

    Args:
        route: The way to the agent.
        own: Headers of each request, beside those of the options.
        options: Options of httpx.
    """

    def __init__(self, route: Route, own: dict[str, str], **options: Any) -> None:
        super().__init__(**options)
        self.headers.update(own)
        self._route_there = route
        self._answers: list[httpx.Response] = []

    async def finish(self) -> None:
        """Close the answers that were not read to their end: the SDK closes a stream at some later moment."""
        while self._answers:
            await self._answers.pop().aclose()

    def _look_at(self, response: httpx.Response) -> None:
        self._answers.append(response)
        status, kind = response.status_code, status_kind(response.status_code)
        if kind == "refused":
            raise MessageRefusedError(f"the agent refused the message (HTTP {status})")
        if kind in OUT:
            text = f"the agent {say_status(status, self._route_there, 'a2a.url', 'a2a.headers')}"
            error = (LateError if kind == "late" else UnavailableError)(text)
            error.next_try_s = retry_after_s(response.headers.get("retry-after"))
            raise error
        if kind == "failed":
            raise ServiceFailedError(f"the agent failed (HTTP {status})")
        super()._look_at(response)


class _BoundedStream(httpx.AsyncByteStream):
    """The bytes of an answer, up to `MAX_ANSWER_BYTES`."""

    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = MAX_ANSWER_BYTES
        async for chunk in self._stream:
            left -= len(chunk)
            if left < 0:
                raise MessageRefusedError(f"the agent's answer has more than {MAX_ANSWER_BYTES} bytes; ask for less")
            yield chunk

    async def aclose(self) -> None:
        """Close the connection of an answer that was not read to its end."""
        await self._stream.aclose()


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the lines of a stream of events. Those of httpx also end at U+2028 and its like, which JSON may hold."""
    begun: list[bytes] = []
    async for chunk in response.aiter_bytes():
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            yield b"".join([*begun, line]).decode("utf-8", "replace")
            begun = []
        begun.append(rest)
    yield b"".join(begun).decode("utf-8", "replace")

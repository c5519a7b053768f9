"""Client of a language model behind an OpenAI-compatible endpoint: one chat completion, as text.

It is called again where that may help: when it is overloaded, fails, breaks off, or replies with something that cannot
be used.

Invariants:
- a question ends within `timeout_s`, all attempts and the pauses between them included. Waiting for a connection does
  not count;
- a pause is as long as the endpoint's `Retry-After`, at most a minute; one that would be longer than the remaining time
  ends the question at once;
- never more than 1 MB of a reply are read;
- the key is in no message, no error and no `repr`, even where the endpoint repeats it, with or without the escapes of
  JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import httpx

from verl_multiturn.calls.outages.causes import retry_after_s, status_kind
from verl_multiturn.clients.http_connections import Connections, remedy, route_to, trusted
from verl_multiturn.errors import ConfigError, OutageError

T = TypeVar("T")

_MOST_BYTES = 1_000_000
_PATH = "/chat/completions"
_AGAIN = (408, 409, 425, 429)
"""Statuses below 500 after which the same request may succeed."""
_SHOWN = 200


class EndpointError(OutageError):
    """An endpoint that cannot be reached, refuses, or gave no usable reply in all attempts.

    Args:
        problem: The fault.
        is_refusal: Whether the endpoint refuses the request: a model's text may be the reason.
        next_try_s: See `OutageError`.
        last: The error of the last attempt, where the endpoint has replied in some way.
    """

    def __init__(
        self,
        problem: str,
        is_refusal: bool = False,
        next_try_s: float | None = None,
        last: AskAgainError | None = None,
    ) -> None:
        super().__init__(problem)
        self.last = last
        self.is_refusal = is_refusal
        self.next_try_s = next_try_s


class AskAgainError(Exception):
    """A reply that cannot be used; another one may be. Raised by the function that reads replies.

    Args:
        problem: The fault of the reply.
        wait_s: Seconds to wait, if the endpoint named them.
    """

    def __init__(self, problem: str, wait_s: float | None = None) -> None:
        super().__init__(problem)
        self.wait_s = wait_s


class ChatEndpoint:
    """A client for one event loop.

    Args:
        url: Address of the endpoint, such as `http://judge:8000/v1`.
        key: The API key, from `key_of`; None: no key is sent.
        request: Fields of every request beside its messages: the model and the sampling parameters.
        timeout_s: Seconds for one question.
        attempts: Most requests for one question.
        connections: Requests at once; further ones wait.
        settings: The settings that have the address and the name of the key's variable, for messages.

    Attributes:
        address: The address to which requests are posted.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        request: Mapping[str, Any],
        *,
        timeout_s: float,
        attempts: int,
        connections: int,
        settings: tuple[str, str],
    ) -> None:
        self.address = url.rstrip("/").removesuffix(_PATH) + _PATH
        self._key = spellings(key) if key else None
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._request = dict(request)
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._settings = settings
        self._route = route_to(self.address, settings[0])
        self._connections = Connections(connections, trusted(self.address), self._route)

    async def close(self) -> None:
        """Close the connections that are not in use; the others are closed after their request."""
        await self._connections.close()

    async def ask(self, messages: Sequence[Mapping[str, Any]], read: Callable[[str], T]) -> T:
        """Ask the model for the next turn of a conversation.

        Args:
            messages: The conversation, in the form of the endpoint.
            read: Reads the text of the reply, and raises `AskAgainError` when it cannot be used.

        Raises:
            TimeoutError: All attempts together took too long.
            EndpointError: No attempt brought a reply that can be used.
        """
        return await self.ask_fields({"messages": list(messages)}, lambda body: read(_text_of(body)))

    async def ask_fields(self, fields: Mapping[str, Any], read: Callable[[str], T]) -> T:
        """Ask the model with all fields of a request, such as the schemas of tools.

        Args:
            fields: The fields beside those of every request.
            read: Reads the body of the reply, and raises `AskAgainError` when it cannot be used.

        Raises:
            TimeoutError: All attempts together took too long.
            EndpointError: No attempt brought a reply that can be used.
        """
        # JSON with escapes: a model's text may hold lone surrogates, which UTF-8 cannot express.
        content = json.dumps({**self._request, **fields}).encode()
        problem = ""
        wait_s: float | None = None
        last: AskAgainError | None = None
        async with self._connections.one() as client, asyncio.timeout(self._timeout_s) as limit:
            for attempt in range(self._attempts):
                pause_s = min(2.0**attempt / 4, 8.0)
                try:
                    return read(await self._post(client, content))
                except AskAgainError as error:
                    problem, wait_s, last = str(error), error.wait_s, error
                    pause_s = pause_s if wait_s is None else wait_s
                except (httpx.HTTPError, httpx.StreamError) as error:
                    problem, wait_s, last = f"{type(error).__name__}: {error}{self._route.words}", None, None
                if attempt + 1 == self._attempts:
                    break
                if asyncio.get_running_loop().time() + pause_s > (limit.when() or 0.0):
                    problem += f"; asking again in {pause_s:g} s would be too late"
                    break
                await asyncio.sleep(pause_s)
        problem = f"{self.address} gave no usable reply: {self._without_key(problem)}"
        raise EndpointError(problem, next_try_s=wait_s, last=last)

    async def _post(self, client: httpx.AsyncClient, content: bytes) -> str:
        body = bytearray()
        async with client.stream("POST", self.address, content=content, headers=self._headers) as response:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise AskAgainError("a compressed reply, which was not asked for")
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > _MOST_BYTES:
                    raise AskAgainError(f"a reply of more than {_MOST_BYTES} bytes")
        text = self._without_key(body.decode("utf-8", "replace"))  # before anything is cut off, which may cut the key
        if response.status_code == httpx.codes.OK:
            return text
        status, kind = response.status_code, status_kind(response.status_code)
        problem = f"status {status}: {text[:_SHOWN]!r}{self._route.words}"
        if status in _AGAIN or (status >= httpx.codes.INTERNAL_SERVER_ERROR and kind not in ("network", "address")):
            raise AskAgainError(problem, retry_after_s(response.headers.get("retry-after")))
        advice = remedy(status, self._route, *self._settings)
        raise EndpointError(f"{self.address} refuses: {problem}{advice}", is_refusal=kind == "refused")

    def _without_key(self, text: str) -> str:
        return self._key.sub("[key]", text) if self._key else text


def spellings(key: str) -> re.Pattern[str]:
    """Return a pattern of a key, each of whose characters may be escaped, as JSON writes a slash in three ways."""
    return re.compile("".join(rf"(?:\\?{re.escape(each)}|(?i:\\u{ord(each):04x}))" for each in key))


def key_of(variable: str | None, where: str) -> str | None:
    """Return the API key in an environment variable; None without a variable.

    Args:
        variable: Name of the variable.
        where: The setting that names it, for errors.

    Raises:
        ConfigError: The variable is not set, or its value cannot be a key. The error does not show it.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"{where}: the environment variable {variable!r} is not set here; export it before the run")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{where}: the environment variable {variable!r} holds something that cannot be a key: white space or a "
            "character beyond ASCII; set it again"
        )
    return key


def check_address(url: object, where: str, takes_socks: bool = True) -> str:
    """Return the address of an endpoint as it was given.

    Args:
        url: The address.
        where: The setting that has it, for errors.
        takes_socks: Whether the client can speak to a SOCKS proxy.

    Raises:
        ConfigError: It is not an address of HTTP, or it holds a password or a query, which would end up in messages; or
            the network's proxy, by which it is reached, cannot be used.
    """
    try:
        parsed = httpx.URL(url) if isinstance(url, str) and url.isprintable() else None
    except httpx.InvalidURL:
        parsed = None
    if parsed is not None and (parsed.userinfo or parsed.query):
        raise ConfigError(
            f"{where}: expected an address without a user, a password or a query; put the key into an environment "
            "variable and name that"
        )
    if parsed is None or parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{where}: expected an address such as 'http://127.0.0.1:8000/v1', got {url!r}; correct it")
    route_to(str(url), where, takes_socks)
    return str(url)


def _text_of(body: str) -> str:
    """Return the text of a chat completion; "" where it has none, as with a tool call."""
    try:
        message = json.loads(body)["choices"][0]["message"]
        text = message["content"] or ""
    except (ValueError, LookupError, TypeError, RecursionError):
        raise AskAgainError(f"no chat completion: {body[:_SHOWN]!r}") from None
    if not text and message.get("tool_calls"):
        raise AskAgainError("a tool call in place of a text")
    if not isinstance(text, str):
        raise AskAgainError(f"a content that is no text: {body[:_SHOWN]!r}")
    return text

"""The way to an MCP server: a program's standard input and output, or streamable HTTP.

Invariants:
- a status of HTTP by which a server reports that it is not there, or does not take the key or the address, is an
  outage;
- a message whose TCP connection breaks fails alone: the other calls of the client keep theirs;
- a program is started by a guard, which ends it, with all that it has started, and removes its folder when the worker
  ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any, TextIO, cast
from uuid import uuid4

import httpx2
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, INTERNAL_ERROR
from pydantic import ValidationError

from verl_multiturn.calls.outages.causes import OUT, retry_after_s, status_kind
from verl_multiturn.clients.http_connections import open_client, route_to, say_status, trusted
from verl_multiturn.describe import describe
from verl_multiturn.errors import ConfigError, OutageError
from verl_multiturn.processes import guard
from verl_multiturn.tools.services.environment_variables import expand
from verl_multiturn.tools.services.http_client import LateError, UnavailableError
from verl_multiturn.tools.services.mcp_listing import ToolListing
from verl_multiturn.tools.services.mcp_settings import ConversationValues, McpSettings, check_program

_MOST_PAGES = 100
_LONGEST_EVENT = 256 * 1024 * 1024
_SESSION = "mcp-session-id"
_START = ("server/discover", "initialize", "notifications/initialized", "tools/list")
"""Messages of a connection's start, which fails with their errors."""
_IDLE_S = 2.0
"""Seconds without use after which a TCP connection is closed; common servers close theirs after five."""
_OURS = uuid4().hex
"""Marks the errors that `_HttpClient` puts in the place of an answer."""


class _HttpClient(httpx2.AsyncClient):
    """A client whose server can answer a message with a status that is an outage.

    The SDK hides the status of an answer, and calls most of them errors of the tool. So such an answer is replaced by
    an error of the protocol that has it. The SDK also ends all calls where the TCP connection of one message breaks.
    So that error, too, becomes the answer to its own message.
    """

    has_session = False
    """Whether the server has opened a session of the protocol."""

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request, and return its answer, or the error in the place of one."""
        if request.method == "DELETE":  # of the session, at a connection's end, which others wait for
            limits = request.extensions["timeout"]
            limits["read"] = limits["connect"]
        try:
            return await self._answer(request, await super().send(request, **options))
        except httpx2.RequestError as broken:
            if request.method != "POST" or _message(request).get("method") in _START:
                raise
            lost = {"code": CONNECTION_CLOSED, "message": describe(broken)}
            return httpx2.Response(502, json={"jsonrpc": "2.0", "id": None, "error": lost}, request=request)

    async def _answer(self, request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
        self.has_session = self.has_session or _SESSION in response.headers
        status = response.status_code
        if request.method != "POST":
            return response
        if (kind := status_kind(status)) not in OUT or _is_protocols(request, response):
            if _reads_whole(request, response):
                try:
                    await response.aread()
                except BaseException:  # cancelled, too
                    await response.aclose()
                    raise
            return response
        await response.aclose()
        # The proxy of the client is that of its one address.
        text = say_status(status, route_to(str(request.url)), "mcp.url", "mcp.headers")
        next_try_s = retry_after_s(response.headers.get("retry-after"))
        data = {"ours": _OURS, "late": kind == "late", "next_try_s": next_try_s}
        error = {"code": INTERNAL_ERROR, "message": f"the tool server {text}", "data": data}
        answer = {"jsonrpc": "2.0", "id": None, "error": error}
        return httpx2.Response(max(status, 400), json=answer, request=request)


def _message(request: httpx2.Request) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(request.content)
    return message


def _reads_whole(request: httpx2.Request, response: httpx2.Response) -> bool:
    """Return whether the SDK reads the body at once: that of a redirect, and JSON that answers a request.

    It leaves every other body, such as that of the answer to a notification, which may never end.
    """
    if response.next_request is not None:
        return True
    is_json = response.headers.get("content-type", "").lower().startswith("application/json")
    return is_json and response.status_code != 202 and "method" in (message := _message(request)) and "id" in message


def _is_protocols(request: httpx2.Request, response: httpx2.Response) -> bool:
    """Return whether a status belongs to the protocol: a session's end, a redirect that the SDK follows, a probe."""
    if response.next_request is not None:
        sent, following = request.url, response.next_request.url
        same = (sent.scheme, sent.port) == (following.scheme, following.port)
        safer = (sent.scheme, sent.port, following.scheme, following.port) == ("http", None, "https", None)
        return response.next_request.method == "POST" and sent.host == following.host and (same or safer)
    if response.status_code == 404 and _SESSION in request.headers:
        return True
    return status_kind(response.status_code) == "address" and _message(request).get("method") == "server/discover"


def outage_of(error: BaseException) -> UnavailableError | None:
    """Return the outage that `_HttpClient` put in the place of an answer; None where the error is another one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, MCPError) or not isinstance(error.data, dict) or error.data.get("ours") != _OURS:
        return None
    outage = (LateError if error.data["late"] else UnavailableError)(error.message)
    outage.next_try_s = error.data["next_try_s"]
    return outage


class _Watched:
    """A stream of messages that sets an event when it has ended, and sifts the pages of tools."""

    def __init__(self, stream: Any, ended: asyncio.Event, listing: ToolListing) -> None:
        self._stream = stream
        self._ended = ended
        self._listing = listing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> _Watched:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> Any:
        return await self._stream.__aexit__(*exc_info)

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> Any:
        try:
            item = await self._stream.__anext__()
        except BaseException:  # the stream's end, an error or a cancellation: in each case it has ended
            self._ended.set()
            raise
        self._listing.sift(item)
        return item


class LastWords:
    """The standard error of the program that lists its tools: its last lines while it lists, the worker's later."""

    _MOST = 4_000
    _MOST_READS = 16
    """Most reads before others on the event loop have their turn."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._read, write = os.pipe()
        self.file: TextIO = os.fdopen(write, "w", encoding="utf-8")
        self._kept: bytes | None = b""
        self._is_over = False
        os.set_blocking(self._read, False)
        self._loop.add_reader(self._read, self._take)

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(self._MOST_READS):  # a program may write faster than it is read
                if not (words := os.read(self._read, 65_536)):
                    self.close()
                    return
                if self._kept is not None:
                    self._kept = (self._kept + words)[-self._MOST :]
                else:
                    with contextlib.suppress(OSError):
                        os.write(2, words)

    def read(self) -> str:
        """Return the last lines so far."""
        if not self._is_over:
            self._take()
        return "\n".join((self._kept or b"").decode(errors="replace").splitlines()[-10:])

    def close(self) -> None:
        """Read no more."""
        self.file.close()
        if not self._is_over:
            self._is_over = True
            self._loop.remove_reader(self._read)
            os.close(self._read)

    def pass_on(self) -> None:
        """Pass on what follows to the worker's standard error, as that of every other server."""
        self._kept = None


async def open_server(
    stack: contextlib.AsyncExitStack,
    settings: McpSettings,
    where: str,
    errors: LastWords | None,
    ended: asyncio.Event,
    own: ConversationValues,
) -> tuple[Client, ToolListing]:
    """Start or reach a server, and read the list of its tools.

    Args:
        stack: Closes the connection.
        settings: The settings of the server.
        where: As in `check_settings`.
        errors: Takes the program's standard error; None: it is the worker's.
        ended: Set when the connection has ended.
        own: Values of the placeholders.

    Raises:
        ConfigError: The list has no end, or the server cannot hold a session for each conversation.
        Exception: The transport may raise anything.
    """
    listing = ToolListing()
    # A session of the protocol needs its handshake, which its newest version does not have.
    needs_session = settings.url is not None and settings.per == "conversation" and not settings.names_conversation
    # Without callbacks the client refuses sampling, elicitation and roots, so the server gets none of them.
    # Of the stack and not of the client, which would end the server where the time to start, once over, interrupts it.
    streams = await stack.enter_async_context(_transport(settings, where, errors, ended, listing, own))
    client = Client(contextlib.nullcontext(streams), cache=None, mode="legacy" if needs_session else "auto")
    await stack.enter_async_context(client)
    if needs_session and not listing.has_session():
        raise ConfigError(
            f"{where}: the MCP server {settings.label} opens no sessions, so that it cannot tell conversations apart; "
            "put ${conversation.id} into its url or a header if it knows that, or set per: worker"
        )
    listing.version = client.protocol_version
    cursor: str | None = None
    # List the tools also at run time: the client checks answers against the schemas that it has seen.
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        listing.tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return client, listing
    raise ConfigError(f"{where}: the MCP server {settings.label} lists its tools without end; mend the server")


@contextlib.asynccontextmanager
async def _transport(
    settings: McpSettings,
    where: str,
    errors: LastWords | None,
    ended: asyncio.Event,
    listing: ToolListing,
    own: ConversationValues,
) -> AsyncIterator[tuple[Any, Any]]:
    async with contextlib.AsyncExitStack() as stack:
        if settings.url is not None:
            headers = {
                name: own.fill(expand(value, f"{where}.headers.{name}")) for name, value in settings.headers.items()
            }
            # No time limit on an answer: calls have deadlines of their own. No limit on connections either: if a call
            # stopped waiting for one, it would take all others down.
            timeout = httpx2.Timeout(settings.start_timeout_s, read=None, pool=None)
            url = own.fill(expand(settings.url, f"{where}.url"))
            http: _HttpClient = await stack.enter_async_context(
                open_client(
                    _HttpClient,
                    route_to(url, f"{where}.url"),
                    headers=headers,
                    timeout=timeout,
                    limits=httpx2.Limits(max_connections=None, keepalive_expiry=_IDLE_S),
                    verify=trusted("https:"),
                )
            )
            listing.has_session = lambda: http.has_session
            opened: Any = streamable_http_client(url, http_client=http, max_sse_event_size=_LONGEST_EVENT)
        else:
            # Without a file of ours the server's errors go where the worker's go.
            file = cast(TextIO, None if errors is None else errors.file)
            opened = stdio_client(_program(settings, where, own), errlog=file)
        try:
            read, write = await stack.enter_async_context(opened)
        finally:
            if errors is not None:
                errors.file.close()  # the program has it now
        yield _Watched(read, ended, listing), write


def _program(settings: McpSettings, where: str, own: ConversationValues) -> StdioServerParameters:
    command, there, env = check_program(settings, where, own)
    arguments = [own.fill(argument) for argument in settings.args]
    if sys.platform == "linux":
        arguments = [*guard.ARGUMENTS, guard.worker_argument(os.getpid(), own.folder), command, *arguments]
        command = sys.executable
    return StdioServerParameters(command=command, args=arguments, env=env, cwd=there)


def reason_of(error: BaseException, settings: McpSettings) -> str:
    """Return the first cause in an error, which may be a task group's, as one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"no answer within {settings.start_timeout_s:g} s"
    if settings.url and isinstance(error, httpx2.TransportError):
        return f"{describe(error)}{route_to(expand(settings.url, 'mcp.url')).words}"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"its answer does not fit the protocol: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error) if isinstance(error, MCPError | ConfigError | OutageError) else describe(error)

"""Connections to an MCP server.

Invariants:
- each event loop has at most one connection that takes new calls, opened by the first call and shared by all others;
- a connection is opened and closed by a task of its own, so that no cancelled call can take it down;
- a call is answered, or fails as soon as its connection has ended; the next call opens another connection;
- a status of HTTP by which a server reports that it is not there, or does not take the key or the address, is an
  outage;
- the server process of a connection ends with the connection, with its event loop, or at the latest with the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO, cast
from uuid import uuid4

import httpx2
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_REQUEST, CallToolResult
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from verl_multiturn.calls.outages.causes import OUT, retry_after_s, status_kind
from verl_multiturn.clients.http_connections import open_client, route_to, say_status, trusted
from verl_multiturn.describe import describe
from verl_multiturn.errors import ConfigError, OutageError
from verl_multiturn.processes import guard
from verl_multiturn.tools.services.http_client import LateError, UnavailableError
from verl_multiturn.tools.services.mcp_listing import ToolListing

logger = logging.getLogger(__name__)

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_USER = re.compile(r"(?<=:)//[^/]*@")
"""Part of an address before its host."""
_MOST_PAGES = 100
_LONGEST_EVENT = 256 * 1024 * 1024
_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 10.0
# A server counts as dead after so many calls in a row that were each given up after more than so many seconds.
_GIVEN_UP = 8
_PATIENCE_S = 1.0


_OURS = uuid4().hex
"""Marks the errors that `_HttpClient` puts in the place of an answer."""


class ServerAwayError(OutageError, ConnectionError):
    """A server is not there, or cannot be started. No argument of a call is the reason."""


class McpSettings(BaseModel):
    """Settings under `mcp`. Values of `env`, `headers` and `url` may hold `${NAME}`, an environment variable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str | None = None
    """Program that speaks MCP over its standard input and output; `python` is the interpreter of this process."""
    args: list[str] = Field(default=[])
    env: dict[str, str] = Field(default={})
    """Environment of the program, beside HOME, LOGNAME, PATH, SHELL, TERM and USER; it gets no other variable."""
    cwd: str | None = None
    """Folder in which the program runs; null: the worker's."""

    url: str | None = None
    """Address of a server that speaks MCP over streamable HTTP."""
    headers: dict[str, str] = Field(default={})

    include: list[str] = Field(default=["*"])
    """Patterns (`fnmatch`) of the server's tools that the model gets."""
    exclude: list[str] = Field(default=[])
    """Patterns of the server's tools that the model does not get, although `include` names them."""
    prefix: str = ""
    """Text put before each tool's name."""
    start_timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Seconds that the server may take to start and to list its tools."""

    @property
    def label(self) -> str:
        """Name of the server in messages, without its arguments, user and password, which may hold secrets."""
        return repr(self.command or _USER.sub("//", (self.url or "").partition("?")[0]))


def check_settings(settings: McpSettings, where: str) -> None:
    """Check rules that pydantic cannot.

    Args:
        settings: The settings of the server.
        where: The place that errors name, for example `tools.yaml: tools[0].mcp`.

    Raises:
        ConfigError: `command` and `url` are both given or both missing, a setting belongs to the other kind of server,
            an environment variable is not set, a header cannot hold its value, there is no such program or folder, or
            the network's proxy, by which the server is reached, cannot be used.
    """
    if (settings.command is None) == (settings.url is None):
        raise ConfigError(f"{where}: expected either 'command' or 'url'; give one of them")
    foreign = {"args", "env", "cwd"} if settings.url else {"headers"}
    if wrong := sorted(foreign & settings.model_fields_set):
        kind = "url" if settings.url else "command"
        raise ConfigError(f"{where}.{wrong[0]}: means nothing to a server with {kind!r}; remove it")
    if settings.url:
        for name, value in settings.headers.items():
            place = f"{where}.headers.{name}"
            if not (text := expand(value, place)).isascii() or not text.isprintable() or text != text.strip():
                raise ConfigError(
                    f"{place}: it holds something that no header can hold: a line end, white space at an end or a "
                    "character beyond ASCII; set it again, or the environment variable that it names"
                )
        route_to(expand(settings.url, f"{where}.url"), f"{where}.url")
    else:
        _server_parameters(settings, where)


def expand(value: str, where: str) -> str:
    """Return a value in which each `${NAME}` is replaced by the environment variable.

    Raises:
        ConfigError: There is no such environment variable; the error begins with `where`.
    """

    def replace(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ConfigError(f"{where}: the environment variable {match[1]!r} is not set; export it before the run")
        return os.environ[match[1]]

    return _VARIABLE.sub(replace, value)


def list_tools(settings: McpSettings, where: str) -> ToolListing:
    """Start a server, ask it for its tools and stop it again; may be called while an event loop runs.

    Raises:
        ConfigError: The server does not start, or does not answer; the error begins with `where`.
    """

    async def ask(errors: TextIO) -> ToolListing:
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(settings.start_timeout_s):
                return (await _open(stack, settings, where, errors, asyncio.Event()))[1]

    with tempfile.TemporaryFile("w+", errors="replace", encoding="utf-8") as errors, ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(asyncio.run, ask(errors)).result()
        except ConfigError:
            raise
        except Exception as error:  # the transport may raise anything
            errors.seek(0)
            words = "\n".join(errors.read().splitlines()[-10:])
            said = f"its last words:\n{words}" if words else "it wrote no error"
            raise ConfigError(
                f"{where}: the MCP server {settings.label} did not list its tools ({_reason(error, settings)}); {said}"
            ) from error


class McpServer:
    """A server that all conversations of one worker share, with a connection for each event loop."""

    def __init__(self, settings: McpSettings, where: str) -> None:
        self.settings = settings
        self._where = where
        self._connections: dict[asyncio.AbstractEventLoop, _Connection] = {}
        self._not_ended: set[_Connection] = set()

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool. If this is cancelled, the server is notified.

        Args:
            name: The server's own name of the tool.
            arguments: The arguments of the call.

        Raises:
            ServerAwayError: There is no connection.
            UnavailableError: The server reports that it is not there, or does not take the key or the address.
            ValueError: The server refuses the call.
            RuntimeError: The connection ended during the call, or the answer is not a result of a tool.
        """
        return await self._connection().call(name, arguments)

    async def aclose(self) -> None:
        """Close this event loop's connections, and wait until their server processes have ended."""
        loop = asyncio.get_running_loop()
        here = [connection for connection in self._not_ended if connection.owner.get_loop() is loop]
        for connection in here:
            connection.stop()
        if here:
            await asyncio.wait([connection.owner for connection in here])

    def _connection(self) -> _Connection:
        loop = asyncio.get_running_loop()
        last = self._connections.get(loop)
        if last is not None and last.takes_calls:
            return last
        failures = 0 if last is None or last.answered else last.failures + 1
        connection = _Connection(self.settings, self._where, failures)
        self._connections = {other: kept for other, kept in self._connections.items() if not other.is_closed()}
        self._connections[loop] = connection
        self._not_ended.add(connection)
        connection.owner.add_done_callback(lambda _: self._not_ended.discard(connection))
        return connection


class _Connection:
    """One connection, from its opening to its end.

    Args:
        failures: Connections in a row before this one that answered no call; each doubles the wait before opening.

    Attributes:
        answered: True once a call was answered.
    """

    def __init__(self, settings: McpSettings, where: str, failures: int) -> None:
        self.failures = failures
        self._retired = False
        self.answered = False
        self._settings = settings
        self._where = where
        self._calls = 0
        self._given_up = 0
        self._over = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._client.add_done_callback(lambda client: client.exception())  # mark it as retrieved: perhaps no call waits
        self.owner = asyncio.create_task(self._own(), name=f"MCP server {settings.label}")

    @property
    def takes_calls(self) -> bool:
        """True while new calls may use the connection. A retired one closes when its last call has ended."""
        return not self._retired and not self._over.is_set()

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool, as `McpServer.call` does."""
        self._calls += 1
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            client = await asyncio.shield(self._client)
            if self._over.is_set():
                raise self._lost("has ended")
            result = await client.call_tool(name, _sendable(arguments))
        except asyncio.CancelledError:
            self._given_up += loop.time() - started > _PATIENCE_S
            if self._given_up >= _GIVEN_UP:
                self._retire("it answered none of its last calls")
            raise
        except MCPError as error:
            if (outage := _outage(error)) is not None:
                raise outage from None
            if error.code != CONNECTION_CLOSED and not _is_session_gone(error):
                self._note_answer()
                raise ValueError(error.message) from None
            self._retire(error.message)
            raise self._lost("ended during the call") from None
        except ValidationError:
            raise RuntimeError("the tool server's answer is no result of a tool") from None
        finally:
            self._calls -= 1
            if self._retired and not self._calls:
                self._over.set()
        self._note_answer()
        return result

    def stop(self) -> None:
        """Close the connection at once, even if calls are running."""
        self._retired = True
        if not self._over.is_set():  # otherwise it is closing already, which must not be interrupted
            self.owner.cancel()

    def _note_answer(self) -> None:
        self.answered = True
        self._given_up = 0

    def _retire(self, reason: str) -> None:
        if not self._retired:
            logger.warning("MCP server %s: a new connection is made: %s", self._settings.label, reason)
        self._retired = True

    def _lost(self, what: str) -> RuntimeError:
        # No error of a connection, which would be an outage: the model's request may have ended the server.
        return RuntimeError(f"the tool server {what}; call it again")

    async def _own(self) -> None:
        failure: Exception | None = None
        try:
            if self.failures:
                await asyncio.sleep(min(_BACKOFF_S * 2 ** (self.failures - 1), _LONGEST_BACKOFF_S))
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self._settings.start_timeout_s):
                    client, _ = await _open(stack, self._settings, self._where, None, self._over)
                self._client.set_result(client)
                await self._over.wait()
        except Exception as error:  # the transport may raise anything
            failure = error
            logger.warning("MCP server %s: %s", self._settings.label, _reason(error, self._settings))
        finally:
            self._retired = True
            self._over.set()
            if not self._client.done():
                reason = "it was closed" if failure is None else _reason(failure, self._settings)
                lost = ServerAwayError(f"the tool server is not available ({reason})")
                lost.__cause__ = None if failure is None else _outage(failure)
                self._client.set_exception(lost)


class _HttpClient(httpx2.AsyncClient):
    """A client whose server can answer a message with a status that is an outage.

    The SDK hides the status of an answer, and calls most of them errors of the tool. So such an answer is replaced by
    an error of the protocol that has it.
    """

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request, and return its answer, or the error in the place of one."""
        response = await super().send(request, **options)
        status = response.status_code
        if request.method != "POST" or (kind := status_kind(status)) not in OUT or _is_protocols(request, response):
            return response
        await response.aclose()
        # The proxy of the client is that of its one address.
        text = say_status(status, route_to(str(request.url)), "mcp.url", "mcp.headers")
        next_try_s = retry_after_s(response.headers.get("retry-after"))
        data = {"ours": _OURS, "late": kind == "late", "next_try_s": next_try_s}
        error = {"code": INTERNAL_ERROR, "message": f"the tool server {text}", "data": data}
        answer = {"jsonrpc": "2.0", "id": None, "error": error}
        return httpx2.Response(max(status, 400), json=answer, request=request)


def _is_protocols(request: httpx2.Request, response: httpx2.Response) -> bool:
    """Return whether a status belongs to the protocol: a session's end, a redirect that the SDK follows, a probe."""
    if response.next_request is not None:
        sent, following = request.url, response.next_request.url
        same = (sent.scheme, sent.port) == (following.scheme, following.port)
        safer = (sent.scheme, sent.port, following.scheme, following.port) == ("http", None, "https", None)
        return response.next_request.method == "POST" and sent.host == following.host and (same or safer)
    if response.status_code == 404 and "mcp-session-id" in request.headers:
        return True
    return status_kind(response.status_code) == "address" and b'"server/discover"' in request.content


def _outage(error: BaseException) -> UnavailableError | None:
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


async def _open(
    stack: contextlib.AsyncExitStack, settings: McpSettings, where: str, errors: TextIO | None, ended: asyncio.Event
) -> tuple[Client, ToolListing]:
    listing = ToolListing()
    # Without callbacks the client refuses sampling, elicitation and roots, so the server gets none of them.
    client = Client(_transport(settings, where, errors, ended, listing), cache=None)
    await stack.enter_async_context(client)
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
    settings: McpSettings, where: str, errors: TextIO | None, ended: asyncio.Event, listing: ToolListing
) -> AsyncIterator[tuple[Any, Any]]:
    async with contextlib.AsyncExitStack() as stack:
        if settings.url is not None:
            headers = {name: expand(value, f"{where}.headers.{name}") for name, value in settings.headers.items()}
            # No time limit on an answer: calls have deadlines of their own. No limit on connections either: if a call
            # stopped waiting for one, it would take all others down.
            timeout = httpx2.Timeout(settings.start_timeout_s, read=None, pool=None)
            url = expand(settings.url, f"{where}.url")
            http = await stack.enter_async_context(
                open_client(
                    _HttpClient,
                    route_to(url, f"{where}.url"),
                    headers=headers,
                    timeout=timeout,
                    limits=httpx2.Limits(max_connections=None),
                    verify=trusted("https:"),
                )
            )
            opened: Any = streamable_http_client(url, http_client=http, max_sse_event_size=_LONGEST_EVENT)
        else:
            # Without a file of ours (`errors` is None) the server's errors go where the worker's go.
            opened = stdio_client(_server_parameters(settings, where), errlog=cast(TextIO, errors))
        read, write = await stack.enter_async_context(opened)
        yield _Watched(read, ended, listing), write


def _server_parameters(settings: McpSettings, where: str) -> StdioServerParameters:
    env = {name: expand(value, f"{where}.env.{name}") for name, value in settings.env.items()}
    command = str(settings.command)
    if command in ("python", "python3"):
        command = sys.executable
    there = Path(settings.cwd or ".").expanduser()
    if not there.is_dir():
        raise ConfigError(f"{where}.cwd: {settings.cwd!r} is no folder")
    path = (get_default_environment() | env).get("PATH", os.defpath)
    if shutil.which(str(there / command) if os.sep in command else command, path=path) is None:
        raise ConfigError(f"{where}.command: there is no program {command!r}; install it, or give its full path")
    arguments: list[str] = list(settings.args)
    if sys.platform == "linux":
        arguments = [*guard.ARGUMENTS, str(os.getpid()), command, *arguments]
        command = sys.executable
    return StdioServerParameters(command=command, args=arguments, env=env, cwd=there)


def _sendable(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace lone surrogates in arguments: JSON may hold them, and the connection would break on sending them."""
    text = json.dumps(arguments, ensure_ascii=False)
    sent: dict[str, Any] = json.loads(text.encode("utf-8", "replace"))
    return sent


def _is_session_gone(error: MCPError) -> bool:
    """Return whether a server does not know the session any more, for example because it was restarted."""
    return error.code == INVALID_REQUEST and "session" in error.message.lower()


def _reason(error: BaseException, settings: McpSettings) -> str:
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
    return str(error) if isinstance(error, MCPError) else describe(error)

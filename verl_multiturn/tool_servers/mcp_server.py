"""A server of the Model Context Protocol for our tools, over stdio or streamable HTTP, by the official SDK.

Which session of tools (`ToolHost`) a request belongs to:

    stdio                     the process is one session, in each version of the protocol
    http://HOST:PORT/mcp      a session of the protocol (`Mcp-Session-Id`), as versions up to 2025-11-25 have them
    http://HOST:PORT/mcp/NAME the session NAME, for later versions, which have no sessions: each request stands alone

A client that knows both kinds of versions is sent to the one that its address serves.

Invariants:
- over stdio nothing but the protocol is written to standard output, whatever tools and their modules print;
- a session ends once: by DELETE, by the end of standard input, by a signal, or when it was not used for too long. After
  that a request of its protocol session gets 404, by which a client begins another one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import uvicorn
from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import RequestBodyLimitMiddleware, StreamableHTTPSessionManager
from mcp.server.transport_security import (
    DEFAULT_MAX_REQUEST_BODY_SIZE,
    TransportSecurityMiddleware,
    TransportSecuritySettings,
)
from mcp.types import UNSUPPORTED_PROTOCOL_VERSION
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verl_multiturn import __version__
from verl_multiturn.calls.tasks import finish
from verl_multiturn.errors import ConfigError
from verl_multiturn.tool_servers.serving import Uvicorn, answer_of, security_of, until_signal
from verl_multiturn.tool_servers.sessions import ToolHost
from verl_multiturn.tools.mcp_tools import SCHEMA_META
from verl_multiturn.tools.running.results import CallResult

PATH = "/mcp"
_NAME = re.compile(r"[A-Za-z0-9._~-]{1,128}")
_STDIO = "stdio"
_ID = "mcp-session-id"
_VERSION = "mcp-protocol-version"
_PIECE = 1 << 16


def mcp_tool(schema: dict[str, Any]) -> types.Tool:
    """Return a tool's schema as MCP lists it, and as a whole in `_meta`, for our own client.

    MCP has no place for some of it: the SDK reorders the keys of the parameters, which a prompt shows in their order,
    drops those that are null, and knows no further keys of a function, such as `strict`.

    Args:
        schema: The schema in OpenAI's form.
    """
    function = schema["function"]
    return types.Tool(
        name=function["name"],
        description=function.get("description"),
        input_schema=function.get("parameters", {"type": "object", "properties": {}}),
        _meta={SCHEMA_META: schema},
    )


def build_server(host: ToolHost) -> Server[Any]:
    """Return the SDK's server, which lists a host's tools and hands calls to their sessions.

    Args:
        host: The tools and their sessions.
    """
    listed = [mcp_tool(schema) for schema in host.schemas]
    parameters = {tool.name: tool.input_schema for tool in listed}

    async def list_tools(ctx: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=listed)

    async def call_tool(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        result = await host.call(_key(ctx.request), params.name, params.arguments or {})
        return await mcp_result(result, has_rewards=host.report is not None)

    return Server(
        "verl-multiturn",
        version=__version__,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        get_tool_input_schema=parameters.get,
    )


async def mcp_result(result: CallResult, has_rewards: bool) -> types.CallToolResult:
    """Return the answer to a call as MCP has it: a text, then images.

    Args:
        result: The answer.
        has_rewards: Whether the client is shown status, reward and metrics.
    """
    text, pictures, failed = await answer_of(result)
    content: list[Any] = [
        types.ImageContent(type="image", data=base64.b64encode(each).decode(), mime_type="image/png")
        for each in pictures
    ]
    if text or not content:
        content.insert(0, types.TextContent(type="text", text=text))
    shown = {"status": str(result.status), "reward": result.reward, "metrics": result.metrics}
    meta = {f"verl-multiturn/{key}": value for key, value in shown.items()} if has_rewards else None
    return types.CallToolResult(content=content, is_error=failed, _meta=meta)


def _key(request: Any) -> str:
    """Return the key of the session that a request belongs to."""
    if request is None:
        return _STDIO
    name = request.url.path.removeprefix(PATH).strip("/")
    return f"name {name}" if name else f"id {request.headers.get(_ID)}"


# ------------------------------------------------------------------------------------------------ standard streams


class Wire:
    """The standard streams of this process, taken from everybody else: what is printed goes to standard error.

    Make it before the tools are loaded, since their modules may print. A child process inherits neither stream.

    Raises:
        ConfigError: One of them is closed.
    """

    def __init__(self) -> None:
        try:
            self._input, self._output = os.dup(0), os.dup(1)
        except OSError:
            raise ConfigError("standard input or output is closed; the protocol needs both, or --http PORT") from None
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)

    async def lines(self) -> AsyncIterator[str]:
        """Yield the lines of standard input.

        A thread reads them that nobody waits for: a read of a pipe cannot be cancelled.
        """
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[bytes] = asyncio.Queue()

        def read() -> None:
            piece = b"."
            with contextlib.suppress(RuntimeError):  # the loop has ended
                while piece:
                    try:
                        piece = os.read(self._input, _PIECE)
                    except OSError:
                        piece = b""
                    loop.call_soon_threadsafe(pieces.put_nowait, piece)

        threading.Thread(target=read, daemon=True, name="standard input").start()
        begun: list[bytes] = []
        while piece := await pieces.get():
            *ended, rest = piece.split(b"\n")
            for line in ended:
                yield b"".join([*begun, line]).decode("utf-8", "replace")
                begun = []
            begun.append(rest)

    async def write(self, text: str) -> None:
        """Write a text to standard output.

        Raises:
            BrokenPipeError: Nobody reads it any more.
        """
        await asyncio.to_thread(self._write, text.encode("utf-8", "replace"))

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._output, data) :]

    async def flush(self) -> None:
        """Do nothing: all is written."""


async def serve_stdio(host: ToolHost, wire: Wire) -> int:
    """Serve one client until its standard input ends or a signal comes, and return the exit status.

    Args:
        host: The tools; closed at the end.
        wire: The standard streams.
    """
    server = build_server(host)

    async def serve() -> None:
        try:
            async with stdio_server(cast(Any, wire.lines()), cast(Any, wire)) as (read, write):
                await server.run(read, write, server.create_initialization_options())
        except* BrokenPipeError:  # nobody reads answers any more
            pass

    return await until_signal(serve(), host)


# ---------------------------------------------------------------------------------------------------------- HTTP


async def serve_http(host: ToolHost, listening: socket.socket, address: str) -> int:
    """Serve clients until a signal comes, and return the exit status.

    Args:
        host: The tools; closed at the end.
        listening: The socket.
        address: The address by which it was named.
    """
    return await until_signal(answer_http(host, listening, address), host)


async def answer_http(host: ToolHost, listening: socket.socket, address: str) -> None:
    """Serve clients until it is cancelled; called by `serve_http` and by tests.

    Args:
        host: The tools.
        listening: The socket.
        address: The address by which it was named.
    """
    security = security_of(address)
    manager = StreamableHTTPSessionManager(
        build_server(host),
        security_settings=security,
        session_idle_timeout=host.idle_s,
        max_sessions=host.most,
    )
    app = RequestBodyLimitMiddleware(_App(host, manager, security), DEFAULT_MAX_REQUEST_BODY_SIZE)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1
    )
    server = Uvicorn(config)
    async with manager.run():
        serving = asyncio.ensure_future(server.serve([listening]))
        try:
            await asyncio.shield(serving)
        finally:
            server.should_exit = True
            await finish(serving)


class _App:
    """The ASGI application: it finds each request's session, keeps it in use meanwhile, and ends it on DELETE.

    Args:
        host: The tools and their sessions.
        manager: The SDK's sessions of the protocol.
        security: The checks of headers.
    """

    def __init__(
        self, host: ToolHost, manager: StreamableHTTPSessionManager, security: TransportSecuritySettings | None
    ) -> None:
        self._host = host
        self._manager = manager
        self._security = TransportSecurityMiddleware(security)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            answer = await self._answer(Request(scope, receive)) or self._manager.handle_request
            await answer(scope, receive, send)

    async def _answer(self, request: Request) -> ASGIApp | None:
        """Return what answers a request; None: the SDK's sessions, and no session of tools is in use meanwhile."""
        path = request.url.path
        name = path.removeprefix(PATH).strip("/")
        if not f"{path}/".startswith(f"{PATH}/") or (name and not _NAME.fullmatch(name)):
            text = f"no {path!r:.200} here; the address is {PATH}, or {PATH}/NAME with a name of {_NAME.pattern}\n"
            return PlainTextResponse(text, 404)
        version = request.headers.get(_VERSION)
        is_modern = version is not None and version not in HANDSHAKE_PROTOCOL_VERSIONS
        if name and not is_modern and request.method == "DELETE":
            return await self._delete(request)
        if bool(name) != is_modern and request.method == "POST":
            return await self._other_version(request, version, bool(name))
        if name or _ID not in request.headers:
            return None
        return self._in_session(_key(request), request.method == "DELETE")

    def _in_session(self, key: str, is_end: bool) -> ASGIApp:
        """Return the answer to a request of a protocol session, whose tools end with it if that is its order."""
        if self._host.has_ended(key):
            body = {"jsonrpc": "2.0", "id": None, "error": {"code": types.INVALID_REQUEST, "message": _GONE}}
            return JSONResponse(body, 404)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            status = 0

            async def watch(message: Message) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            with self._host.use(key):
                await self._manager.handle_request(scope, receive, watch)
                if is_end and 200 <= status < 300:
                    await self._host.end(key)

        return answer

    async def _delete(self, request: Request) -> Response:
        """End a session by its name."""
        refusal = await self._security.validate_request(request)
        if refusal is None:
            await self._host.end(_key(request))
        return refusal or Response(status_code=204)

    async def _other_version(self, request: Request, version: str | None, is_named: bool) -> Response:
        """Answer a request in a version that its address does not serve with those that it does."""
        refusal = await self._security.validate_request(request, is_post=True)
        if refusal is not None:
            return refusal
        served: Sequence[str] = MODERN_PROTOCOL_VERSIONS if is_named else HANDSHAKE_PROTOCOL_VERSIONS
        other = PATH if is_named else f"{PATH}/NAME, where NAME is the session"
        text = f"this address serves MCP {' and '.join(served)}; for other versions use {other}"
        data = {"supported": list(served), "requested": version or "none"}
        error = {"code": UNSUPPORTED_PROTOCOL_VERSION, "message": text, "data": data}
        return JSONResponse({"jsonrpc": "2.0", "id": await _request_id(request), "error": error}, 400)


_GONE = "Session not found: it has ended; begin another one"


async def _request_id(request: Request) -> Any:
    """Return the id of a request's message; None where it has none."""
    try:
        message = json.loads(await request.body())
    except (ValueError, RecursionError):
        return None
    found = message.get("id") if isinstance(message, dict) else None
    return found if isinstance(found, int | str) else None

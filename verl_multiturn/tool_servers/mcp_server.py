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
import io
import json
import os
import re
import signal
import socket
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
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
from verl_multiturn.chat.images import is_pil
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.tool_servers.sessions import ToolHost, unmarked
from verl_multiturn.tools.mcp_tools import SCHEMA_META
from verl_multiturn.tools.running.results import CallResult, CallStatus

PATH = "/mcp"
_NAME = re.compile(r"[A-Za-z0-9._~-]{1,128}")
_STDIO = "stdio"
_ID = "mcp-session-id"
_VERSION = "mcp-protocol-version"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_EVERYWHERE = ("0.0.0.0", "::", "")
_END_S = 10.0
"""Seconds after the release of all sessions for the rest of the process to end."""
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
    images, text, failed = [], unmarked(result), result.status is not CallStatus.OK
    if given := [image for image in result.images if image is not None]:
        if strange := [image for image in given if not is_pil(image)]:
            text, failed = f"the tool returned {show(strange[0])} as an image; it must return PIL images", True
        else:
            images = await asyncio.to_thread(lambda: [_png(image) for image in given])
    content: list[Any] = [types.ImageContent(type="image", data=image, mime_type="image/png") for image in images]
    if text or not content:
        content.insert(0, types.TextContent(type="text", text=text))
    shown = {"status": str(result.status), "reward": result.reward, "metrics": result.metrics}
    meta = {f"verl-multiturn/{key}": value for key, value in shown.items()} if has_rewards else None
    return types.CallToolResult(content=content, is_error=failed, _meta=meta)


def _png(image: Any) -> str:
    held = io.BytesIO()
    image.save(held, "PNG")
    return base64.b64encode(held.getvalue()).decode()


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

    return await _until_signal(serve(), host)


async def _until_signal(serving: Coroutine[Any, Any, None], host: ToolHost) -> int:
    """Serve until the serving ends or a signal comes, release all sessions, and return the exit status."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[int] = loop.create_future()

    def interrupt(number: int) -> None:
        if not came.done():
            came.set_result(130 if number == signal.SIGINT else 0)

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(each, interrupt, each)
    task = asyncio.ensure_future(serving)
    await asyncio.wait({task, came}, return_when=asyncio.FIRST_COMPLETED)
    status = came.result() if came.done() else 0
    await host.aclose()
    # A tool's own thread, or a client that reads nothing, keeps no process alive that nobody speaks to.
    last = threading.Timer(_END_S, os._exit, (status,))
    last.daemon = True
    last.start()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return status


# ---------------------------------------------------------------------------------------------------------- HTTP


class _Uvicorn(uvicorn.Server):
    """A server that leaves signals to us, since sessions are released before connections are closed."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()


def security_of(address: str) -> TransportSecuritySettings | None:
    """Return the checks of the headers Host and Origin against pages of other sites, for an address to listen on.

    Args:
        address: The address; one of this machine alone admits only its own names. None: no check, since an address of
            all networks may be called anything.
    """
    if address in _EVERYWHERE:
        return None
    names = LOOPBACK if address in LOOPBACK else (address,)
    hosts = [f"[{name}]:*" if ":" in name else f"{name}:*" for name in names]
    return TransportSecuritySettings(allowed_hosts=hosts, allowed_origins=[f"http://{host}" for host in hosts])


async def serve_http(host: ToolHost, listening: socket.socket, address: str) -> int:
    """Serve clients until a signal comes, and return the exit status.

    Args:
        host: The tools; closed at the end.
        listening: The socket.
        address: The address by which it was named.
    """
    return await _until_signal(answer_http(host, listening, address), host)


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
    server = _Uvicorn(config)
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
        self._running: set[tuple[str, str]] = set()
        """Session and id of each request of a protocol session that runs."""

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
        return await self._in_session(request, _key(request))

    async def _in_session(self, request: Request, key: str) -> ASGIApp:
        """Return the answer to a request of a protocol session, whose tools end with it if that is its order."""
        if self._host.has_ended(key):
            return _refusal(404, None, "Session not found: it has ended; begin another one")
        is_end, number = request.method == "DELETE", await _request_id(request)
        if number is not None and (key, str(number)) in self._running:
            # The SDK would give both answers to the later of the two, and none to the other.
            text = f"the id {number!r} belongs to a request of this session that still runs; take another one"
            return _refusal(400, number, text)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async def watch(message: Message) -> None:
                if is_end and 200 <= message.get("status", 500) < 300:
                    await self._host.end(key)
                await send(message)

            self._running.add((key, str(number)))
            try:
                with self._host.use(key):
                    await self._manager.handle_request(scope, _again(await request.body(), receive), watch)
            finally:
                self._running.discard((key, str(number)))

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
        return _refusal(400, await _request_id(request), text, UNSUPPORTED_PROTOCOL_VERSION, data)


def _refusal(status: int, number: Any, text: str, code: int = types.INVALID_REQUEST, data: Any = None) -> Response:
    error = {"code": code, "message": text, **({} if data is None else {"data": data})}
    return JSONResponse({"jsonrpc": "2.0", "id": number, "error": error}, status)


async def _request_id(request: Request) -> Any:
    """Return the id of a request of the protocol; None where a message is none, or has none."""
    try:
        message = json.loads(await request.body())
    except (ValueError, RecursionError):
        return None
    found = message.get("id") if isinstance(message, dict) and "method" in message else None
    return found if isinstance(found, int | str) else None


def _again(body: bytes, receive: Receive) -> Receive:
    """Return the receiving end of a request whose body was read, from its beginning."""
    begun: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return begun.pop() if begun else await receive()

    return next_message

"""The server of the Model Context Protocol over streamable HTTP: addresses, versions and ends of sessions.

Which session a request belongs to is in `mcp_server.py`. A client that knows versions with and without sessions is sent
to those that its address serves.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Sequence
from typing import Any

import uvicorn
from mcp import types
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

from verl_multiturn.calls.tasks import finish
from verl_multiturn.tool_servers.mcp_server import PATH, SESSION_ID, build_server, session_key
from verl_multiturn.tool_servers.serving import Uvicorn, security_of, until_signal
from verl_multiturn.tool_servers.sessions import ToolHost

_NAME = re.compile(r"[A-Za-z0-9._~-]{1,128}")
_VERSION = "mcp-protocol-version"


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
        if name or SESSION_ID not in request.headers:
            return None
        return await self._in_session(request, session_key(request))

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
            await self._host.end(session_key(request))
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

"""The HTTP server of a worker: behind one port, the endpoints of all its sessions.

    async with ProxyServer() as server:
        address = server.open(session)          # an agent gets its base_url and api_key
        ...                                     # the agent runs, the session ends
        await server.close_session(address)     # the secret is dead

The way of one request: the secret names its session; `RequestReader` makes a `ChatRequest` of its body; an `Exchange`
has the session complete that, and writes the answer.

Invariants:
- a secret reaches its own session and nothing of another. It is compared by its digest, and is in no log, no error and
  no `repr`;
- an error that repeating cannot mend is never answered with 5xx, a mistake of ours included;
- after `close_session` no request of the session is under way; after `aclose` no task and no connection remains, and
  the port is free.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from verl_multiturn.describe import describe
from verl_multiturn.errors import ConfigError
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.http.bodies import RequestReader
from verl_multiturn.proxy.http.clients import ClientConnection, UnauthenticatedConnections
from verl_multiturn.proxy.http.exchange import Exchange
from verl_multiturn.proxy.http.listener import Listener, raise_open_files
from verl_multiturn.proxy.http.paths import COUNT_TOKENS, check_served, is_models, route_of
from verl_multiturn.proxy.protocols import Protocol, model
from verl_multiturn.proxy.protocols import models as all_models
from verl_multiturn.proxy.protocols.anthropic_messages import token_count
from verl_multiturn.proxy.protocols.requests import RefusedError

if TYPE_CHECKING:
    from verl_multiturn.proxy.sessions.session import AgentSession

logger = logging.getLogger(__name__)

_ENDING_S = 1.0
"""Seconds in which answers of a session that has ended may still be written."""
_IDLE_S = 20.0
"""Seconds after which an idle connection of a session that has ended is closed. Clients use none that long."""
_MOST_CONNECTIONS = 256
"""Connections of one session, and at most a quarter of the open-file limit. Beyond it those are closed that were idle
longest."""
_BACKLOG = 1024
_HEADER_BYTES = 64 * 1024
_OPTIONS: Mapping[str, Any] = {
    "keepalive_timeout": 600.0,  # an agent's tool may run for minutes between two requests
    "access_log": None,  # it would show the secret of a path
    "lingering_time": 1.0,  # so long is a refused body read and thrown away, for the client to see the answer
    "auto_decompress": False,  # `bodies` inflates, within bounds
    "max_line_size": _HEADER_BYTES,
    "max_field_size": _HEADER_BYTES,
}


@dataclass(eq=False)
class _OpenSession:
    """A session on this server."""

    session: AgentSession
    most: int
    """The most connections."""
    reader: RequestReader
    handlers: dict[asyncio.Task[Any], ClientConnection] = field(default_factory=dict)
    """The tasks that answer its requests."""
    connections: dict[ClientConnection, None] = field(default_factory=dict)
    """The connections that it was the last to use, the last used one last."""
    failed: bool = False
    used: float = field(default_factory=time.monotonic)
    """When its last request came (`time.monotonic`)."""

    def use(self, connection: ClientConnection) -> None:
        """Note that a request came by a connection."""
        connection.authenticated()
        self.used = time.monotonic()
        if isinstance(connection.owner, _OpenSession):
            connection.owner.connections.pop(connection, None)
        else:
            connection.lost.add_done_callback(lambda _: _let_go(connection))
        connection.owner = self
        self.connections[connection] = None
        if len(self.connections) > self.most:
            self.push_out()

    def push_out(self) -> bool:
        """Close the connection that was idle longest, and return whether there was one."""
        oldest = next((each for each in self.connections if each.is_idle), None)
        if oldest is None:
            return False
        del self.connections[oldest]
        oldest.abort()
        return True

    async def leave(self) -> None:
        """End running requests, after `_ENDING_S` by force.

        Idle connections are closed a while later: other sessions may share them, as the agents in one process do, and
        a client could be about to use them.
        """
        if self.handlers:
            await asyncio.wait(self.handlers, timeout=_ENDING_S)
        handlers = dict(self.handlers)
        for task, connection in handlers.items():
            task.cancel()
            connection.abort()
        asyncio.get_running_loop().call_later(_IDLE_S, self._close_idle)
        await asyncio.gather(*handlers, return_exceptions=True)

    def _close_idle(self) -> None:
        """Close the connections that were idle for long; a gateway's other routes may use them for other sessions."""
        for connection in list(self.connections):
            if connection.is_idle and connection.idle_s >= _IDLE_S:
                connection.abort()
                self.connections.pop(connection, None)
        if self.connections:
            asyncio.get_running_loop().call_later(max(_IDLE_S, 0.01), self._close_idle)


def _let_go(connection: ClientConnection) -> None:
    assert isinstance(connection.owner, _OpenSession)
    connection.owner.connections.pop(connection, None)


def check_host(host: str) -> str:
    """Return the host on which to listen.

    Raises:
        ConfigError: It means all interfaces: an endpoint beyond this machine must be named explicitly.
    """
    try:
        anywhere = not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        anywhere = False  # a name
    if anywhere:
        raise ConfigError(
            f"proxy.host={host!r} stands for all interfaces; name the one address that the agents reach, or leave the "
            "setting out to listen on 127.0.0.1"
        )
    return host


class ProxyServer:
    """The endpoints of one event loop's sessions.

    Args:
        host: Where to listen, on a port that is free.
        ping_s: Seconds between the pings of a stream whose generation is under way.
        model: The name of the one model in `/v1/models`, where a session has no roles. Requests may name any then.
        port: The port; 0: one that is free.
        beside: Answers requests to paths beside those of the protocols; None for a path that is not its own.
        unknown: Returns why a key opens no session here, such as one that has ended; None: it does not know the key.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        ping_s: float = 2.0,
        model: str = "policy",
        port: int = 0,
        beside: Callable[[web.BaseRequest], Awaitable[web.Response] | None] | None = None,
        unknown: Callable[[str], RefusedError | None] | None = None,
    ) -> None:
        self._port, self._beside, self._unknown = port, beside, unknown
        self._host = check_host(host)
        self._ping_s = ping_s
        self._model = model
        self._open: dict[bytes, _OpenSession] = {}
        self._files = 0
        """How many files this process may open."""
        self._listener: Listener | None = None
        self._http: web.Server | None = None
        self._handlers: set[asyncio.Task[Any]] = set()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="proxy-body")
        self.address = ""
        """Such as `http://127.0.0.1:40123`; "" before `start`."""

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: The host is not one of this machine's.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            family, _, _, _, place = found[0]
            listening = socket.create_server(place[:2], family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"proxy.host={self._host!r}: cannot listen there ({error}); name an address of this machine"
                + (f", and a port that is free in the place of {self._port}" if self._port else "")
            ) from None
        self._files = raise_open_files()
        unauthenticated = UnauthenticatedConnections(self._files)
        http = self._http = web.Server(self._handle)
        self._listener = Listener(
            listening,
            lambda: ClientConnection(unauthenticated, http, loop, **_OPTIONS),
            lambda: unauthenticated.push_out() or self._push_out_idle(),
        )
        host, port = listening.getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if family == socket.AF_INET6 else f"http://{host}:{port}"

    async def aclose(self) -> None:
        """Stop listening, end all requests and close all connections."""
        if self._listener is not None:
            await self._listener.aclose()
        self._open.clear()
        ending = list(self._handlers)
        for task in ending:
            task.cancel()
        for connection in self._http.connections if self._http is not None else ():
            if isinstance(connection, ClientConnection):
                connection.abort()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*ending, return_exceptions=True)
        if self._http is not None:
            await self._http.shutdown(_ENDING_S)
        await asyncio.sleep(0)  # the connections' own tasks end

    async def __aenter__(self) -> ProxyServer:
        await self.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()

    def open(self, session: AgentSession) -> SessionAddress:
        """Let a session's agent in.

        Raises:
            RuntimeError: The server does not listen.
        """
        if not self.address:
            raise RuntimeError("the server was not started; call `start` first")
        secret = secrets.token_urlsafe(32)
        most = max(1, min(_MOST_CONNECTIONS, self._files // 4))
        reader = RequestReader(session.sent, session.journal.refuse, self._threads)
        self._open[_digest(secret)] = _OpenSession(session, most, reader)
        return SessionAddress(f"{self.address}/v1", secret, self.address, session.id)

    async def close_session(self, address: SessionAddress) -> None:
        """Make a secret worthless, and end its running requests. The session must have ended before."""
        opened = self._open.pop(_digest(address.api_key), None)
        if opened is not None:
            await opened.leave()

    def session_of(self, key: str) -> AgentSession | None:
        """Return the open session of a key; None: it opens none."""
        opened = self._open.get(_digest(key))
        return None if opened is None else opened.session

    def idle_s(self, key: str) -> float:
        """Return the seconds since an open session's last request came; 0 while one is answered, or without one."""
        opened = self._open.get(_digest(key))
        return 0.0 if opened is None or opened.handlers else time.monotonic() - opened.used

    def _push_out_idle(self) -> bool:
        """Close an idle connection of the session that has most, and return whether there was one."""
        by_connections = sorted(self._open.values(), key=lambda opened: len(opened.connections), reverse=True)
        return any(opened.push_out() for opened in by_connections)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        secret, route, protocol = route_of(request)
        opened = None
        connection = request.protocol
        assert isinstance(connection, ClientConnection)
        try:
            connection.begin(request)
            if self._beside is not None and (beside := self._beside(request)) is not None:
                return await beside
            check_served(route, request.method)
            if route == "":
                return web.json_response({"status": "ok"})
            opened = self._authenticated(secret, request)
            opened.handlers[task] = connection
            opened.use(connection)
            return await self._routed(request, route, protocol, opened)
        except RefusedError as refused:
            return _refusal(protocol, refused, request)
        except ConnectionError:
            connection.abort()
            return web.Response(status=400)  # it is never read
        except Exception as error:  # a mistake of ours: a client would repeat after a 500, and fail again
            answer = _refusal(protocol, self._failed(opened, error), request)
            if request.writer.output_size:  # within an answer that has begun
                connection.abort()
            return answer
        finally:
            connection.end()
            self._handlers.discard(task)
            if opened is not None:
                opened.handlers.pop(task, None)

    def _authenticated(self, secret: str | None, request: web.BaseRequest) -> _OpenSession:
        """Return the session that a request is for.

        Raises:
            RefusedError: It has no secret that is alive.
        """
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        sent = [secret, request.headers.get("x-api-key"), bearer if scheme.lower() == "bearer" else None]
        for each in sent:
            if each and (opened := self._open.get(_digest(each.strip()))) is not None:
                return opened
            if each and self._unknown is not None and (refused := self._unknown(each.strip())) is not None:
                raise refused
            if each and each == secret:
                break  # a path names its session; no other key changes that
        raise RefusedError(
            401, "invalid_api_key", "this key opens no session here; send the key that the agent was started with"
        )

    async def _routed(
        self, request: web.BaseRequest, route: str, protocol: Protocol, opened: _OpenSession
    ) -> web.StreamResponse:
        """Answer a request of a known session.

        Raises:
            RefusedError: The request cannot be answered.
        """
        if is_models(route):
            name, roles = route.removeprefix("models").strip("/"), opened.session.roles
            if not name:
                return web.json_response(all_models([self._model] if roles is None else roles.names))
            return web.json_response(model(name if roles is None else roles.named(name)))
        async with opened.reader.read(request, protocol) as asked:
            if route == COUNT_TOKENS:
                return web.json_response(token_count(await opened.session.count_tokens(asked)))
            failed = partial(self._failed, opened)
            return await Exchange(request, protocol, asked, opened.session, failed, self._ping_s, self._threads).run()

    def _failed(self, opened: _OpenSession | None, error: BaseException) -> RefusedError:
        """Note a mistake of ours, and log it once for each session."""
        if opened is None or not opened.failed:
            logger.error("a request of an agent failed", exc_info=error)
        if opened is not None:
            opened.failed = True
            opened.session.failed = opened.session.failed or f"the proxy failed: {describe(error)}"
        return RefusedError(
            400, "proxy_failed", f"the proxy failed at this request ({type(error).__name__}); see the worker's log"
        )


def _digest(secret: str) -> bytes:
    """Return the form in which secrets are compared: the time for that reveals nothing about the secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _refusal(protocol: Protocol, refused: RefusedError, request: web.BaseRequest) -> web.Response:
    headers = {"Retry-After": str(refused.retry_after_s)} if refused.retry_after_s else None
    response = web.json_response(body=orjson.dumps(protocol.error(refused)), status=refused.status, headers=headers)
    if not request.content.at_eof():  # the rest of the body is not worth reading
        response.force_close()
    return response

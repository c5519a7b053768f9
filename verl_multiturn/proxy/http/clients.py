"""The clients' end of a connection: who is connected, and whether an answer reached them.

Invariants:
- nothing that a client sent is logged or repeated in an error: it may hold a secret;
- a connection that shows no key within `UNAUTHENTICATED_S` is closed, so that neither idle nor dripping ones pile up.
  There are at most `MOST_UNAUTHENTICATED`, and they take at most a quarter of the open-file limit;
- a client that has closed its sending side gets the answers to its requests, as HTTP allows.
"""

from __future__ import annotations

import asyncio
import select
from typing import Any

from aiohttp import web

UNAUTHENTICATED_S = 30.0
MOST_UNAUTHENTICATED = 4096
# Linux alone reports at once that the other side has closed; elsewhere the event loop finds out a moment later.
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)


class ClientConnection(web.RequestHandler):
    """One connection of a client.

    Args:
        unauthenticated: The connections that have shown no key yet.
        manager: See `aiohttp.web.RequestHandler`, as for `options`.
        loop: The event loop.
        options: Further options.
    """

    def __init__(
        self,
        unauthenticated: UnauthenticatedConnections,
        manager: web.Server,
        loop: asyncio.AbstractEventLoop,
        **options: Any,
    ) -> None:
        super().__init__(manager, loop=loop, **options)
        self._unauthenticated = unauthenticated
        self.lost: asyncio.Future[None] = loop.create_future()
        """Done when the connection is over."""
        self.owner: object = None
        """The session that was the last to use it; None before."""
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done when the client sends nothing more, but may read its answers."""
        self.request: web.BaseRequest | None = None
        """The request under way; those that came with it wait for it."""
        self._used = loop.time()
        """When its last request was over."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin. Writing then waits until the kernel has taken everything, which shows that it was delivered."""
        super().connection_made(transport)
        if isinstance(transport, asyncio.WriteTransport):
            transport.set_write_buffer_limits(high=0)
        self._unauthenticated.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End."""
        super().connection_lost(exc)
        self._unauthenticated.remove(self)
        if not self.lost.done():
            self.lost.set_result(None)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for the next request."""
        return self._waiter is not None and not self._waiter.done()

    @property
    def idle_s(self) -> float:
        """Return the seconds since its last request was over, or since it was opened."""
        return self._loop.time() - self._used

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio closes the connection unless it is True
        """Stay open while a whole request of the client has no answer."""
        content = self._messages[-1][1] if self._messages else self.request.content if self.request else None
        if self.is_idle or (content is not None and not content.is_eof()):
            return False
        if not self.ended.done():  # uvloop reports it again when reading goes on
            self.ended.set_result(None)
            self._close_after_last()
        return True

    def begin(self, request: web.BaseRequest) -> None:
        """Note that a request is under way.

        Raises:
            ConnectionError: Its body will never be whole.
        """
        self.request = request
        if self.ended.done() and not request.content.is_eof():
            raise ConnectionResetError("the client has gone")

    def end(self) -> None:
        """Note that the request is over."""
        self.request = None
        self._used = self._loop.time()
        self._close_after_last()

    def _close_after_last(self) -> None:
        if self.ended.done() and not self._messages:
            self.close()  # when the answer under way is written

    def authenticated(self) -> None:
        """Note that the client has shown a key."""
        self._unauthenticated.remove(self)

    def abort(self) -> None:
        """Close the connection at once. Unsent bytes are lost."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer bytes that are not HTTP, in our own words: aiohttp would repeat the line that it could not read."""
        response = web.json_response(
            {"error": {"type": "invalid_request_error", "message": "the request is no valid HTTP; correct it"}},
            status=400,
        )
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log nothing: aiohttp would show the request. The server logs the errors of a handler."""


class UnauthenticatedConnections:
    """The connections that have shown no key yet, the oldest first.

    Args:
        files: How many files the process may open.
    """

    def __init__(self, files: int) -> None:
        self._most = max(1, min(MOST_UNAUTHENTICATED, files // 4))
        self._timers: dict[ClientConnection, asyncio.TimerHandle] = {}

    def add(self, connection: ClientConnection) -> None:
        """Add a connection. If there are too many, the oldest is closed."""
        if len(self._timers) >= self._most:
            self.push_out()
        self._timers[connection] = asyncio.get_running_loop().call_later(UNAUTHENTICATED_S, connection.abort)

    def push_out(self) -> bool:
        """Close the oldest connection, and return whether there was one."""
        oldest = next(iter(self._timers), None)
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.abort()
        return True

    def remove(self, connection: ClientConnection) -> None:
        """Remove a connection, if it is there."""
        if (timer := self._timers.pop(connection, None)) is not None:
            timer.cancel()


def has_ended(transport: asyncio.Transport | None) -> bool:
    """Return whether the client sends nothing more. It may have gone, or still read."""
    return _is(transport, _PEER_CLOSED | select.POLLERR | select.POLLHUP)


def was_reset(transport: asyncio.Transport | None) -> bool:
    """Return whether the connection broke, as it does when data reach a client that has closed it.

    A client that closes only its side after it has read everything breaks nothing.
    """
    return _is(transport, select.POLLERR | select.POLLHUP)


def _is(transport: asyncio.Transport | None, events: int) -> bool:
    if transport is None or transport.is_closing():
        return True
    descriptor = transport.get_extra_info("socket").fileno()
    if descriptor < 0:
        return True
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(0))

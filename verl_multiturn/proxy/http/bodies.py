"""Requests, from their HTTP bodies: received, inflated, parsed and read within bounds.

A body is refused before it is read where its stated length is too long, otherwise as soon as it is. It has `BODY_S`
seconds to arrive. A held body is never longer than `MOST_BYTES`, compressed or not. A session holds at most
`HELD_BYTES` of bodies at once; the bodies of further requests wait in their sockets.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager

from aiohttp import web

from verl_multiturn.proxy.http.histories import CachedRequest, Histories, cached_from
from verl_multiturn.proxy.http.parsing import parse_body
from verl_multiturn.proxy.protocols import PROTOCOLS, Protocol
from verl_multiturn.proxy.protocols.requests import ChatRequest, RefusedError, Sent

MOST_BYTES = 8 * 1024 * 1024
HELD_BYTES = 4 * MOST_BYTES
BODY_S = 30.0
_IN_THREAD_BYTES = 128 * 1024
"""Larger bodies are read in a thread: 8 MiB would block the event loop too long."""
_APPENDING = PROTOCOLS["/v1/chat/completions"]


class WeightedSemaphore:
    """A semaphore of which more than one may be acquired at once. Who came first is served first.

    Args:
        most: How many there are.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, count: int) -> None:
        """Acquire `count`, at most as many as there are in all; wait until they are free."""
        if not self._waiting and count <= self._free:
            self._free -= count
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(count)
            raise

    def release(self, count: int) -> None:
        """Release the acquired bytes."""
        self._free += count
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= self._free):
            wanted, turn = self._waiting.popleft()
            if not turn.done():
                self._free -= wanted
                turn.set_result(None)


class RequestReader:
    """Reads the requests of one session.

    Args:
        sent: Finds earlier requests of the session.
        refused: Notes a request that cannot be read: its protocol's name, and the code of the refusal.
        threads: Where large bodies are read.
    """

    def __init__(self, sent: Sent, refused: Callable[[str, str], None], threads: Executor) -> None:
        self._sent = sent
        self._refused = refused
        self._threads = threads
        self._free = WeightedSemaphore(HELD_BYTES)
        self._histories = Histories()

    @asynccontextmanager
    async def read(self, request: web.BaseRequest, protocol: Protocol) -> AsyncIterator[ChatRequest]:
        """Read a request. Its body counts as held until the context ends.

        Raises:
            RefusedError: It is too long, too slow, badly framed, or no request of this protocol.
            ConnectionError: The client has gone.
        """
        held = 0
        try:
            try:
                most = _most_bytes(request)
                await self._free.acquire(most)
                held = most
                asked, length = await self._asked(request, protocol, await _received(request))
            except RefusedError as refused:
                self._refused(protocol.name, refused.code)
                raise
            self._free.release(held - length)  # of a body whose length the head did not have
            held = length
            yield asked
        finally:
            self._free.release(held)

    async def _asked(self, request: web.BaseRequest, protocol: Protocol, body: bytes) -> tuple[ChatRequest, int]:
        """Return a body's request, and its length in bytes, inflated."""
        encoding = _listed(request, "content-encoding")
        appends = protocol is _APPENDING and not encoding
        if appends and (continued := self._histories.continued(protocol, body)) is not None:
            return continued, len(body)

        def read() -> tuple[ChatRequest, CachedRequest | None, int]:
            text = inflated(body, encoding)
            parsed = parse_body(text)
            asked = protocol.read(parsed, self._sent)
            return asked, cached_from(body, parsed, asked) if appends else None, len(text)

        if len(body) <= _IN_THREAD_BYTES and not encoding:
            asked, cached, length = read()
        else:
            asked, cached, length = await asyncio.get_running_loop().run_in_executor(self._threads, read)
        if cached is not None:
            self._histories.add(cached)
        return asked, length


async def read_body(request: web.BaseRequest) -> bytes:
    """Read a body of at most `MOST_BYTES` as it was before it was compressed; routes beside the protocols' call it.

    Raises:
        RefusedError: It is too long, too slow, badly framed, or coded in a way that is not read here.
        ConnectionError: The client has gone.
    """
    _most_bytes(request)
    return inflated(await _received(request), _listed(request, "content-encoding"))


def _most_bytes(request: web.BaseRequest) -> int:
    """Return the most bytes that a request's body may take, from its headers alone.

    Raises:
        RefusedError: It is too long, or coded in a way that is not read here.
    """
    transfer = _listed(request, "transfer-encoding")
    if transfer not in ("", "chunked"):  # the parser has taken off the chunks, and no other coding
        raise RefusedError(
            400,
            "unsupported_transfer_encoding",
            f"transfer-encoding {transfer[:40]!r}: expected chunked or none; send the body without another coding",
        )
    encoding = _listed(request, "content-encoding")
    if encoding not in ("", "identity", "gzip"):
        raise RefusedError(
            415,
            "unsupported_content_encoding",
            f"content-encoding {encoding[:40]!r}: expected gzip or none; send the body uncompressed",
        )
    length = request.content_length
    if length is None or encoding == "gzip":
        length = max(length or 0, MOST_BYTES) if request.body_exists else 0
    if length > MOST_BYTES:
        raise _too_long()
    return length


def _listed(request: web.BaseRequest, name: str) -> str:
    """Return the codings that a header lists, in one line or several, in lower case; "" without one."""
    return ", ".join(request.headers.getall(name, ())).strip().lower()


async def _received(request: web.BaseRequest) -> bytes:
    """Return a request's body, as it was sent.

    Raises:
        RefusedError: It is too long, too slow, or badly framed.
        ConnectionError: The client has gone.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            if request.headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
                request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > MOST_BYTES:
                    raise _too_long()
    except TimeoutError:
        raise RefusedError(408, "request_timeout", f"the body took longer than {BODY_S:g} s; send it at once") from None
    except web.RequestPayloadError:
        raise RefusedError(
            400, "invalid_request_error", "the body is badly framed; check content-length or the chunks"
        ) from None
    return bytes(body)


def inflated(body: bytes, encoding: str) -> bytes:
    """Return a body as it was before it was compressed.

    Args:
        body: The body, as it was sent.
        encoding: Its content encoding, in lower case: gzip, or any other for none.

    Raises:
        RefusedError: It cannot be inflated, or is too long when it is.
    """
    if encoding != "gzip":
        return body
    inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        whole = inflater.decompress(body, MOST_BYTES + 1)
    except zlib.error as error:
        raise RefusedError(400, "invalid_request_error", f"the body is no gzip ({error}); send it as it is") from None
    if len(whole) > MOST_BYTES:
        raise _too_long()
    if not inflater.eof:
        raise RefusedError(400, "invalid_request_error", "the body's gzip is cut off; send all of it")
    if inflater.unused_data:
        raise RefusedError(
            400,
            "invalid_request_error",
            f"{len(inflater.unused_data)} bytes follow the body's gzip; send one gzip and nothing after it",
        )
    return whole


def _too_long() -> RefusedError:
    return RefusedError(413, "request_too_large", f"the body has more than {MOST_BYTES} bytes; send less")

"""Bodies of requests: read, inflated and parsed within bounds.

A body is refused before it is read where its length says enough, and as soon as it is too long otherwise. It has
`BODY_S` seconds to arrive. What is held is never more than `MOST_BYTES`, compressed or not. A session holds at most
`HELD_BYTES` of bodies at once; the bodies of further requests wait in their sockets.
"""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections import deque
from typing import Any

import orjson
from aiohttp import web

from verl_multiturn.proxy.protocols.requests import RefusedError

MOST_BYTES = 8 * 1024 * 1024
HELD_BYTES = 4 * MOST_BYTES
MOST_MARKS = 150_000
"""The most brackets, braces and colons of a body. Parsing holds up the whole process, 0.3 ms for 1,000 of them."""
BODY_S = 30.0
_MOST_EXACT_BYTES = 1024 * 1024
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
"""In a text without it, orjson, which knows 64 bits, reads all whole numbers as they are."""
# The two halves of a surrogate pair, or another escape; else a half alone, which UTF-8 cannot express.
_ESCAPES = re.compile(
    rb"(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\(?!u[dD][89a-fA-F]).)|\\u[dD][89a-fA-F]..", re.S
)


class Allowance:
    """The bytes that the bodies of one session may take at once. Requests get them in the order in which they came.

    Args:
        most: Bytes.
    """

    def __init__(self, most: int = HELD_BYTES) -> None:
        self._free = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, count: int) -> None:
        """Take `count` bytes, at most as many as there are in all; wait until they are free."""
        if not self._waiting and count <= self._free:
            self._free -= count
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(count)
            raise

    def give(self, count: int) -> None:
        """Give back what was taken."""
        self._free += count
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= self._free):
            wanted, turn = self._waiting.popleft()
            if not turn.done():
                self._free -= wanted
                turn.set_result(None)


def check_head(request: web.BaseRequest) -> int:
    """Return the most bytes that a request's body may take, from its headers alone.

    Raises:
        RefusedError: It is too long, or compressed in a way that is not read here.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
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


async def read_body(request: web.BaseRequest) -> bytes:
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
        encoding: Its content encoding: gzip, or any other for none.

    Raises:
        RefusedError: It cannot be inflated, or is too long when it is.
    """
    if encoding.strip().lower() != "gzip":
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
    return whole


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body, as `parse_json` reads it.

    Raises:
        RefusedError: It holds no JSON object.
    """
    try:
        value = parse_json(body)
    except orjson.JSONDecodeError as error:
        raise RefusedError(
            400, "invalid_request_error", f"the body is no JSON ({error}); send a JSON object in UTF-8"
        ) from None
    if not isinstance(value, dict):
        raise RefusedError(
            400, "invalid_request_error", f"the body is a JSON {type(value).__name__}, expected an object; send one"
        )
    return value


def parse_json(body: bytes) -> Any:
    """Return the value of a JSON text. Halves of surrogate pairs that stand alone become U+FFFD.

    Whole numbers stay whole, however long, in a text of up to `_MOST_EXACT_BYTES`: a call's arguments must be the same
    when a client sends them back.

    Raises:
        RefusedError: Parsing it would take too long.
        orjson.JSONDecodeError: It is no JSON.
    """
    if len(body) > MOST_MARKS and sum(map(body.count, (b"[", b"{", b":"))) > MOST_MARKS:
        raise RefusedError(
            400,
            "invalid_request_error",
            f"the body has more than {MOST_MARKS} brackets, braces and colons; send fewer or smaller messages",
        )
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        if b"\\ud" not in body and b"\\uD" not in body:
            raise
        body = _ESCAPES.sub(lambda found: found[1] or b"\\ufffd", body)
        value = orjson.loads(body)
    if len(body) <= _MOST_EXACT_BYTES and _LONG_NUMBER.search(body):
        return json.loads(body)
    return value


def _too_long() -> RefusedError:
    return RefusedError(413, "request_too_large", f"the body has more than {MOST_BYTES} bytes; send less")

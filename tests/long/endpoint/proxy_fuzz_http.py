"""Raw sockets for the clients of `benchmarks.proxy_fuzz`, which know to the byte how much reached them.

Clients and server share one event loop. A client that leaves reads the data in its socket, and closes it in the same
step of the loop, so that data it did not see was never written: nothing is lost between the two.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass, field

_CHUNK = 1 << 16
# Bytes that a server may write without waiting for the client; an answer that is longer waits in the server.
_BUFFER = 1 << 20
_AT_ONCE = struct.pack("ii", 1, 0)
_PATIENCE_S = 60.0
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Answer that a client may get first, once, after it closed its sending side."""


@dataclass(frozen=True)
class Reply:
    """A client's view of an answer."""

    status: int
    """0 where not even the head was there."""
    body: bytes
    """The body without the marks of its chunks; as far as it was there."""
    whole: bool
    """Whether it was there to its end."""


@dataclass
class Clients:
    """The connections of one session's clients.

    Args:
        port: Where the server listens.
        key: The session's secret.
    """

    port: int
    key: str
    _idle: list[socket.socket] = field(default_factory=list)

    def close(self) -> None:
        """Close all idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def post(self, path: str, body: bytes, key: str | None = None, head: str = "", half: bool = False) -> Reply:
        """Send a request, close the sending side if it is `half`, and wait for the whole answer.

        Raises:
            ConnectionError: The server closed the connection before the answer's end.
            TimeoutError: There was none in time.
        """
        loop = asyncio.get_running_loop()
        connection = self._idle.pop() if self._idle and not head else await self._connected()
        seen = bytearray()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await loop.sock_sendall(connection, self._written(path, body, key or self.key, head))
                if half:
                    connection.shutdown(socket.SHUT_WR)
                while not (reply := _reply(seen)).whole:
                    piece = await loop.sock_recv(connection, _CHUNK)
                    if not piece:
                        raise ConnectionError(f"closed after {bytes(seen)!r:.300}")
                    seen += piece
        except BaseException:
            connection.close()
            raise
        if reply.status == 200 and not head and not half:
            self._idle.append(connection)
        else:
            connection.close()
        return reply

    async def leave(self, path: str, body: bytes, after: float | int, sent: float = 1.0) -> Reply:
        """Send a request, leave, and return the data received until then.

        Args:
            path: The path.
            body: The body.
            after: When to leave: after so many seconds; or, if whole, after so many steps of the loop. -1: as soon as
                there is something to read.
            sent: The share of the request that is sent.
        """
        loop = asyncio.get_running_loop()
        connection = await self._connected()
        written = self._written(path, body, self.key, "")
        await loop.sock_sendall(connection, written[: max(1, int(len(written) * sent))])
        seen = bytearray()
        if after == -1:
            try:
                # Half a body is waited for, so nothing is answered.
                async with asyncio.timeout(_PATIENCE_S if sent == 1.0 else 0.01):
                    seen += await loop.sock_recv(connection, 10)
            except TimeoutError:
                pass
        elif isinstance(after, int):
            for _ in range(after):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(after)
        try:
            while piece := connection.recv(_CHUNK):
                seen += piece
        except BlockingIOError:
            pass
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        connection.close()
        return _reply(seen)

    async def _connected(self) -> socket.socket:
        connection = socket.socket()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        return connection

    def _written(self, path: str, body: bytes, key: str, head: str) -> bytes:
        start = f"POST {path} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n"
        return f"{start}{head}\r\n".encode() + body


def _reply(seen: bytearray) -> Reply:
    """Return the answer in the bytes that a client saw."""
    head, found, rest = bytes(seen).removeprefix(_INTERIM).partition(b"\r\n\r\n")
    if not found:
        return Reply(0, b"", False)
    lines = head.decode().lower().split("\r\n")
    status = int(lines[0].split()[1])
    headers = dict(line.split(": ", 1) for line in lines[1:])
    if "content-length" in headers:
        return Reply(status, rest, len(rest) >= int(headers["content-length"]))
    body, whole = b"", False
    while rest:
        size, found, rest = rest.partition(b"\r\n")
        if not found or len(rest) < int(size, 16) + 2:
            break
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        whole = int(size, 16) == 0
    return Reply(status, body, whole)

"""A forward proxy on loopback: all hosts are this machine, and its requests are recorded."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit


class ForwardProxy:
    """A proxy that leads each host to the same port of 127.0.0.1.

    Args:
        password: `user:password` that it wants; None: it lets everybody through.
        status: Status with which it answers everything; None: it asks the host.
    """

    def __init__(self, password: str | None = None, status: int | None = None) -> None:
        self._wanted = password and "basic " + base64.b64encode(password.encode()).decode()
        self._status = status
        self.asked: list[str] = []
        """Method and host of each request."""
        self.address = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self._answer(reader, writer)
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, target, _ = lines[0].split(" ")
        url = urlsplit(target if "://" in target else f"//{target}")
        self.asked.append(f"{method} {url.hostname}")
        heads = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
        status = self._status
        if self._wanted and heads.get("proxy-authorization", "").replace("Basic", "basic") != self._wanted:
            status = 407
        if status is not None:
            writer.write(f"HTTP/1.1 {status} Said\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
            await writer.drain()
            return
        there, to = await asyncio.open_connection("127.0.0.1", url.port or 80)
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
        else:
            kept = {**heads, "host": f"127.0.0.1:{url.port}"}
            if "upgrade" not in heads:
                kept["connection"] = "close"
            path = url.path + (f"?{url.query}" if url.query else "")
            head = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in kept.items()), "", ""]
            to.write("\r\n".join(head).encode())
        ways = [asyncio.ensure_future(_pass(*way)) for way in ((reader, to), (there, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        to.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while some := await reader.read(65536):
            writer.write(some)
            await writer.drain()


@contextlib.asynccontextmanager
async def forwarding(password: str | None = None, status: int | None = None) -> AsyncIterator[ForwardProxy]:
    """Run a proxy on this event loop."""
    proxy = ForwardProxy(password, status)
    async with await asyncio.start_server(proxy.answer, "127.0.0.1", 0) as server:
        proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield proxy

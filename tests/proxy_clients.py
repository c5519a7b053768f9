"""A session that answers as a test requires, and clients on raw sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.protocols.requests import ChatRequest, Completion
from verl_multiturn.proxy.sessions.journal import Journal
from verl_multiturn.proxy.sessions.roles import Roles


class FakeDelivery:
    """The answer of a `FakeSession`, which records its outcome."""

    def __init__(self, session: "FakeSession", request: ChatRequest) -> None:
        self.completions: list[Completion] = []
        self._session = session
        self._request = request

    async def ready(self) -> None:
        session = self._session
        await session.gate.wait()
        if session.raises is not None:
            raise session.raises
        self.completions = [
            Completion(f"c{index}", session.content, calls=session.calls) for index in range(self._request.n)
        ]

    def delivered(self) -> None:
        self._session.fates.append("delivered")

    def undelivered(self) -> None:
        self._session.fates.append("undelivered")


class FakeSession:
    """A session that answers "one", or a given text, once `gate` is open."""

    def __init__(self, content: str = "one", open_gate: bool = True) -> None:
        self.id = "s"
        self.content = content
        self.calls: list[ToolCall] = []
        self.gate = asyncio.Event()
        if open_gate:
            self.gate.set()
        self.asked: list[ChatRequest] = []
        self.fates: list[str] = []
        self.failed = ""
        self.raises: BaseException | None = None
        self.journal = Journal()
        self.roles: Roles | None = None

    def begin(self, request: ChatRequest) -> FakeDelivery:
        self.asked.append(request)
        return FakeDelivery(self, request)

    def sent(self, id_: str) -> None:
        """Return None: nothing that was sent can be named by its id."""

    async def count_tokens(self, request: ChatRequest) -> int:
        return 17


@asynccontextmanager
async def serving(session: Any, **settings: Any) -> AsyncIterator[tuple[ProxyServer, SessionAddress]]:
    """Serve one session."""
    async with ProxyServer(**settings) as server:
        yield server, server.open(session)


async def connect(access: SessionAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a raw connection to a session's endpoint."""
    host, port = access.anthropic_base_url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


def post(access: SessionAddress, body: Any, path: str = "/v1/chat/completions", *more: str) -> bytes:
    """Write a request as bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: h", f"authorization: Bearer {access.api_key}", *more]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in more):
        head.append(f"content-length: {len(content)}")
    return "\r\n".join([*head, "", ""]).encode() + content


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Read one answer: status, headers, body."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines[1:] if line)}
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    else:
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    return int(lines[0].split()[1]), headers, body


async def until(condition: Any, seconds: float = 60.0) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.002)


HELLO: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}

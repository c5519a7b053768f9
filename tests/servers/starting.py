"""Starting the servers of this folder, and helpers of their tests."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from tests.conftest import ROOT, child_processes, has_ended
from verl_multiturn.tools.mcp_tools import McpTool, mcp_tools

WORKSHOP = str(ROOT / "tests" / "servers" / "workshop.py")
PLAIN = str(ROOT / "tests" / "servers" / "plain.py")
Tools = dict[str, McpTool]


class HttpServer:
    """The workshop over HTTP, in a process of its own."""

    def __init__(self, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, WORKSHOP, "http", str(port)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


class BreakingRoute:
    """A route of TCP to a server, which breaks the connection whose request holds a text.

    Args:
        port: The server's port.
        word: The text.
    """

    def __init__(self, port: int, word: bytes) -> None:
        self._port = port
        self._word = word
        self.breaks = 0
        """Number of connections that it broke."""

    async def __aenter__(self) -> "BreakingRoute":
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/mcp"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        answers = asyncio.create_task(self._copy(there, writer))
        await self._copy(reader, back)
        answers.cancel()
        for end in (writer, back):
            end.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while content := await reader.read(65_536):
                if self._word in content:
                    self.breaks += 1
                    return
                writer.write(content)
                await writer.drain()


def by_name(tools: list[McpTool]) -> Tools:
    return {tool.name: tool for tool in tools}


def plain(mode: str, **settings: Any) -> list[McpTool]:
    return mcp_tools({"command": "python3", "args": [PLAIN, mode], **settings}, "tools.yaml: tools[0].mcp")


async def text(tools: Tools, tool: str, **arguments: Any) -> str:
    return (await tools[tool].execute("r1", arguments)).text


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(120):
        while not await condition():  # noqa: ASYNC110 processes and servers set no asyncio.Event
            await asyncio.sleep(0.02)


async def gone(pid: int) -> None:
    async def is_gone() -> bool:
        return pid not in children()

    await until(is_gone)


def children() -> set[int]:
    return {process.pid for process in child_processes(recursive=True) if not has_ended(process)}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))

"""Starting the servers of this folder, and helpers of their tests."""

import asyncio
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

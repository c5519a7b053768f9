"""An endpoint in a process that may open few files: silent connections take neither its room nor its sessions'."""

import asyncio
import json
import resource
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.proxy_clients import HELLO, answer, connect, post
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.http import listener
from verl_multiturn.proxy.http.clients import UnauthenticatedConnections
from verl_multiturn.proxy.http.listener import raise_open_files

Connected = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Small:
    """The process of `tests.servers.small_proxy`."""

    def __init__(self, process: asyncio.subprocess.Process, said: dict[str, Any]) -> None:
        self.process = process
        self.limit: int = said["limit"]
        self.access = [SessionAddress(f"{said['base']}/v1", key, said["base"], "s") for key in said["keys"]]

    async def tell(self, line: str) -> None:
        """Have it do something, and wait until it is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n".encode())
        assert (await self.process.stdout.readline()).decode().strip() == line

    async def end(self) -> str:
        """Let it end, and return its standard error."""
        _, said = await self.process.communicate(b"")  # which closes its standard input
        return said.decode()


@asynccontextmanager
async def small(soft: int, hard: int, loop: str = "asyncio", sessions: int = 1) -> AsyncIterator[Small]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.servers.small_proxy", str(soft), str(hard), loop, str(sessions),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield Small(process, json.loads(await process.stdout.readline()))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def said(connected: Connected, access: SessionAddress) -> str:
    """Send a request on a connection, and return the model's answer."""
    connected[1].write(post(access, HELLO))
    status, _, body = await answer(connected[0])
    assert status == 200
    content: str = json.loads(body)["choices"][0]["message"]["content"]
    return content


def close(connections: list[Connected]) -> None:
    for _, writer in connections:
        writer.close()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_unauthenticated_connections_leave_room_for_sessions_and_files(loop: str) -> None:
    async with small(256, 256, loop) as server:
        (access,) = server.access
        known = await connect(access)
        assert await said(known, access) == "open"
        silent = [await connect(access) for _ in range(400)]
        late = await connect(access)
        assert await said(late, access) == "open"
        assert await said(known, access) == "open"
        assert await silent[0][0].read() == b""  # the oldest went first
        close([known, late, *silent])
        assert await server.end() == ""


async def test_without_unauthenticated_connections_an_idle_connection_of_a_session_makes_room() -> None:
    async with small(96, 96, sessions=6) as server:
        opened = []
        for access in server.access:
            for _ in range(24):
                opened.append(await connect(access))
                await said(opened[-1], access)
        late = await connect(server.access[0])
        await said(late, server.access[0])
        close([late, *opened])
        assert await server.end() == ""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_where_nothing_makes_room_connections_wait_and_one_line_says_so(loop: str) -> None:
    async with small(64, 64, loop) as server:
        await server.tell("hog")
        (access,) = server.access
        late = await connect(access)
        assert server.process.stderr is not None
        warned = await server.process.stderr.readline()
        assert warned.startswith(
            b"connections have to wait, since none can be accepted: [Errno 24] Too many open files"
        )
        await server.tell("free")
        assert await said(late, access) == "open"
        close([late])
        assert await server.end() == ""


async def test_the_limit_is_raised_as_far_as_it_may() -> None:
    async with small(64, 512) as server:
        assert server.limit == 512
        assert await server.end() == ""


def test_the_limits_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(20, 40)]
    monkeypatch.setattr(listener.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(listener.resource, "setrlimit", lambda _, given: limits.append(given))
    assert (raise_open_files(), limits) == (40, [(20, 40), (40, 40)])
    for given, most, now in (
        ((1024, resource.RLIM_INFINITY), 65_536, (65_536, resource.RLIM_INFINITY)),
        ((1024, 1_048_576), 65_536, (65_536, 1_048_576)),
        ((100_000, 1_048_576), 100_000, (100_000, 1_048_576)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 65_536, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)),
    ):
        limits.append(given)
        assert (raise_open_files(), limits[-1]) == (most, now)

    def refuse(*_: Any) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(listener.resource, "setrlimit", refuse)
    limits.append((20, 40))
    assert raise_open_files() == 20
    assert [UnauthenticatedConnections(files)._most for files in (20, 1024, 10**6)] == [5, 256, 4096]

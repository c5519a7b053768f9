"""The processes of `benchmarks.gateway`, a gateway and an engine, which are killed and started again; and a client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp

from tests.support.gateway_process import ADMIN

_START_S = 300.0
"""Seconds in which a process has to listen, on a busy machine."""


class Child:
    """A process that prints its address when it listens. Each start has the same port.

    Args:
        module: Its module.
        args: Its arguments, but the port.
    """

    def __init__(self, module: str, *args: str) -> None:
        self._module, self._args = module, args
        self.port = _free_port()
        self.process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        """Return its address."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self, *more: str) -> None:
        """Start it, and wait until it listens.

        Args:
            more: Further arguments of this start.

        Raises:
            RuntimeError: It ended before.
        """
        command = [sys.executable, "-m", self._module, *self._args, "--port", str(self.port), *more]
        self.process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert self.process.stdout is not None
        async with asyncio.timeout(_START_S):
            if not await self.process.stdout.readline():
                raise RuntimeError(f"{' '.join(command)} ended before it listened")

    async def kill(self) -> None:
        """End it by SIGKILL, and wait for its end."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> int:
        """End it in order, and return its exit status."""
        return await self._end(signal.SIGTERM)

    async def fail_power(self) -> None:
        """Let a gateway end at one of its next fsyncs, and wait for that; somebody has to let it write."""
        await self._end(signal.SIGUSR1)

    async def _end(self, how: signal.Signals) -> int:
        if self.process is None:
            return 0
        if self.process.returncode is None:
            os.kill(self.process.pid, how)
        return await self.process.wait()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()


def gateway(folder: Path, *args: str) -> Child:
    """Return a gateway on a folder, with options of `tests.support.gateway_process`."""
    return Child("tests.support.gateway_process", str(folder), *args)


def engine(*args: str) -> Child:
    """Return a stand-in of SGLang, with options of `tests.support.engine_process`."""
    return Child("tests.support.engine_process", *args)


class Answer(NamedTuple):
    """An answer of a gateway; status 0: there was none, and `body` has the error."""

    status: int
    body: Any = None
    retry_after: str | None = None


class Client:
    """Speaks to a gateway in the form of its guide.

    Args:
        address: Its address.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def post(self, path: str, key: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Send a request; a connection that breaks, or an answer that is none, gives the status 0."""
        return await self._send("POST", path, key, body)

    async def get(self, path: str, key: str = ADMIN) -> Answer:
        """Get a page."""
        return await self._send("GET", path, key, None)

    async def start(self, task: str = "t", **more: Any) -> Answer:
        """Start a session."""
        return await self.post("/rl/start_session", ADMIN, {"task_id": task, **more})

    async def chat(
        self, key: str, text: str = "1+1?", tokens: int = 8, path: str = "/v1/chat/completions", stream: bool = False
    ) -> Answer:
        """Get a completion by any of the three protocols."""
        body: dict[str, Any] = {"model": "policy", "stream": stream}
        if path.endswith("/responses"):
            body |= {"input": text, "max_output_tokens": tokens}
        else:
            body |= {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}
        return await self.post(path, key, body)

    async def reward(self, key: str, reward: float, **more: Any) -> Answer:
        """Set a reward."""
        return await self.post("/rl/set_reward", key, {"reward": reward, **more})

    async def end(self, key: str, **more: Any) -> Answer:
        """End a session."""
        return await self.post("/rl/end_session", key, more)

    async def _send(self, method: str, path: str, key: str, body: Mapping[str, Any] | None) -> Answer:
        headers = {"Authorization": f"Bearer {key}"}
        data = None if body is None else json.dumps(body).encode()
        try:
            async with self._http.request(method, self._address + path, data=data, headers=headers) as response:
                text = await response.read()
                found = json.loads(text) if response.content_type == "application/json" else text.decode()
                return Answer(response.status, found, response.headers.get("Retry-After"))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Answer(0, repr(error))


def _free_port() -> int:
    """Return a port that no client gets for its own side of a connection while the server is away."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port

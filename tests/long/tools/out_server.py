"""A server of `verl-multiturn mcp` over HTTP in the test's own process, with a till."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.long.tools.out_tools import Till
from tests.long.tools.tools_out import unreleased
from verl_multiturn.proxy.http.listener import address_of, listen
from verl_multiturn.tool_servers.mcp_http import answer_http
from verl_multiturn.tool_servers.sessions import ToolHost

_WAIT_S = 120.0


def words(log: Path) -> list[str]:
    """Return the events of a till's log."""
    return [line.split()[0] for line in log.read_text().splitlines()]


@dataclass
class Served:
    """A server over HTTP in this process, and its till."""

    address: str
    host: ToolHost
    log: Path

    def count(self, event: str) -> int:
        """Return how often the till was created, or released."""
        return words(self.log).count(event)


@asynccontextmanager
async def serve(folder: Path, port: int = 0, **settings: Any) -> AsyncIterator[Served]:
    """Serve a till over HTTP."""
    tool = Till({"log": str(folder / "log")})
    (folder / "log").touch()
    host = ToolHost({"till": tool}, {"till": {"create_kwargs": {"budget": 1000}}}, **settings)
    listening = listen("127.0.0.1", port, "")
    serving = asyncio.ensure_future(answer_http(host, listening, "127.0.0.1"))
    try:
        yield Served(f"http://{address_of(listening)}/mcp", host, folder / "log")
    finally:
        await host.aclose()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        listening.close()
    released = [line for line in (folder / "log").read_text().splitlines() if line.startswith("release")]
    assert len(released) == len(set(released))
    assert not unreleased(folder / "log")


async def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(_WAIT_S):
        while not holds():  # noqa: ASYNC110  # no event of ours tells it
            await asyncio.sleep(0.05)

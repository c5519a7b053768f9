"""Clients that a test kills: each pays into a till, and waits for an answer that comes late.

    python -m tests.long.tools.out_client ADDRESS|YAML...

It prints `calls` once the late calls of all clients run.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from mcp import Client, stdio_client

from tests.long.tools.tools_out import MODERN, parameters


def client_of(target: str) -> Client:
    """Return a client of an address, or of the server of a YAML."""
    if not target.startswith("http"):
        return Client(stdio_client(parameters(Path(target))))
    return Client(target, mode="auto" if target.endswith("/mcp") else MODERN)


async def main(targets: Sequence[str]) -> None:
    """Call until the end."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(target)) for target in targets]
        for client in clients:
            await client.call_tool("till", {"amount": 1})
        calls = [asyncio.ensure_future(client.call_tool("till", {"amount": 1, "wait_s": 2})) for client in clients]
        await asyncio.sleep(0.3)
        print("calls", flush=True)
        await asyncio.gather(*calls)
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))

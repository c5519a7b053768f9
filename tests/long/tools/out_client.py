"""A client that a test kills: it pays into a till, prints `calls`, and waits for an answer that comes late.

python -m tests.long.tools.out_client ADDRESS|YAML
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from mcp import Client, stdio_client

from tests.long.tools.tools_out import MODERN, parameters


async def main(target: str) -> None:
    """Call until the end."""
    is_named = target.rpartition("/")[2] != "mcp"
    over_http = target.startswith("http")
    client = (
        Client(target, mode=MODERN if is_named else "auto")
        if over_http
        else Client(stdio_client(parameters(Path(target))))
    )
    async with client:
        await client.call_tool("till", {"amount": 1})
        call = asyncio.ensure_future(client.call_tool("till", {"amount": 1, "wait_s": 1.5}))
        await asyncio.sleep(0.3)
        print("calls", flush=True)
        await call
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

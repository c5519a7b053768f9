"""The answers of processes: one line of JSON each, over a socket."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any


async def read_line(connection: socket.socket, most_bytes: int = 2**26) -> dict[str, Any]:
    """Return the next line of a socket, an object in JSON.

    Args:
        connection: The socket, which does not block. Nothing may follow the line before we have answered.
        most_bytes: The most bytes of a line.

    Raises:
        EOFError: The other side has gone, or the line is too long.
        OSError: The other side has gone.
        ValueError: The line is not JSON, or not an object.
    """
    loop = asyncio.get_running_loop()
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = await loop.sock_recv(connection, 2**18)
        if not chunk:
            raise EOFError
        line += chunk
        if len(line) > most_bytes:
            raise EOFError(f"it answered with more than {most_bytes >> 20} MB")
    answer = json.loads(line)
    if not isinstance(answer, dict):
        raise ValueError("no answer")
    return answer

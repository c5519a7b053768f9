"""The answers of processes, a line of JSON each, over a socket: the worker reads them, a fork writes them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
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


def answer_lines(served: socket.socket, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer requests, a line of JSON each, until the worker closes the socket; first send the id of this process.

    Args:
        served: The socket.
        answer: Returns the answer of a request.
    """
    process = os.getpid()
    said: dict[str, Any] = {"process": process}
    with served.makefile("rwb") as stream:
        while True:
            stream.write(json.dumps(said).encode() + b"\n")
            stream.flush()
            if not (line := stream.readline()):
                return
            try:
                said = answer(json.loads(line))
            finally:
                if os.getpid() != process:  # a child that the author's code forked: it would answer a second time
                    os._exit(0)

"""The agents of `benchmarks.proxy`: clients on raw sockets, in a process of their own.

It reads one JSON object with a `Plan` from standard input, and writes the seconds of each turn of each session as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Plan:
    """Actions of the agents."""

    port: int
    keys: list[str]
    """The secret of each session."""
    at_once: int
    """Sessions that run at the same time."""
    turns: int
    """Requests of a session."""
    prompt: str
    tools: list[dict[str, Any]]
    answer: str
    """Answer of a tool."""
    think_s: float = 0.0
    """Most seconds before a session's first request; they are drawn, so that not all sessions begin at once."""


async def play(plan: Plan, number: int) -> list[float]:
    """Play one session as an agent whose model calls a tool in each turn, and return the seconds of each request."""
    await asyncio.sleep(random.Random(number).random() * plan.think_s)
    reader, writer = await asyncio.open_connection("127.0.0.1", plan.port, limit=1 << 24)
    start = b'{"model": "m", "tools": ' + json.dumps(plan.tools).encode() + b', "messages": ['
    messages = json.dumps({"role": "user", "content": f"{number} {plan.prompt}"}).encode()
    taken = []
    for _ in range(plan.turns):
        body = start + messages + b"]}"
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {plan.keys[number]}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        before = time.perf_counter()
        writer.write(head.encode() + body)
        found = await reader.readuntil(b"\r\n\r\n")
        length = int(found.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        answer = json.loads(await reader.readexactly(length))
        taken.append(time.perf_counter() - before)
        if not found.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"refused: {answer}")
        said = answer["choices"][0]["message"]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": plan.answer} for call in said["tool_calls"]]
        messages += b", " + json.dumps([said, *results]).encode()[1:-1]
    writer.close()
    return taken


async def play_all(plan: Plan) -> list[list[float]]:
    """Play all sessions, and return the seconds of their requests."""
    free = asyncio.Semaphore(plan.at_once)

    async def one(number: int) -> list[float]:
        async with free:
            return await play(plan, number)

    return list(await asyncio.gather(*(one(number) for number in range(len(plan.keys)))))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(play_all(Plan(**json.load(sys.stdin))))))

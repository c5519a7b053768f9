"""Random schemas that go out through `verl-multiturn a2a`, and come back by our own client."""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.long.tools.out_schemas import random_schema
from tests.long.tools.out_tools import Listed
from tests.servers.a2a_agents import serving
from verl_multiturn import ToolSchema
from verl_multiturn.tool_servers.a2a_server import build_app
from verl_multiturn.tool_servers.sessions import ToolHost
from verl_multiturn.tools.a2a_tools import a2a_tools


def a2a_schemas(count: int, seed: int) -> dict[str, int]:
    """Return how many of `count` random schemas came back changed, compared as text: in order, and 1 is not 1.0.

    `benchmarks.tools_out` calls it.

    Args:
        count: Number of schemas, all of them in one card.
        seed: Seed of chance.
    """
    draw = random.Random(seed)
    schemas = [random_schema(draw, f"tool_{number}") for number in range(count)]
    with ThreadPoolExecutor(1) as thread:  # the caller's event loop may run
        back = thread.submit(asyncio.run, _round_trip(schemas)).result()
    changed = sum(json.dumps(one) != json.dumps(other) for one, other in zip(schemas, back, strict=True))
    return {"a2a_schemas": len(back), "a2a_changed": changed}


async def _round_trip(schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tools = {raw["function"]["name"]: Listed({}, ToolSchema.read(raw, "a schema")) for raw in schemas}
    app, handler = build_app(ToolHost(tools), "tools", "127.0.0.1")
    async with serving(app) as url:
        listed = await asyncio.to_thread(a2a_tools, {"url": url}, "tools[0].a2a")
    await handler.aclose()
    return [tool.tool_schema.as_dict() for tool in listed]

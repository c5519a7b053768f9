"""Every client of HTTP that this package has, each asking one question of a service of its kind."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from aiohttp import web

from tests.servers.starting import HttpServer
from tests.serving import conversation
from tests.support.served import answering, served
from verl_multiturn.clients.chat_endpoint import ChatEndpoint
from verl_multiturn.interactions.openenv_client import OpenEnvClient
from verl_multiturn.rollout.engines.http_engine import GenerateEngine
from verl_multiturn.rollout.engines.protocol import Ask
from verl_multiturn.tools.mcp_tools import mcp_tools
from verl_multiturn.tools.retrieval import RetrievalTool

Asks = Callable[[str], Awaitable[str]]


async def tool(address: str) -> str:
    async with conversation(RetrievalTool({"url": address, "timeout_s": 20})) as call:
        return str((await call(query="x"))[0].text).splitlines()[-1]


async def endpoint(address: str) -> str:
    asked = ChatEndpoint(
        f"{address}/v1", None, {}, timeout_s=20, attempts=1, connections=1, settings=("judge.url", "judge.key")
    )
    try:
        return await asked.ask([], lambda text: text)
    finally:
        await asked.close()


async def engine(address: str) -> str:
    client = GenerateEngine(address, "00ff", alive_s=5.0)
    try:
        return str((await client.generate(Ask("a", [1], {}, max_new_tokens=4))).ids)
    finally:
        await client.aclose()


async def openenv(address: str) -> str:
    client = OpenEnvClient({"base_url": address, "action_field": "message", "timeout_s": 20})
    try:
        return (await client.start("a")).text
    finally:
        await client.aclose()


async def mcp(address: str) -> str:
    # In a thread: it blocks until the server has answered, and the proxy of the test runs here.
    tools = {each.name: each for each in await asyncio.to_thread(mcp_tools, {"url": f"{address}/mcp"}, "tools[0].mcp")}
    try:
        return (await tools["add"].execute("a", {"a": 1, "b": 2})).text
    finally:
        await tools["add"].aclose()


async def a2a(address: str) -> str:
    from verl_multiturn.tools.a2a_tools import a2a_tools

    entry = {"url": address, "address": f"{address}/rpc"}
    (agent,) = await asyncio.to_thread(a2a_tools, entry, "tools[0].a2a")
    await agent.create("a")
    try:
        return (await agent.execute("a", {"message": "x"})).text
    finally:
        await agent.release("a")


async def card(request: web.Request) -> web.Response:
    interface = {"url": "http://elsewhere/rpc", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}
    return web.json_response({"name": "agent", "supportedInterfaces": [interface]})


CLIENTS: dict[str, tuple[Asks, str]] = {
    "tool": (tool, "fine"),
    "endpoint": (endpoint, "fine"),
    "engine": (engine, "[5]"),
    "openenv": (openenv, "fine"),
    "mcp": (mcp, "3"),
}
if importlib.util.find_spec("a2a") is not None:
    CLIENTS["a2a"] = (a2a, "fine")
GENERATION = {
    "output_ids": [5],
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.25, 5, None]],
        "weight_version": "00ff",
    },
}


async def environment(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for message in socket:
        if "reset" in message.data:
            await socket.send_json({"type": "observation", "data": {"observation": {"text": "fine"}, "done": False}})
        else:
            break
    await socket.close()
    return socket


@asynccontextmanager
async def service(name: str, workshop: HttpServer) -> AsyncIterator[int]:
    """Yield the port of the service of a client."""
    if name == "mcp":
        yield workshop.port
        return
    async with served(
        retrieve=answering({"result": [[{"document": {"contents": "fine"}, "score": 1.0}]]}),
        v1__chat__completions=answering({"choices": [{"message": {"content": "fine"}}]}),
        generate=answering(GENERATION),
        health_generate=answering({}),
        ws=environment,
        rpc=answering({"result": {"message": {"messageId": "1", "parts": [{"text": "fine"}]}}}),
        **{".well-known__agent-card.json": card},
    ) as address:
        yield urlsplit(address).port or 0

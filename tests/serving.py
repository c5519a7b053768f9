"""Helpers for the tests of tools: a real HTTP server on loopback, and a conversation with one tool."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from aiohttp import web

from verl_multiturn import BaseTool, ToolResponse

Call = Callable[..., Awaitable[tuple[ToolResponse, float, dict[str, Any]]]]


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an ASGI application, or a server of aiohttp, in a thread, and yield its address."""
    if isinstance(app, web.AppRunner):
        with _serving_aiohttp(app) as address:
            yield address
        return
    config = uvicorn.Config(app, log_level="critical", ws="none", lifespan="off", loop="asyncio")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


@contextlib.contextmanager
def _serving_aiohttp(runner: web.AppRunner) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        async def start() -> None:
            await runner.setup()
            await web.SockSite(runner, listening).start()

        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            asyncio.run_coroutine_threadsafe(start(), loop).result()
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


@contextlib.asynccontextmanager
async def conversation(tool: BaseTool, name: str = "c1", **create_kwargs: Any) -> AsyncIterator[Call]:
    """Begin a conversation of `tool`, and yield a function that executes a call with its keywords as the arguments."""

    async def call(**parameters: Any) -> Any:
        return await tool.execute(name, parameters)

    try:
        await tool.create(name, **create_kwargs)
        yield call
    finally:
        await tool.release(name)

"""A scripted server on this machine, for clients of engines."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Answers = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(port: int = 0, /, **paths: Answers) -> AsyncIterator[str]:
    """Serve each path, named with `_` for `/`, on a port, 0: a free one; yield the server's address."""
    app = web.Application()
    for name, answer in paths.items():
        app.router.add_route("*", "/" + name.replace("__", "/"), answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    host, own = runner.addresses[0]
    try:
        yield f"http://{host}:{own}"
    finally:
        await runner.cleanup()


def answering(*answers: Any, seen: list[Any] | None = None) -> Answers:
    """Answer one after another; the last one without end.

    An object is sent as JSON, a number as a status, a pair as a status with a `Retry-After`, bytes as they are.
    """
    left = list(answers)

    async def answer(request: web.Request) -> web.StreamResponse:
        if seen is not None:
            seen.append(await request.json() if request.can_read_body else request.path)
        said = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(said, tuple):
            return web.Response(status=said[0], headers={"Retry-After": said[1]})
        if isinstance(said, int):
            return web.Response(status=said, text="too busy")
        return web.Response(body=said) if isinstance(said, bytes) else web.json_response(said)

    return answer

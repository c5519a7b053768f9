"""The viewer's server: one folder's conversations, for the browsers of this machine's user.

Invariants:
- it listens on 127.0.0.1 alone, and every address begins with a token that only who started it knows;
- a request from another site is refused: by its `Host` (a name that was made to lead here) or its `Origin`;
- it gives the page's own files and those that the index names, and opens no path that a request names;
- it changes nothing: GET is its only method.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web

from verl_multiturn.errors import ConfigError
from verl_multiturn.observe.documents.documents import Documents
from verl_multiturn.observe.view.page import SERVED, STATIC, served_page, served_policy
from verl_multiturn.records.json_text import dumps

HOST = "127.0.0.1"
_LOOK_S = 1.0
"""How often the folders are looked at, with `follow`."""
_POLL_S = 20.0
_MOST = 500
"""The most rows of a page."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
logger = logging.getLogger(__name__)
_STRANGE = logging.getLogger(f"{__name__}.strange")
"""Of requests that aiohttp cannot read, as with an endless address: it refuses them, and nothing here is broken."""
_STRANGE.setLevel(logging.CRITICAL)
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ViewServer:
    """The server of some documents.

    Args:
        documents: The documents that it shows.
        follow: Whether it looks for new data while it runs.
    """

    def __init__(self, documents: Documents, *, follow: bool) -> None:
        self._documents = documents
        self._follow = follow
        self._token = secrets.token_urlsafe(16)
        self._version = 0
        self._changed = asyncio.Condition()
        self._thread = ThreadPoolExecutor(1, "view")  # one at a time: an index is not safe for two
        self._runner: web.AppRunner | None = None
        self._looking: asyncio.Task[None] | None = None
        self._hosts: frozenset[str] = frozenset()

    async def start(self, port: int) -> str:
        """Listen, and return the address.

        Args:
            port: Port to listen on; 0: any that is free.

        Raises:
            OSError: It cannot listen there.
        """
        app = web.Application(middlewares=[self._guard])
        prefix = f"/{self._token}"
        app.router.add_get(f"{prefix}/", self._page)
        app.router.add_get(prefix + r"/static/{name:[\w./-]+}", self._static)
        for name in ("meta", "table", "record", "run", "step", "open", "findings", "changes"):
            app.router.add_get(f"{prefix}/api/{name}", self._answering(getattr(self, f"_{name}")))
        self._runner = web.AppRunner(app, access_log=None, logger=_STRANGE)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, port)
        await site.start()
        bound = self._runner.addresses[0][1]
        self._hosts = frozenset({f"{HOST}:{bound}", f"localhost:{bound}"})
        if self._follow:
            self._looking = asyncio.create_task(self._look())
        return f"http://{HOST}:{bound}{prefix}/"

    async def aclose(self) -> None:
        """Stop, and keep the index."""
        if self._looking is not None:
            self._looking.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._follow:
            await self._in_thread(self._documents.save)
        self._thread.shutdown()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse a request that does not come from this server's own page."""
        origin = request.headers.get("Origin")
        own = {None, *(f"http://{host}" for host in self._hosts)}
        if request.headers.get("Host") not in self._hosts:
            response: web.StreamResponse = _refusal(403, "this server answers under its own address alone")
        elif origin not in own or request.headers.get("Sec-Fetch-Site") not in (None, "none", "same-origin"):
            response = _refusal(403, "this server answers its own page alone")
        elif not secrets.compare_digest([*request.path.split("/"), ""][1].encode(), self._token.encode()):
            response = _refusal(403, "the address lacks the token; take the one that `verl-multiturn view` printed")
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = _refusal(error.status, error.reason)
            except Exception:  # whatever is in a folder, the page gets an answer
                logger.exception("the viewer failed at %s", request.path.rpartition("/")[2])
                response = _refusal(500, "the viewer failed at this; what it failed at stands in its terminal")
        response.headers.update(_HEADERS)
        response.headers.setdefault("Content-Security-Policy", "default-src 'none'")
        return response

    def _answering(self, answer: Callable[[web.Request], Awaitable[Any]]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                found = await answer(request)
            except ConfigError as error:
                return _refusal(400, str(error))
            except ValueError as error:
                return _refusal(400, f"the request has a strange parameter ({error})")
            if found is None:
                return _refusal(404, "there is no such conversation in this folder")
            return web.Response(body=await self._in_thread(dumps, found), content_type="application/json")

        return handle

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    async def _page(self, request: web.Request) -> web.StreamResponse:
        headers = {"Content-Security-Policy": served_policy()}
        return web.Response(text=served_page(), content_type="text/html", headers=headers)

    async def _static(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in SERVED:
            return _refusal(404, "there is no such file")
        return web.Response(body=(STATIC / name).read_bytes(), content_type=SERVED[name], charset="utf-8")

    async def _meta(self, request: web.Request) -> Any:
        return await self._in_thread(self._documents.meta)

    async def _table(self, request: web.Request) -> Any:
        asked = request.query
        offset, limit = max(0, int(asked.get("offset", 0))), min(_MOST, max(1, int(asked.get("limit", 50))))
        arguments = asked.get("where", ""), asked.get("sort", "began"), asked.get("desc", "0") == "1", offset, limit
        return await self._in_thread(self._documents.page, *arguments)

    async def _record(self, request: web.Request) -> Any:
        return await self._in_thread(self._documents.record, request.query.get("id", ""))

    async def _run(self, request: web.Request) -> Any:
        return await self._in_thread(self._documents.run)

    async def _step(self, request: web.Request) -> Any:
        asked = request.query
        number, step = int(asked.get("dir", 0)), int(asked.get("step", 0))
        return await self._in_thread(self._documents.timeline, number, step, asked.get("validation", "0") == "1")

    async def _open(self, request: web.Request) -> Any:
        return await self._in_thread(self._documents.open)

    async def _findings(self, request: web.Request) -> Any:
        return await asyncio.to_thread(self._documents.findings)

    async def _changes(self, request: web.Request) -> Any:
        """Answer when something was written since, or after a while."""
        since = int(request.query.get("since", -1))
        if self._follow and since == self._version:
            async with self._changed:
                try:
                    async with asyncio.timeout(_POLL_S):
                        await self._changed.wait_for(lambda: self._version != since)
                except TimeoutError:
                    pass
        return {"version": self._version, "follow": self._follow}

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if await self._in_thread(self._documents.refresh):
                async with self._changed:
                    self._version += 1
                    self._changed.notify_all()


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)

"""Stand-ins for Ray and verl's load balancer, for a server and its client in one process."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds that has no event."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


class Handle:
    """A stand-in for the handle of a Ray actor: `handle.method.remote(…)`.

    As with Ray, the actor gets copies, calls run at once, and go on when no caller waits for them any more.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._running: set[asyncio.Future[Any]] = set()

    def __getattr__(self, name: str) -> Any:
        return _Method(getattr(self._actor, name), self._running)


class _Method:
    def __init__(self, function: Callable[..., Awaitable[Any]], running: set[asyncio.Future[Any]]) -> None:
        self._function = function
        self._running = running

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        given, named = copy.deepcopy((args, kwargs))
        call = asyncio.ensure_future(self._function(*given, **named))
        self._running.add(call)
        call.add_done_callback(self._running.discard)
        return asyncio.shield(call)


class Balancer:
    """A load balancer with one server."""

    def __init__(self, server: Handle) -> None:
        self._server = server

    async def require_acquire_fields(self) -> list[str]:
        """Return no names: nothing of a request is needed."""
        return []

    async def require_release_fields(self) -> list[str]:
        """Return no names."""
        return []

    async def release_server(self, server_id: str) -> None:
        """Do nothing."""

    async def acquire_server(self, request_id: str) -> tuple[str, _Shared]:
        """Return the server."""
        return "server", _Shared(self._server)


class _Shared:
    """A handle that is not copied, as those of Ray are not."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

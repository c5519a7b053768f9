"""Parts of the servers of tools that no protocol has for itself: their end, checks of headers, pictures."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import uvicorn
from mcp.server.transport_security import TransportSecuritySettings

from verl_multiturn.chat.images import is_pil
from verl_multiturn.describe import show
from verl_multiturn.tool_servers.sessions import ToolHost, unmarked
from verl_multiturn.tools.running.results import CallResult, CallStatus

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_EVERYWHERE = ("0.0.0.0", "::", "")
_END_S = 10.0
"""Seconds after the release of all sessions for the rest of the process to end."""


async def until_signal(serving: Coroutine[Any, Any, None], host: ToolHost) -> int:
    """Serve until the serving ends or a signal comes, release all sessions, and return the exit status."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[int] = loop.create_future()

    def interrupt(number: int) -> None:
        if not came.done():
            came.set_result(130 if number == signal.SIGINT else 0)

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(each, interrupt, each)
    task = asyncio.ensure_future(serving)
    either: set[asyncio.Future[Any]] = {task, came}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    status = came.result() if came.done() else 0
    await host.aclose()
    # A tool's own thread, or a client that reads nothing, keeps no process alive that nobody speaks to.
    last = threading.Timer(_END_S, os._exit, (status,))
    last.daemon = True
    last.start()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return status


class Uvicorn(uvicorn.Server):
    """A server that leaves signals to us, since sessions are released before connections are closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing."""
        yield


def security_of(address: str) -> TransportSecuritySettings | None:
    """Return the checks of the headers Host and Origin against pages of other sites, for an address to listen on.

    Args:
        address: The address; one of this machine alone admits only its own names. None: no check, since an address of
            all networks may be called anything.
    """
    if address in _EVERYWHERE:
        return None
    names = LOOPBACK if address in LOOPBACK else (address,)
    hosts = [f"[{name}]:*" if ":" in name else f"{name}:*" for name in names]
    return TransportSecuritySettings(allowed_hosts=hosts, allowed_origins=[f"http://{host}" for host in hosts])


async def answer_of(result: CallResult) -> tuple[str, list[bytes], bool]:
    """Return the text of an answer, its images as PNG, and whether the call failed.

    Args:
        result: The answer.
    """
    text, failed = unmarked(result), result.status is not CallStatus.OK
    given = [image for image in result.images if image is not None]
    if strange := [image for image in given if not is_pil(image)]:
        return f"the tool returned {show(strange[0])} as an image; it must return PIL images", [], True
    # In a thread: it takes a while.
    return text, await asyncio.to_thread(lambda: [_png(image) for image in given]) if given else [], failed


def _png(image: Any) -> bytes:
    held = io.BytesIO()
    image.save(held, "PNG")
    return held.getvalue()

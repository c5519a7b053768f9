"""A listening socket that leaves the rest of its process room to open files.

asyncio's own server goes on accepting without free descriptors, with a traceback for each attempt; uvloop's closes new
connections. Here an older connection makes room, or accepting waits.

Invariants:
- an `accept` that fails is not repeated at once, unless room was made;
- a connection that cannot be begun is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
from collections.abc import Callable
from typing import Any

from verl_multiturn.errors import ConfigError

logger = logging.getLogger(__name__)

_MOST_FILES = 65_536
"""As many files a process is allowed that may have more; some programs stumble over larger limits."""
_AT_ONCE = 16
"""Connections accepted in one step of the event loop."""
_PAUSE_S = 1.0
"""Seconds until the next attempt where nothing makes room."""
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_open_files() -> int:
    """Let this process open as many files as it may, up to `_MOST_FILES`, and return how many it can open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


def listen(host: str, port: int, options: str, backlog: int = 1024) -> socket.socket:
    """Return a socket that listens on an address of this machine, for a command.

    Args:
        host: The address, or its name.
        port: The port; 0: any that is free.
        options: The options that named them, for errors, such as `--host ::1 --port 80`.
        backlog: Number of connections that may wait to be accepted.

    Raises:
        ConfigError: It cannot listen there.
    """
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=backlog)
    except OSError as error:
        raise ConfigError(
            f"{options}: cannot listen there ({error}); name an address of this machine and a free port, or port 0"
        ) from None


def address_of(listening: socket.socket) -> str:
    """Return the address of a listening socket as it stands in a URL, `HOST:PORT`."""
    host, port = listening.getsockname()[:2]
    return f"{f'[{host}]' if ':' in host else host}:{port}"


class Listener:
    """Accepts connections on the running event loop.

    Args:
        listening: The listening socket.
        protocol: Makes the protocol of a connection.
        make_room: Closes a connection where there is no room for another one, and returns whether it did.
    """

    def __init__(
        self, listening: socket.socket, protocol: Callable[[], asyncio.Protocol], make_room: Callable[[], bool]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._protocol = protocol
        self._make_room = make_room
        self._beginning: set[asyncio.Task[Any]] = set()
        self._pausing: asyncio.TimerHandle | None = None
        self._has_warned = False
        listening.setblocking(False)
        self._loop.add_reader(listening, self._accept)

    async def aclose(self) -> None:
        """Stop listening; afterwards no connection begins."""
        if self._pausing is not None:
            self._pausing.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        if self._beginning:
            await asyncio.wait(self._beginning)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM or not self._make_room():
                    self._pause(error)
                return
            task = self._loop.create_task(self._begin(accepted))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, accepted: socket.socket) -> None:
        try:
            accepted.setblocking(False)
            await self._loop.connect_accepted_socket(self._protocol, accepted)
        except OSError:  # it has gone already
            accepted.close()

    def _pause(self, error: OSError) -> None:
        self._loop.remove_reader(self._listening)
        self._pausing = self._loop.call_later(_PAUSE_S, self._loop.add_reader, self._listening, self._accept)
        if not self._has_warned:
            self._has_warned = True
            logger.warning("connections have to wait, since none can be accepted: %s; raise `ulimit -n`", error)

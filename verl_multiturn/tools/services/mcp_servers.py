"""The servers of an entry `mcp`: one that all conversations of a worker share, or one for each conversation.

    YAML ─ list_tools ─→ the first connection, which stays for use
    conversation ─ reserve ─→ a place of `most` ─ enter (create) ─→ its server ─ call … ─ leave (release) ─→ it ends

Invariants:
- no server of `per: conversation` serves two conversations, and each ends when the last tool of its conversation left;
- at most `most` of them are there at once, also counting those that start, wait or end; further conversations get
  one in the order in which they came;
- a server of `per: conversation` that has ended is not replaced, since its state is lost; its calls run one after the
  other, in their order, since one may need what the one before has done;
- what nobody holds any more ends: the handle of an entry that is garbage closes its connections.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import weakref
from collections.abc import Collection
from typing import Any

from mcp.types import CallToolResult

from verl_multiturn.calls.invocation import BusyError
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.services.mcp_connection import ServerAwayError, ServerConnection, backoff_s
from verl_multiturn.tools.services.mcp_listing import ToolListing
from verl_multiturn.tools.services.mcp_loop import from_outside, let_go, note_open, on_loop, soon
from verl_multiturn.tools.services.mcp_settings import McpSettings
from verl_multiturn.tools.services.mcp_transport import LastWords, reason_of

_numbers = itertools.count()


class _Servers:
    """Connections of one entry, on the loop of `mcp_loop.py`.

    Args:
        settings: The settings of the server.
        where: The place that errors name.
    """

    def __init__(self, settings: McpSettings, where: str) -> None:
        self.settings = settings
        self._where = where
        self._expected: ToolListing | None = None
        self.chosen: frozenset[str] = frozenset()
        self._alive: set[ServerConnection] = set()
        """Connections whose server process has not ended."""

    async def list_tools(self) -> ToolListing:
        """Open the first connection, which stays, and return the tools that the server lists.

        Raises:
            ConfigError: The server does not start, or does not answer.
        """
        errors = None if self.settings.url else LastWords()
        connection = self._open(errors=errors)
        try:
            _, listing = await asyncio.shield(connection.opened)
        except ServerAwayError as error:
            await asyncio.wait({connection.owner})
            failure = connection.failure or error
            words = ""
            if errors is not None:
                words = errors.read()
                errors.close()
            if isinstance(failure, ConfigError):
                raise failure from None
            said = f"its last words:\n{words}" if words else "it wrote no error"
            raise ConfigError(
                f"{self._where}: the MCP server {self.settings.label} did not list its tools "
                f"({reason_of(failure, self.settings)}); {said}"
            ) from failure
        if errors is not None:
            errors.pass_on()
        self._expected = listing
        self._keep(connection)
        return listing

    def _open(self, failures: int = 0, errors: LastWords | None = None) -> ServerConnection:
        connection = ServerConnection(self.settings, self._where, self._expected, self.chosen, failures, errors)
        self._alive.add(connection)
        note_open(self, True)
        connection.owner.add_done_callback(lambda _: self._has_ended(connection))
        return connection

    def _has_ended(self, connection: ServerConnection) -> None:
        self._alive.discard(connection)
        if not self._alive:
            note_open(self, False)

    def _keep(self, connection: ServerConnection) -> None:
        """Keep the connection that listed the tools for its use."""
        raise NotImplementedError

    def stop(self) -> None:
        """Close all connections, without waiting."""
        for connection in list(self._alive):
            connection.stop()

    async def close(self) -> None:
        """Close all connections, and wait until their server processes have ended."""
        self.stop()
        if self._alive:
            await asyncio.wait([connection.owner for connection in self._alive])

    def enter(self, conversation: str, user: str | None) -> None:
        """Let a conversation have its server, or come into the line for one; does nothing where all share one.

        Args:
            conversation: Its id.
            user: The tool that uses it from now on; None to have the place alone.
        """

    async def wait(self, conversation: str, user: str | None, wait_s: float | None) -> None:
        """Wait until a conversation that entered has its server.

        Args:
            conversation: Its id.
            user: As for `enter`.
            wait_s: Seconds to wait for a place; None for no limit.
        """

    def leave(self, conversation: str, user: str | None) -> None:
        """Take back the server of a conversation that no tool uses any more.

        Args:
            conversation: Its id.
            user: The tool that used it; None: only a place that no tool uses is taken back.
        """

    def connection_of(self, conversation: str) -> ServerConnection | None:
        """Return the connection of a conversation that has one of its own."""
        return None

    async def call(self, conversation: str, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool, as `ServerConnection.call` does, on the server of a conversation."""
        raise NotImplementedError


class _SharedServer(_Servers):
    """One server for all conversations; where its connection has ended, the next call opens another one."""

    _connection: ServerConnection | None = None

    def _keep(self, connection: ServerConnection) -> None:
        self._connection = connection

    async def call(self, conversation: str, name: str, arguments: dict[str, Any]) -> CallToolResult:
        last = self._connection
        if last is None or not last.takes_calls:
            last = self._connection = self._open(0 if last is None or last.answered else last.failures + 1)
        return await last.call(name, arguments)


class _Seat:
    """The server of one conversation, or its place in the line for one."""

    def __init__(self) -> None:
        self.users: set[str] = set()
        self.turn = asyncio.Lock()
        self.server: asyncio.Future[ServerConnection] = asyncio.get_running_loop().create_future()


class _ServerPool(_Servers):
    """A server for each conversation, some of them started before their conversation comes."""

    def __init__(self, settings: McpSettings, where: str) -> None:
        super().__init__(settings, where)
        self._ready: list[ServerConnection] = []
        self._seats: dict[str, _Seat] = {}
        self._line: list[_Seat] = []
        self._refills = False
        """Whether servers are started before they are needed: from the first conversation on."""
        self._failures = 0
        """Servers that ended before a conversation had them, in a row."""
        self._pause: asyncio.TimerHandle | None = None

    def _keep(self, connection: ServerConnection) -> None:
        if self.settings.command and self.settings.ready:
            self._ready.append(connection)
        else:
            connection.stop()

    def enter(self, conversation: str, user: str | None) -> None:
        """Let a conversation have a server of its own, or come into the line for one."""
        self._refills = True
        seat = self._seats.get(conversation)
        if seat is None:
            seat = self._seats[conversation] = _Seat()
            self._line.append(seat)
            self._serve()
        if user is not None:
            seat.users.add(user)

    async def wait(self, conversation: str, user: str | None, wait_s: float | None) -> None:
        """Wait for the place, and until the server has started where a tool uses it.

        Raises:
            BusyError: No place was free within `wait_s`.
            ServerAwayError: The server does not start.
        """
        seat = self._seats.get(conversation)
        if seat is None:
            return  # it has left, and its waiter was cancelled
        try:
            async with asyncio.timeout(wait_s):
                server = await asyncio.shield(seat.server)
        except TimeoutError:
            self.leave(conversation, user)
            raise BusyError(
                f"no place was free within {wait_s:g} s: all {self.settings.most} servers of 'mcp.most' serve other "
                "conversations; raise it, or limits.queue_timeout_s"
            ) from None
        if user is not None:
            await asyncio.shield(server.opened)

    def leave(self, conversation: str, user: str | None) -> None:
        """End the server of a conversation, unless a tool of it still uses it."""
        seat = self._seats.get(conversation)
        if seat is None:
            return
        seat.users.discard(user or "")
        if seat.users:
            return
        del self._seats[conversation]
        if seat in self._line:
            self._line.remove(seat)
        if not seat.server.done():
            seat.server.cancel()
        elif seat.server.exception() is None:
            seat.server.result().stop()

    def connection_of(self, conversation: str) -> ServerConnection | None:
        """Return the connection of a conversation that has a place; None without one."""
        seat = self._seats.get(conversation)
        return seat.server.result() if seat is not None and seat.server.done() else None

    async def call(self, conversation: str, name: str, arguments: dict[str, Any]) -> CallToolResult:
        if (connection := self.connection_of(conversation)) is None:
            raise RuntimeError("the conversation has no tool server: call it between `create` and `release`")
        async with self._seats[conversation].turn:
            return await connection.call(name, arguments)

    def stop(self) -> None:
        """Close all connections; conversations that wait for one get none."""
        self._refills = False
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        for seat in self._line:
            if not seat.server.done():
                seat.server.set_exception(ServerAwayError("the tool server is not available (it was closed)"))
                seat.server.exception()
        self._line.clear()
        self._ready.clear()
        super().stop()

    def _has_ended(self, connection: ServerConnection) -> None:
        super()._has_ended(connection)
        if connection in self._ready:  # it did not start, or ended before a conversation had it
            self._ready.remove(connection)
            self._failures += 1
        self._serve()

    def _serve(self) -> None:
        """Give servers to those in the line, then start servers for those who come next."""
        while self._line and (server := self._next()) is not None:
            self._line.pop(0).server.set_result(server)
        settings = self.settings
        if not self._refills or self._line or self._pause is not None or not settings.command:
            return
        if self._failures:
            loop = asyncio.get_running_loop()
            self._pause = loop.call_later(backoff_s(self._failures), self._refill)
        else:
            self._refill()

    def _refill(self) -> None:
        self._pause = None
        while len(self._ready) < self.settings.ready and len(self._alive) < self.settings.most:
            self._ready.append(self._open())
            if self._failures:
                return  # one try, until a conversation has got one that works

    def _next(self) -> ServerConnection | None:
        """Return a server for a conversation: one that has started, one that starts, a new one; None: no place."""
        living = [server for server in self._ready if server.takes_calls]
        ready = next((server for server in living if server.is_ready), living[0] if living else None)
        if ready is not None:
            self._ready.remove(ready)
            self._failures = 0 if ready.is_ready else self._failures
            return ready
        return self._open() if len(self._alive) < self.settings.most else None


class McpServer:
    """The handle of an entry's servers, which its tools share; for any event loop and thread.

    Args:
        settings: The settings of the server.
        where: The place that errors name.

    Attributes:
        order: Its place in the one order in which conversations take places, so that no two wait for each other.
    """

    def __init__(self, settings: McpSettings, where: str) -> None:
        self.settings = settings
        self.where = where
        self.order = next(_numbers)
        self._process = 0
        self._chosen: frozenset[str] = frozenset()
        self._garbage: weakref.finalize[Any, McpServer] | None = None
        self._made = self._servers

    @property
    def _servers(self) -> _Servers:
        """The connections of this process: a forked one cannot use those of its parent."""
        if self._process != os.getpid():
            self._process = os.getpid()
            kind = _SharedServer if self.settings.per == "worker" else _ServerPool
            self._made = kind(self.settings, self.where)
            self._made.chosen = self._chosen
            if self._garbage is not None:
                self._garbage.detach()
            self._garbage = weakref.finalize(self, let_go, self._made.stop)
            # Not at the exit of the interpreter: `mcp_loop.py` closes what is open then, and waits for it.
            self._garbage.atexit = False
        return self._made

    def list_tools(self) -> ToolListing:
        """Start the server and return its tools; it goes on for its use. May be called while an event loop runs.

        Raises:
            ConfigError: The server does not start, or does not answer; the error begins with the place.
        """
        return from_outside(self._servers.list_tools())

    def choose(self, names: Collection[str]) -> None:
        """Note which of the server's tools are used: without one of these a later server is refused.

        Args:
            names: The server's own names of them.
        """
        self._servers.chosen = self._chosen = frozenset(names)

    def close(self) -> None:
        """Close all connections, and wait until their server processes have ended, without an event loop."""
        from_outside(self._servers.close())

    async def aclose(self) -> None:
        """Close all connections, and wait until their server processes have ended."""
        await on_loop(self._servers.close())

    def another(self) -> McpServer:
        """Return a handle with servers of its own, none started before it is needed, and the same tools."""
        other = McpServer(self.settings.model_copy(update={"ready": 0}), self.where)
        other.list_tools()
        other.choose(self._chosen)
        return other

    def connection_of(self, conversation: str) -> ServerConnection | None:
        """Return the connection of a conversation that has a server of its own, for measurements; None without one.

        Args:
            conversation: Its id.
        """
        return self._servers.connection_of(conversation)

    async def reserve(self, conversation: str, wait_s: float) -> None:
        """Wait for a place for a conversation's server.

        Args:
            conversation: Its id.
            wait_s: Seconds to wait at most.

        Raises:
            BusyError: None was free in time.
        """
        soon(self._servers.enter, conversation, None)
        await on_loop(self._servers.wait(conversation, None, wait_s))

    async def enter(self, conversation: str, user: str) -> None:
        """Let a tool of a conversation use its server, once that has started.

        Args:
            conversation: Its id.
            user: The tool's name.

        Raises:
            ServerAwayError: The server does not start.
        """
        soon(self._servers.enter, conversation, user)
        await on_loop(self._servers.wait(conversation, user, None))

    def leave(self, conversation: str, user: str | None = None) -> None:
        """Take a server back that no tool of its conversation uses any more; its process ends in the background.

        Args:
            conversation: Its id.
            user: The tool that used it; None: only a place that no tool uses is taken back.
        """
        soon(self._servers.leave, conversation, user)

    async def call(self, conversation: str, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool, as `ServerConnection.call` does.

        Args:
            conversation: Id of the conversation.
            name: The server's own name of the tool.
            arguments: The arguments of the call.
        """
        return await on_loop(self._servers.call(conversation, name, arguments))

"""A server of the Model Context Protocol for our tools, by the official SDK: over stdio; `mcp_http.py` has HTTP.

Which session of tools (`ToolHost`) a request belongs to:

    stdio                     the process is one session, in each version of the protocol
    http://HOST:PORT/mcp      a session of the protocol (`Mcp-Session-Id`), as versions up to 2025-11-25 have them
    http://HOST:PORT/mcp/NAME the session NAME, for later versions, which have no sessions: each request is alone

A client that knows both kinds of versions is sent to the kind that its address serves.

Invariants:
- over stdio nothing but the protocol is written to standard output, whatever tools and their modules print;
- a session ends once: by DELETE, by the end of standard input, by a signal, or when it was not used for too long. After
  that a request of its protocol session gets 404, by which a client begins another one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import io
import os
import select
import stat
import struct
import sys
import termios
import threading
from collections.abc import AsyncIterator
from typing import Any, cast

from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from verl_multiturn import __version__
from verl_multiturn.errors import ConfigError
from verl_multiturn.tool_servers.serving import answer_of, until_signal
from verl_multiturn.tool_servers.sessions import ToolHost
from verl_multiturn.tools.mcp_tools import SCHEMA_META
from verl_multiturn.tools.running.results import CallResult

PATH = "/mcp"
_STDIO = "stdio"
SESSION_ID = "mcp-session-id"
_PIECE = 1 << 16
_LOOK_S, _UNREAD_LOOK_S = 1.0, 0.05
"""Seconds between two looks at standard error that is read, and at one that is not."""
_LAST_S = 5.0
"""Seconds for a piece of an answer, once standard input has ended: its client may be there and read nothing. A text on
standard error has as long."""


def mcp_tool(schema: dict[str, Any]) -> types.Tool:
    """Return a tool's schema as MCP lists it, and as a whole in `_meta`, for our own client.

    MCP has no place for some of it: the SDK reorders the keys of the parameters, which a prompt shows in their order,
    drops those that are null, and knows no further keys of a function, such as `strict`.

    Args:
        schema: The schema in OpenAI's form.
    """
    function = schema["function"]
    return types.Tool(
        name=function["name"],
        description=function.get("description"),
        input_schema=function.get("parameters", {"type": "object", "properties": {}}),
        _meta={SCHEMA_META: schema},
    )


def build_server(host: ToolHost) -> Server[Any]:
    """Return the SDK's server, which lists a host's tools and hands calls to their sessions.

    Args:
        host: The tools and their sessions.
    """
    listed = [mcp_tool(schema) for schema in host.schemas]
    parameters = {tool.name: tool.input_schema for tool in listed}

    async def list_tools(ctx: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=listed)

    async def call_tool(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        result = await host.call(session_key(ctx.request), params.name, params.arguments or {})
        return await mcp_result(result, has_rewards=host.report is not None)

    return Server(
        "verl-multiturn",
        version=__version__,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        get_tool_input_schema=parameters.get,
    )


async def mcp_result(result: CallResult, has_rewards: bool) -> types.CallToolResult:
    """Return the answer to a call as MCP has it: a text, then images.

    Args:
        result: The answer.
        has_rewards: Whether the client is shown status, reward and metrics.
    """
    text, pictures, failed = await answer_of(result)
    content: list[Any] = [
        types.ImageContent(type="image", data=base64.b64encode(each).decode(), mime_type="image/png")
        for each in pictures
    ]
    if text or not content:
        content.insert(0, types.TextContent(type="text", text=text))
    shown = {"status": str(result.status), "reward": result.reward, "metrics": result.metrics}
    meta = {f"verl-multiturn/{key}": value for key, value in shown.items()} if has_rewards else None
    return types.CallToolResult(content=content, is_error=failed, _meta=meta)


def session_key(request: Any) -> str:
    """Return the key of the session that a request belongs to."""
    if request is None:
        return _STDIO
    name = request.url.path.removeprefix(PATH).strip("/")
    return f"name {name}" if name else f"id {request.headers.get(SESSION_ID)}"


# ------------------------------------------------------------------------------------------------ standard streams


class PatientErrors:
    """Standard error that keeps nobody waiting, neither this process nor its children.

    A client may read nothing of it, and a print that waits for ever would keep the server from its end. Of a pipe a
    thread holds the other end, too: when it was full for `_LAST_S` and nobody read it, the thread empties it. So a text
    is with the client as soon as it is written, and a crash loses none. A socket, and a pipe whose other end cannot be
    opened, go behind the thread, which passes texts on; a crash loses those that it has not passed on yet.

    Args:
        descriptor: The descriptor of standard error; one that is neither a pipe nor a socket stays as it is.
    """

    def __init__(self, descriptor: int = 2) -> None:
        self._descriptor = descriptor
        self._thread: threading.Thread | None = None
        kind = os.fstat(descriptor).st_mode
        if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
            return
        self._file = os.dup(descriptor)
        self._writable = select.poll()
        self._writable.register(self._file, select.POLLOUT)
        self._over, self._open = os.pipe()
        self._is_read = True
        """Whether a reader took the last text that had to wait."""
        work = self._empty
        try:
            self._read = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            work = self._pass_on
            self._read, write = os.pipe()
            os.dup2(write, descriptor)
            os.close(write)
        self._thread = threading.Thread(target=work, daemon=True, name="standard error")
        self._thread.start()

    def _empty(self) -> None:
        """Empty the pipe whenever it is full and nobody reads it."""
        over = select.poll()
        over.register(self._over, select.POLLIN)
        before, is_over = 0, False
        while not is_over:
            is_over = bool(over.poll(1000 * _LOOK_S if self._is_read else 1000 * _UNREAD_LOOK_S))
            held = struct.unpack("i", fcntl.ioctl(self._read, termios.FIONREAD, bytes(4)))[0]
            self._is_read |= held < before  # by the client
            if not self._writable.poll(1000 * _LAST_S if self._is_read else 0):
                self._is_read, held = False, 0
                with contextlib.suppress(BlockingIOError):  # its reader is back
                    os.read(self._read, _PIECE)
            before = held

    def _pass_on(self) -> None:
        waiting = select.poll()
        waiting.register(self._read, select.POLLIN)
        waiting.register(self._over, select.POLLIN)
        while self._read in dict(waiting.poll()) and (piece := os.read(self._read, _PIECE)):
            self._is_read = self._write(memoryview(piece), _LAST_S if self._is_read else 0.0)

    def _write(self, rest: memoryview, wait_s: float) -> bool:
        """Write a text; return False where nobody reads, and the rest of it is lost."""
        try:
            while rest and self._writable.poll(wait_s * 1000):  # then it takes PIPE_BUF bytes without a wait
                rest = rest[os.write(self._file, rest[: select.PIPE_BUF]) :]
        except OSError:  # its reader is gone
            return False
        return not rest

    def close(self) -> None:
        """Give standard error back, once all that was put there is written; where nobody reads it, nothing gets it."""
        if self._thread is None:
            return
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._descriptor)
        os.close(nothing)
        os.close(self._open)
        self._thread.join(2 * _LAST_S)
        if not self._thread.is_alive():
            os.close(self._read)
            is_gone = any(event & select.POLLERR for _, event in self._writable.poll(0))
            if self._is_read and not is_gone:
                os.dup2(self._file, self._descriptor)


class Wire:
    """The standard streams of this process, taken from everybody else: what is printed goes to standard error.

    Make it before the tools are loaded, since their modules may print. A child process inherits neither stream.

    Raises:
        ConfigError: One of them is closed.

    Attributes:
        unread: Set when standard input has ended, and nobody reads standard output.
    """

    def __init__(self) -> None:
        try:
            self._input, self._output = os.dup(0), os.dup(1)
        except OSError:
            raise ConfigError("standard input or output is closed; the protocol needs both, or --http PORT") from None
        self._errors = PatientErrors()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # each line in its place among those of standard error
        self.unread = asyncio.Event()
        self._begun = self._written = 0

    async def lines(self) -> AsyncIterator[str]:
        """Yield the lines of standard input.

        A thread reads them that nobody waits for: a read of a pipe cannot be cancelled.
        """
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[bytes] = asyncio.Queue()

        def read() -> None:
            piece = b"."
            with contextlib.suppress(RuntimeError):  # the loop has ended
                while piece:
                    try:
                        piece = os.read(self._input, _PIECE)
                    except OSError:
                        piece = b""
                    loop.call_soon_threadsafe(pieces.put_nowait, piece)
                loop.call_soon_threadsafe(self._look, -1)

        threading.Thread(target=read, daemon=True, name="standard input").start()
        begun: list[bytes] = []
        while piece := await pieces.get():
            *ended, rest = piece.split(b"\n")
            for line in ended:
                yield b"".join([*begun, line]).decode("utf-8", "replace")
                begun = []
            begun.append(rest)

    async def write(self, text: str) -> None:
        """Write a text to standard output.

        Raises:
            BrokenPipeError: Nobody reads it any more.
        """
        await asyncio.to_thread(self._write, text.encode("utf-8", "replace"))

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            self._begun += 1
            rest = rest[os.write(self._output, rest[:_PIECE]) :]
            self._written += 1

    def _look(self, before: int) -> None:
        """Note, once standard input has ended, whether a piece of an answer waits too long for its reader."""
        if self._begun > self._written == before:
            self.unread.set()
        else:
            asyncio.get_running_loop().call_later(_LAST_S, self._look, self._written)

    async def flush(self) -> None:
        """Do nothing: all is written."""

    def close(self) -> None:
        """Wait, at the end of the process, until standard error is written."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        self._errors.close()


async def serve_stdio(host: ToolHost, wire: Wire) -> int:
    """Serve one client until its standard input ends or a signal comes, and return the exit status.

    Args:
        host: The tools; closed at the end.
        wire: The standard streams.
    """
    server = build_server(host)

    async def speak() -> None:
        try:
            async with stdio_server(cast(Any, wire.lines()), cast(Any, wire)) as (read, write):
                await server.run(read, write, server.create_initialization_options())
        except* BrokenPipeError:  # nobody reads answers any more
            pass

    async def serve() -> None:
        # The SDK would wait for the end of a write.
        speaking, unread = asyncio.ensure_future(speak()), asyncio.ensure_future(wire.unread.wait())
        either: set[asyncio.Future[Any]] = {speaking, unread}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if speaking.done():
                speaking.result()
        finally:
            for each in either:
                each.cancel()

    return await until_signal(serve(), host)

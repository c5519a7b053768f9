"""One connection to an MCP server, on the loop of `mcp_loop.py`.

Invariants:
- a connection is opened and closed by a task of its own, so that no cancelled call can take it down;
- a call is answered, or fails as soon as its connection has ended;
- the server process of a connection, and its folder, end with the connection, or at the latest with the worker;
- a server that lists other tools than when the YAML was read is named; without a tool that was chosen it is not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import time
from typing import Any

from mcp import Client, MCPError
from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST, CallToolResult
from pydantic import ValidationError

from verl_multiturn.calls.metrics import warn_once
from verl_multiturn.errors import OutageError
from verl_multiturn.tools.services.mcp_listing import ToolListing
from verl_multiturn.tools.services.mcp_settings import ConversationValues, McpSettings
from verl_multiturn.tools.services.mcp_transport import LastWords, open_server, outage_of, reason_of

logger = logging.getLogger(__name__)

_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 10.0
# A server counts as dead after so many calls in a row that were each given up after more than so many seconds.
_GIVEN_UP = 8
_PATIENCE_S = 1.0


class ServerAwayError(OutageError, ConnectionError):
    """A server is not there, or cannot be started. No argument of a call is the reason."""


def backoff_s(failures: int) -> float:
    """Return the seconds to wait before a server is started that failed so many times in a row."""
    return min(_BACKOFF_S * 2 ** (failures - 1), _LONGEST_BACKOFF_S) if failures else 0.0


class ServerConnection:
    """One connection, from its opening to its end.

    Args:
        settings: The settings of the server.
        where: The place that errors name.
        expected: The tools that were listed when the YAML was read; None: they are listed now.
        chosen: Names of those of them that are used.
        failures: Connections in a row before this one that failed; each doubles the wait before opening.
        errors: Takes the standard error of the program; None: it is the worker's.

    Attributes:
        answered: True once a call was answered, or the tools were listed for the first time.
        opened: The client and its list of tools, once the server has started; or the error with which it failed.
        started_at: When the server had started (`time.monotonic`); None before.
        failure: The transport's error; None without one.
        owner: The task that opens and closes it; done when the server process has ended.
    """

    def __init__(
        self,
        settings: McpSettings,
        where: str,
        expected: ToolListing | None,
        chosen: frozenset[str] = frozenset(),
        failures: int = 0,
        errors: LastWords | None = None,
    ) -> None:
        self.failures = failures
        self.answered = expected is None
        self.started_at: float | None = None
        self.failure: Exception | None = None
        self._retired = False
        self._settings = settings
        self._where = where
        self._expected = expected
        self._chosen = chosen
        self._errors = errors
        self._calls = 0
        self._given_up = 0
        self._over = asyncio.Event()
        self.opened: asyncio.Future[tuple[Client, ToolListing]] = asyncio.get_running_loop().create_future()
        self.opened.add_done_callback(lambda opened: opened.exception())  # mark it as retrieved: perhaps no call waits
        self.owner = asyncio.create_task(self._own(), name=f"MCP server {settings.label}")
        self.owner.add_done_callback(lambda _: self._end())  # also where it was cancelled before its first step

    @property
    def takes_calls(self) -> bool:
        """True while new calls may use the connection. A retired one closes when its last call has ended."""
        return not self._retired and not self._over.is_set()

    @property
    def is_ready(self) -> bool:
        """True while the server has started and takes calls."""
        return self.opened.done() and self.takes_calls

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool. If this is cancelled, the server is notified.

        Args:
            name: The server's own name of the tool.
            arguments: The arguments of the call.

        Raises:
            ServerAwayError: There is no connection.
            UnavailableError: The server reports that it is not there, or does not take the key or the address.
            ValueError: The server refuses the call.
            RuntimeError: The connection ended during the call, or the answer is not a result of a tool.
        """
        self._calls += 1
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            client, _ = await asyncio.shield(self.opened)
            if self._over.is_set():
                raise self._lost("has ended")
            result = await client.call_tool(name, _sendable(arguments))
        except asyncio.CancelledError:
            self._given_up += loop.time() - started > _PATIENCE_S
            if self._given_up >= _GIVEN_UP:
                self._retire("it answered none of its last calls")
            raise
        except MCPError as error:
            if (outage := outage_of(error)) is not None:
                raise outage from None
            if error.code != CONNECTION_CLOSED and not _is_session_gone(error):
                self._note_answer()
                raise ValueError(error.message) from None
            self._retire(error.message)
            raise self._lost("ended during the call") from None
        except ValidationError:
            raise RuntimeError("the tool server's answer is no result of a tool") from None
        finally:
            self._calls -= 1
            if self._retired and not self._calls:
                self._over.set()
        self._note_answer()
        return result

    def stop(self) -> None:
        """Close the connection at once, even if calls are running; they fail."""
        if not self.opened.done() and not self._retired:  # once, since the end of a server must not be interrupted
            self.owner.cancel()
        self._retired = True
        if self.opened.done():
            self._over.set()

    def _note_answer(self) -> None:
        self.answered = True
        self._given_up = 0

    def _retire(self, reason: str) -> None:
        if not self._retired:
            logger.warning("MCP server %s: the connection is given up: %s", self._settings.label, reason)
        self._retired = True

    def _lost(self, what: str) -> RuntimeError:
        # No error of a connection, which would be an outage: the model's request may have ended the server.
        remedy = "call it again" if self._settings.per == "worker" else "it does not come back, and its state is lost"
        return RuntimeError(f"the tool server {what}; {remedy}")

    async def _own(self) -> None:
        own: ConversationValues | None = None
        try:
            await asyncio.sleep(backoff_s(self.failures))
            own = ConversationValues(self._settings)
            async with contextlib.AsyncExitStack() as stack:
                try:
                    async with asyncio.timeout(self._settings.start_timeout_s):
                        opened = await open_server(stack, self._settings, self._where, self._errors, self._over, own)
                    self._compare(opened[1])
                except BaseException:  # cancelled, too
                    self._retired = True  # the server ends now, which `stop` must not interrupt
                    raise
                self.started_at = time.monotonic()
                self.opened.set_result(opened)
                await self._over.wait()
        except Exception as error:  # the transport may raise anything
            self.failure = error
            if self._expected is not None:  # otherwise the caller raises it
                logger.warning("MCP server %s: %s", self._settings.label, reason_of(error, self._settings))
        finally:
            if own is not None and own.folder:  # the guard has removed it, where there is one and it was not killed
                shutil.rmtree(own.folder, ignore_errors=True)

    def _end(self) -> None:
        self._retired = True
        self._over.set()
        if not self.opened.done():
            reason = "it was closed" if self.failure is None else reason_of(self.failure, self._settings)
            lost = ServerAwayError(f"the tool server is not available ({reason})")
            lost.__cause__ = None if self.failure is None else outage_of(self.failure)
            self.opened.set_exception(lost)

    def _compare(self, listing: ToolListing) -> None:
        """Name the tools that differ from those of the first list; refuse a server without one that was chosen.

        Raises:
            ServerAwayError: A chosen tool is missing.
        """
        if self._expected is None:
            return
        missing, changed = self._expected.differences(listing, self._chosen)
        if missing:
            raise ServerAwayError(
                f"it no longer lists the tool {missing[0]!r} that it listed when {self._where} was read; mend the "
                "server, or put the tool under 'exclude'"
            )
        for name in changed:
            warn_once(
                f"MCP server {self._settings.label}",
                f"its tool {name!r} has another description or schema than when the YAML was read",
                ", which the model does not see; let the server list its tools the same at each start",
            )


def _sendable(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace lone surrogates in arguments: JSON may hold them, and the connection would break on sending them."""
    text = json.dumps(arguments, ensure_ascii=False)
    sent: dict[str, Any] = json.loads(text.encode("utf-8", "replace"))
    return sent


def _is_session_gone(error: MCPError) -> bool:
    """Return whether a server does not know the session any more, for example because it was restarted."""
    return error.code == INVALID_REQUEST and "session" in error.message.lower()

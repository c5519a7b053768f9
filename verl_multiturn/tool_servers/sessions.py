"""`ToolHost`: tools for the clients of a server, each session of a client with tools of its own.

    first call of a session → create · execute · execute · … → its end, or nothing called for too long → release

It knows no protocol: a server gives each session a key, such as an id of its protocol, and hands over its calls.

Invariants:
- a session has a `ToolSession` of its own: state, kwargs and calls are never those of another one;
- `create` runs at the first call, since clients open sessions to list tools alone; `release` runs exactly once for it;
- no call runs once its session has ended; a session that has ended is not opened again;
- a `create` that failed is tried again by the next call, once what began is released: a session may last for days;
- an answer has rewards and metrics only where somebody takes the rewards of sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl_multiturn.calls.closing import close_all
from verl_multiturn.calls.slots import Gates
from verl_multiturn.calls.tasks import ended, finish, keep
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.describe import describe, show
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.tools.loading.kwargs import check_shown, tools_of_row
from verl_multiturn.tools.loading.registry import load_tools, schema_of
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.results import CallResult, CallStatus
from verl_multiturn.tools.running.session import ToolSession

logger = logging.getLogger(__name__)

MOST_SESSIONS = 256
IDLE_S = 1800.0
TIMEOUT_S = 60.0
_MARK = "Error: "
_KEPT_ENDS = 10_000
"""Number of ended sessions whose reasons are kept. Of the others a digest is kept, some 70 bytes."""
_MANY = 1_000_000

Report = Callable[[str, Mapping[str, float]], None]
"""Takes the key of a session that has ended, and its rewards by tool."""


class ToolHost:
    """Tools that a server offers, and the sessions of its clients. All methods run on one event loop.

    Args:
        tools: The tools by name, as `load_tools` returns them.
        kwargs: The kwargs of every session, as a data row's `tools_kwargs`.
        report: Takes each session's rewards at its end; None: rewards are neither computed nor shown.
        most: Largest number of sessions at once.
        idle_s: Seconds without a call, or another use, after which a session ends; None: it never does by itself.
        timeout_s: Seconds for a call of a tool whose `limits` have none.
        where: The place that errors about the kwargs name.

    Raises:
        ConfigError: The kwargs do not fit the tools, or hide one.
    """

    def __init__(
        self,
        tools: Mapping[str, Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        report: Report | None = None,
        most: int = MOST_SESSIONS,
        idle_s: float | None = IDLE_S,
        timeout_s: float = TIMEOUT_S,
        where: str = "--kwargs",
    ) -> None:
        row = {"tools_kwargs": kwargs}
        self.tools, self._kwargs = tools_of_row(row, tools, where)
        check_shown(row, where)
        self.report = report
        self.most = most
        self.idle_s = idle_s
        self._gates = Gates(Gate, timeout_s)
        self._sessions: dict[str, _ClientSession] = {}
        self._uses: Counter[str] = Counter()
        self._ends: OrderedDict[str, str] = OrderedDict()
        """Why sessions have ended, by key; the latest of them."""
        self._ended: set[int] = set()
        """Digests of the keys of all sessions that have ended."""
        self._ending: set[asyncio.Future[Any]] = set()
        self._is_closed = False

    @classmethod
    def load(cls, path: str | Path, kwargs: str | None = None, **settings: Any) -> ToolHost:
        """Load the tools of a YAML file, for a command.

        Args:
            path: The path of the file.
            kwargs: The kwargs of every session as JSON, the value of the option `--kwargs`.
            settings: The other arguments of `ToolHost`.

        Raises:
            ConfigError: The file, or the kwargs, cannot be used.
        """
        given = _json_object(kwargs, "--kwargs")
        return cls(load_tools(path), given, **settings)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Return each tool's own schema, `{"type": "function", "function": {…}}`, in the file's order."""
        return [schema_of(tool).as_dict() for tool in self.tools.values()]

    @property
    def number(self) -> int:
        """Return the number of open sessions."""
        return len(self._sessions)

    async def call(self, key: str, name: str, arguments: str | Mapping[str, Any]) -> CallResult:
        """Run one call in a session, which its first call opens, and return the answer; raises no error of a tool.

        Args:
            key: Key of the session.
            name: Name of the tool.
            arguments: The arguments, as JSON text or as a mapping.

        Raises:
            asyncio.CancelledError: The caller was cancelled; then the call has ended, too.
        """
        with self.use(key):
            return await self._call(key, name, arguments)

    async def _call(self, key: str, name: str, arguments: str | Mapping[str, Any]) -> CallResult:
        session = self._session(key)
        if isinstance(session, CallResult):
            return session
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        run = asyncio.ensure_future(session.run(name, text))
        session.running.add(run)
        cancelled = await ended(run, pass_on=True)
        session.running.discard(run)
        if cancelled is not None:
            if not run.cancelled():
                run.exception()
            raise cancelled
        if run.cancelled():
            return _refusal(CallStatus.OVER_LIMIT, f"not executed to its end, {self._end_of(key)}")
        result = run.result()
        if self.report is None:
            result.reward, result.metrics = 0.0, {}
        return result

    @contextlib.contextmanager
    def use(self, key: str) -> Iterator[None]:
        """Keep a session from being idle: a call runs, or its client is connected.

        Args:
            key: Key of the session, which need not have begun.
        """
        self._uses[key] += 1
        if key in self._sessions:
            self._sessions[key].wake()
        try:
            yield
        finally:
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                if key in self._sessions:
                    self._sessions[key].rest()

    def has_ended(self, key: str) -> bool:
        """Return whether a session has ended, so that a call of it would be refused.

        Args:
            key: Key of the session.
        """
        return _digest(key) in self._ended

    async def end(self, key: str, reason: str = "its client has ended it") -> dict[str, float] | None:
        """End a session: its calls are cancelled, its tools released, and no call opens it again.

        Args:
            key: Key of the session.
            reason: Why it ends, in words for a client that calls nevertheless.

        Returns:
            Its rewards by tool; None where rewards are hidden, or there is no such session.
        """
        session = self._sessions.pop(key, None)
        self._ends[key] = reason
        self._ended.add(_digest(key))
        self._ends.move_to_end(key)
        if len(self._ends) > _KEPT_ENDS:
            self._ends.popitem(last=False)
        if session is None:
            return None
        ending = asyncio.ensure_future(session.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        rewards: dict[str, float] | None = await finish(ending)
        if rewards is not None and self.report is not None:
            self.report(key, rewards)
        return rewards

    async def aclose(self) -> None:
        """End all sessions and close the tools; the server's last call."""
        self._is_closed = True
        await asyncio.gather(*(self.end(key, "the server ends") for key in list(self._sessions)))
        while self._ending:
            await asyncio.wait(set(self._ending))
        await close_all(self.tools.values())

    def _session(self, key: str) -> _ClientSession | CallResult:
        """Return the session of a key, a new one for a new key; or the answer that refuses it."""
        if key in self._sessions:
            return self._sessions[key]
        if self._is_closed or self.has_ended(key):
            return _refusal(CallStatus.OVER_LIMIT, f"not executed, {self._end_of(key)}; begin another session")
        if len(self._sessions) >= self.most:
            return _refusal(
                CallStatus.OVERLOADED, f"not executed, all {self.most} sessions are in use; end one, or call it later"
            )
        session = self._sessions[key] = _ClientSession(self, key)
        return session

    def make(self) -> ToolSession:
        """Return the tools of a session, which are not created yet."""
        # Its own id: tools name files by it, and a key may be any text.
        return ToolSession(uuid4().hex, self.tools, self._kwargs, self._gates, _MANY)

    def _end_of(self, key: str) -> str:
        reason = self._ends.get(key, "the server ends" if self._is_closed else "it was long ago")
        return f"the session has ended: {reason}"


class _ClientSession:
    """The tools of one session, opened by its first call.

    Args:
        host: The host.
        key: Key of the session.
    """

    def __init__(self, host: ToolHost, key: str) -> None:
        self._host = host
        self._key = key
        self._tools = host.make()
        self._opening: asyncio.Future[Any] | None = None
        self._again: dict[str, asyncio.Future[None]] = {}
        """Of a tool whose `create` failed, the next attempt."""
        self.running: set[asyncio.Future[Any]] = set()
        """Calls that run."""
        self._timer: asyncio.TimerHandle | None = None
        self._count = 0
        self._over = ""

    def wake(self) -> None:
        """Note that the session is in use."""
        if self._timer is not None:
            self._timer.cancel()

    def rest(self) -> None:
        """Note that the session is in use no more: it ends unless it is used again in time."""
        if self._host.idle_s is not None:
            self.wake()
            self._timer = asyncio.get_running_loop().call_later(self._host.idle_s, self._expire)

    def _expire(self) -> None:
        keep(asyncio.ensure_future(self._host.end(self._key, f"it was not used for {self._host.idle_s:g} s")))

    async def run(self, name: str, arguments: str) -> CallResult:
        """Run one call.

        Args:
            name: Name of the tool.
            arguments: The arguments, as JSON text.
        """
        if self._over:
            text = f"not executed, {self._over} was called and ends a session; begin another one"
            return _refusal(CallStatus.OVER_LIMIT, text)
        self._count += 1
        try:
            opening = self._opening
            if opening is not None and opening.done() and not _is_well(opening):  # its only caller was cancelled
                self._tools, opening = self._host.make(), None
            is_open = opening is not None and opening.done()
            if opening is None:
                opening = self._opening = asyncio.ensure_future(self._tools.__aenter__())
            try:
                await asyncio.shield(opening)  # a call that is cancelled takes no other one with it
            except MultiTurnError:
                if self._opening is opening:  # it has released what it had created
                    self._opening, self._tools = None, self._host.make()
                raise
            if is_open:
                await self._mend(name)
            (result,) = await self._tools.execute([ToolCall(name, arguments, f"call_{self._count}")])
        except MultiTurnError as error:  # a mistake of the tool's author, for whom the log is
            logger.error("tool %r: %s", name, error)
            return _refusal(CallStatus.ERROR, describe(error))
        if self._tools.ended:
            self._over = show(name)
        return result

    async def _mend(self, name: str) -> None:
        """Create a tool anew whose `create` failed; calls of other tools do not wait for it."""
        again = self._again.get(name)
        if name in self._tools.broken and (again is None or again.done()):
            again = self._again[name] = asyncio.ensure_future(self._tools.create_again(name))
        if again is not None:
            await asyncio.shield(again)

    async def end(self) -> dict[str, float] | None:
        """End the calls, and release the tools; return the rewards where they are wanted."""
        self.wake()
        waited = [*self.running, *self._again.values(), *([self._opening] if self._opening is not None else [])]
        opened = self._opening is not None and self._opening.done() and _is_well(self._opening)
        for each in waited:
            each.cancel()
        if waited:
            await asyncio.wait(waited)
        rewards = None
        try:
            if self._host.report is not None and opened:
                rewards = await self._tools.calc_rewards()
        except MultiTurnError as error:
            logger.error("session %s: %s", self._key, error)
        finally:
            await self._tools.__aexit__()
        return rewards


def unmarked(result: CallResult) -> str:
    """Return the text of an answer for a protocol that marks errors itself: without the mark in the text."""
    return result.text if result.status is CallStatus.OK else result.text.removeprefix(_MARK)


def _refusal(status: CallStatus, text: str) -> CallResult:
    return CallResult("", "", status, _MARK + text)


def _digest(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _is_well(done: asyncio.Future[Any]) -> bool:
    return not done.cancelled() and done.exception() is None


def _json_object(text: str | None, where: str) -> dict[str, Any]:
    expected = 'give a JSON object, such as \'{"TOOL": {"create_kwargs": {"budget": 7}}}\''
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} {text!r:.200}: no JSON ({error}); {expected}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{where} {text!r:.200}: expected an object, got {type(given).__name__}; {expected}")
    return given

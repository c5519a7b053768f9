"""Faults of a gateway, which `benchmarks.gateway --control` puts in to show that its counters see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

from aiohttp import web

from verl_multiturn.gateway import app, journal
from verl_multiturn.gateway.app import Gateway
from verl_multiturn.gateway.journal import SessionJournal
from verl_multiturn.gateway.known_sessions import KnownSessions
from verl_multiturn.gateway.sessions import SessionStore

_LATE_S = 0.3


def _unsynced() -> Any:
    """Leave out the fsync of the lines."""
    return patch.object(journal, "sync", lambda path: None)


def _early() -> Any:
    """Answer before a reward's line is written."""
    append = SessionJournal.append

    async def later(self: SessionJournal, line: Mapping[str, Any]) -> None:
        if line["event"] != "reward":
            return await append(self, line)
        asyncio.get_running_loop().call_later(_LATE_S, lambda: asyncio.ensure_future(append(self, line)))
        return None

    return patch.object(SessionJournal, "append", later)


def _two_ends() -> Any:
    """Write each end twice."""
    append = SessionJournal.append

    async def twice(self: SessionJournal, line: Mapping[str, Any]) -> None:
        await append(self, line)
        if line["event"] == "end":
            await append(self, line)

    return patch.object(SessionJournal, "append", twice)


def _counted_again() -> Any:
    """Answer that each reward counts, also one that came before."""
    reward = SessionStore.reward

    async def counts(self: SessionStore, *given: Any, **named: Any) -> bool:
        await reward(self, *given, **named)
        return True

    return patch.object(SessionStore, "reward", counts)


def _any_key() -> Any:
    """Let each key open the first session."""
    find = KnownSessions.find

    def finds(self: KnownSessions, key: str | None, session_id: str | None) -> Any:
        first = next(iter(self._index.sessions), None)
        return find(self, None, first) if key is not None and first is not None else find(self, key, session_id)

    return patch.object(KnownSessions, "find", finds)


def _other_status() -> Any:
    """Answer 500 where a request is refused."""

    async def answers(self: Gateway, request: web.BaseRequest, path: str) -> web.Response:
        found = await answer(self, request, path)
        return app._error(500, "fault", "an error") if found.status >= 400 else found

    answer = Gateway._answer
    return patch.object(Gateway, "_answer", answers)


FAULTS: Mapping[str, Callable[[], Any]] = {
    "unsynced": _unsynced,
    "early": _early,
    "two_ends": _two_ends,
    "counted_again": _counted_again,
    "any_key": _any_key,
    "other_status": _other_status,
}


def put_in(name: str | None) -> None:
    """Put a fault in for the rest of this process; None: none."""
    if name is not None:
        FAULTS[name]().start()

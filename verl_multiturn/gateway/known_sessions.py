"""`KnownSessions`: the sessions of a gateway's folder, its own and those of other gateways, as their lines have them.

Invariants:
- of rewards with ids one is looked up and written at a time, over all gateways of the folder;
- a line that this makes is later than those of its session before it, whatever the clock does;
- files that went away are noticed, and all is read anew in a thread: the event loop never reads a whole folder.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from verl_multiturn.describe import show
from verl_multiturn.proxy.protocols.requests import RefusedError
from verl_multiturn.records.read.files import SESSIONS
from verl_multiturn.records.read.sessions import LiveSession, SessionIndex
from verl_multiturn.records.write.locks import REWARDS_LOCK, is_held


class KnownSessions:
    """The sessions of a folder. They are used on one event loop.

    Args:
        folder: Folder of the records.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = SessionIndex(folder)
        self._numbers: Counter[str] = Counter()
        self._rebuilding: asyncio.Task[None] | None = None
        """Reads the index anew, since files were removed."""
        self._count(self._index.refresh())
        self._turns = asyncio.Lock()
        self._turns_file = (folder / REWARDS_LOCK).open("ab")

    @asynccontextmanager
    async def turn(self, id_: str | None) -> AsyncIterator[None]:
        """Wait for a reward's turn: of those with an id one is looked up and written at a time in the whole folder."""
        if id_ is None:
            yield
            return
        async with self._turns:
            waiting = asyncio.ensure_future(asyncio.to_thread(fcntl.flock, self._turns_file, fcntl.LOCK_EX))
            try:
                await asyncio.shield(waiting)
                yield
            finally:
                await asyncio.wait({waiting})
                fcntl.flock(self._turns_file, fcntl.LOCK_UN)

    def get(self, session_id: str) -> LiveSession | None:
        """Return a session by its id, as far as it was read; None: there is none."""
        return self._index.sessions.get(session_id)

    def now(self, session: LiveSession) -> LiveSession:
        """Return a session as it is by now."""
        return self.get(session.session_id) or session

    def find(self, key: str | None, session_id: str | None) -> LiveSession:
        """Return a session by its key, or by its id where the admin asks.

        Raises:
            RefusedError: There is none.
        """
        for look in range(2):
            found = self.get(session_id or "") if key is None else self._index.by_key(digest_of(key))
            if found is not None and found.file:
                return found
            if look == 0:
                self.refresh()
        if key is not None:
            raise RefusedError(401, "invalid_api_key", "this key opens no session; send the key of `start_session`")
        raise RefusedError(404, "unknown_session", f"session_id {show(session_id, 60)} is unknown; start it first")

    def is_elsewhere(self, session: LiveSession) -> bool:
        """Return whether the gateway that began a session runs, this one included."""
        return is_held(self._folder / f"{session.file}{SESSIONS}")

    def number(self, task: str) -> int:
        """Return how many sessions a task has had, and count another one."""
        self.refresh()
        self._numbers[task] += 1
        return self._numbers[task] - 1

    def line(self, event: str, session_id: str, **entries: Any) -> dict[str, Any]:
        """Return a line about a session, later than those before it, also where the clock was put back."""
        at, session = time.time(), self.get(session_id)
        if session is not None:
            last = max(session.began, session.ended or 0.0, *(reward.at for reward in session.rewards))
            at = max(at, math.nextafter(last, math.inf))
        return {"event": event, "at": at, "session_id": session_id, **entries}

    def read_on(self, path: Path) -> None:
        """Read the lines that this gateway has written to a file since."""
        self._count(self._index.read_on(path))

    def refresh(self) -> None:
        """Read the lines that all gateways have written since."""
        found = self._index.grow() if self._rebuilding is None else None
        if found is not None:
            self._count(found)
            return
        if self._rebuilding is None:  # in a thread: of a large folder it takes seconds
            self._rebuilding = asyncio.ensure_future(self._rebuild())
        for path in self._index.files:
            self.read_on(path)

    async def aclose(self) -> None:
        """Wait for the thread that reads the folder."""
        if self._rebuilding is not None:
            await asyncio.wait({self._rebuilding})

    def close(self) -> None:
        """Let go of the lock of rewards, when the last one was taken."""
        self._turns_file.close()

    async def _rebuild(self) -> None:
        """Forget the sessions of files that went away."""
        index = SessionIndex(self._folder)
        try:
            names = await asyncio.to_thread(index.refresh)
        finally:
            self._rebuilding = None
        self._index = index
        self._count(names)
        self.refresh()

    def _count(self, names: set[str]) -> None:
        """Note how many sessions each task has had."""
        for name in names:
            found = self.get(name)
            if found is not None and found.file and found.task is not None:
                self._numbers[found.task] = max(self._numbers[found.task], found.number + 1)


def digest_of(key: str) -> str:
    """Return the form in which a key is kept and compared."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()

"""`SessionStore`: the sessions of a gateway, open and ended, and their rewards.

    start ─▶ a session of the endpoint, and its line ─▶ end: its record on disk, then its line ─▶ rewards, at any time

Invariants:
- nothing is acknowledged before its line is on disk; what is refused is in no file;
- a reward with an id counts once for its session and target, also after a restart and over all gateways of the folder;
- a key reaches its own session alone, and is in no file: its digest is.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_multiturn.describe import describe, show
from verl_multiturn.gateway.journal import SessionJournal
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.agents.waiting import WaitingRunner
from verl_multiturn.proxy.endpoint import Endpoint
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.protocols.requests import RefusedError
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun
from verl_multiturn.records.read.files import SESSIONS
from verl_multiturn.records.read.sessions import DROPPED, LiveSession, SessionIndex
from verl_multiturn.records.write.locks import LOCK, hold
from verl_multiturn.records.write.recorder import Recorder
from verl_multiturn.records.write.records import RecordWriter
from verl_multiturn.records.write.run_file import new_start
from verl_multiturn.rollout.life import Life, live

logger = logging.getLogger(__name__)

_GATHER_S = 0.02
"""Seconds for which records of ended sessions are gathered: their clients wait for them."""
_LOOK_S = 1.0
"""How often sessions are looked at that may be idle for too long."""
_CORE_ID = re.compile(r"[0-9A-Za-z]*\Z")
"""The part of a completion's id that all protocols share."""


@dataclass(frozen=True)
class GatewaySettings:
    """Limits of a gateway."""

    rewards: tuple[float, float] = (0.0, 1.0)
    """The smallest and the largest reward."""
    idle_s: float = 3600.0
    """Seconds without a request after which a session ends."""
    longest_s: float = 7 * 86400.0
    """Seconds that a session may take."""
    most: int = 1000
    """The most sessions that are open at once."""
    share: float = 1.0
    max_gb: float | None = None
    retain_days: float | None = None
    redact: Sequence[str] = ()
    """Parts of records that are hidden, as `record_redact`."""


@dataclass(eq=False)
class _Open:
    """A session that has not ended."""

    life: Life
    address: SessionAddress | None = None
    over: asyncio.Event | None = None
    """Ends it."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = "closed"
    """Why it ends."""
    task: asyncio.Task[None] | None = None
    record: asyncio.Future[str] | None = None
    """The fate of its record: "" on disk, or why there is none."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class SessionStore:
    """The sessions of one gateway on a folder, where others may be, too. It is used on one event loop.

    Args:
        run: State that all sessions share.
        folder: Folder of the records.
        settings: Limits.
        server: Lets agents in.
        models: Returns the hashes of the weights that were deployed, in order.
        sampling: Sampling parameters of all generations.

    Raises:
        HeldError: Users are being forgotten there.
        OSError: A file cannot be created.
        ConfigError: A rule of `redact` is not a regular expression.
    """

    def __init__(
        self,
        run: ProxyRun,
        folder: Path,
        settings: GatewaySettings,
        server: ProxyServer,
        models: Callable[[], Sequence[str]],
        sampling: Mapping[str, Any],
    ) -> None:
        self._settings, self._server, self._models, self._sampling = settings, server, models, sampling
        folder.mkdir(parents=True, exist_ok=True)
        self._folder_lock = hold(folder / LOCK, alone=False)
        writer = RecordWriter(
            folder,
            new_start(),
            share=settings.share,
            max_gb=settings.max_gb,
            redact=settings.redact,
            gather_s=_GATHER_S,
        )
        self.recorder = Recorder(writer, self._kept)
        self._stem = writer.stem
        self._journal = SessionJournal(folder / f"{writer.stem}{SESSIONS}")
        self._index = SessionIndex(folder)
        self._numbers: Counter[str] = Counter()
        self._known: set[str] = set()
        self._open: dict[str, _Open] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._endpoint = Endpoint(run, WaitingRunner(self._begun), server, settings.longest_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._look: asyncio.Task[None] | None = None
        self._is_closing = False
        self.counts: Counter[str] = Counter()
        """How often each thing happened since the start: `sessions`, `rewards`, `repeats`, `ends`."""
        self._refresh()

    @property
    def running(self) -> int:
        """Return the number of open sessions."""
        return len(self._open)

    def is_listening(self) -> None:
        """Note that the gateway has started the server, so that the first session does not."""
        self._endpoint.is_listening()

    async def start(self, task: str, user: str | None, row: Mapping[str, Any]) -> SessionAddress:
        """Begin a session.

        Raises:
            RefusedError: There are too many, or the gateway closes.
            OSError: Its line cannot be written.
        """
        if self._is_closing:
            raise RefusedError(503, "closing", "the gateway is closing; start the session after its restart")
        if len(self._open) >= self._settings.most:
            raise RefusedError(
                429, "too_many_sessions", f"{len(self._open)} sessions are open, the most here; end one, or try later"
            )
        self._loop = asyncio.get_running_loop()
        if self._look is None:
            self._look = self._loop.create_task(self._end_idle())
        name = f"s-{secrets.token_hex(12)}"
        life = Life(id=name, group=task, number=self._numbers[task], loop="gateway", row=row, task=task, user=user)
        self._numbers[task] += 1
        self._known.add(name)
        session = self._open[name] = _Open(life)
        session.task = self._loop.create_task(self._live(session))
        begun = asyncio.ensure_future(session.begun.wait())
        await asyncio.wait({begun, session.task}, return_when=asyncio.FIRST_COMPLETED)
        if session.address is None:
            begun.cancel()
            self._open.pop(name, None)
            raise RefusedError(400, "no_session", f"the session cannot begin: {show(life.error, 300)}; change the row")
        line = {"event": "start", "at": time.time(), "session_id": name, "task_id": task, "user": user}
        digest = digest_of(session.address.api_key)
        try:
            await self._journal.append({**line, "number": life.number, "key": digest})
        except OSError:
            self._open.pop(name, None)
            assert session.over is not None
            session.over.set()
            raise
        self.counts["sessions"] += 1
        return session.address

    def find(self, key: str | None, session_id: str | None) -> LiveSession:
        """Return a session by its key, or by its id where the admin asks.

        Raises:
            RefusedError: There is none.
        """
        for look in range(2):
            if key is not None:
                found = self._index.by_key(digest_of(key))
            else:
                found = self._index.sessions.get(session_id or "")
            if found is not None and found.file:
                return found
            if look == 0:
                self._refresh()
        if key is not None:
            raise RefusedError(401, "invalid_api_key", "this key opens no session; send the key of `start_session`")
        raise RefusedError(404, "unknown_session", f"session_id {show(session_id, 60)} is unknown; start it first")

    async def reward(
        self, session: LiveSession, value: float, interaction: str | None, id_: str | None, whole: bool
    ) -> bool:
        """Take a reward, and return whether it counts: one that came before under its id does not.

        Args:
            session: The session.
            value: The reward.
            interaction: Id of the completion that earned it; None: the last one, or with `whole` the session.
            id_: Name under which it counts once; None: it replaces the one before.
            whole: Whether a reward without `interaction` is the whole session's.

        Raises:
            RefusedError: It cannot be taken.
            OSError: Its line cannot be written.
        """
        low, high = self._settings.rewards
        if not low <= value <= high:
            raise RefusedError(422, "reward_out_of_range", f"reward is {value!r}, expected {low:g} to {high:g}")
        async with self._locks.setdefault(session.session_id, asyncio.Lock()):
            self._refresh()
            session = self._index.sessions.get(session.session_id, session)
            generation = None if whole and interaction is None else self._generation(session, interaction)
            if id_ is not None:
                for former in sorted(session.rewards):
                    if former.id == id_ and former.generation == generation:
                        if former.reward != value:
                            raise RefusedError(
                                409, "id_taken", f"id {show(id_, 60)} has the reward {former.reward:g}; use another id"
                            )
                        self.counts["repeats"] += 1
                        return False
            line = {"event": "reward", "at": time.time(), "session_id": session.session_id, "generation": generation}
            await self._journal.append({**line, "reward": value, "id": id_})
            self.counts["rewards"] += 1
            self._refresh()
        return True

    async def end(self, session: LiveSession, why: str = "ended") -> LiveSession:
        """End a session, and return it once its record is on disk; one that has ended is returned as it is.

        Raises:
            RefusedError: Another gateway has it.
            OSError: Its line cannot be written; a repeat tries again.
        """
        opened = self._open.get(session.session_id)
        if opened is None:
            self._refresh()
            session = self._index.sessions.get(session.session_id, session)
            if session.ended is None and session.file != self._stem:
                raise RefusedError(409, "not_here", "the session is not open here; ask the gateway that began it")
            return session
        async with opened.lock:
            if session.session_id in self._open:
                await self._end(opened, why)
        return self._index.sessions.get(session.session_id, session)

    async def aclose(self) -> None:
        """End all sessions as `closed`, with their records, and let go of the folder."""
        self._is_closing = True
        if self._look is not None:
            self._look.cancel()
        ends = [self.end(self.find(None, name), "closed") for name in list(self._open)]
        for result in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(result, BaseException):
                logger.error("a session was not ended: %s", describe(result))
        await self._endpoint.aclose()
        await self.recorder.aclose()
        await self._journal.aclose()
        self._folder_lock.close()

    async def _end(self, opened: _Open, why: str) -> None:
        assert opened.over is not None
        assert opened.task is not None
        opened.over.set()
        await asyncio.wait({opened.task})
        assert opened.record is not None
        fault = await opened.record
        turns = () if opened.life.outcome is None else opened.life.outcome.turns
        line = {"event": "end", "at": time.time(), "session_id": opened.life.id, "why": why}
        completions = [turn.completion or "" for turn in turns]
        await self._journal.append({**line, "completions": completions, "why": f"{DROPPED}{fault}" if fault else why})
        self.counts["ends"] += 1
        self._open.pop(opened.life.id, None)
        self._refresh()

    async def _live(self, opened: _Open) -> None:
        """Let a session live until it is ended."""
        life = opened.life
        opened.record = asyncio.get_running_loop().create_future()
        try:
            with live(life, self.recorder):
                outcome, receipts = await self._endpoint.run(life.id, life.row, self._sampling)
                life.model = list(self._models())
                life.complete(outcome, receipts, life.row, self._sampling, None, False)
        except Exception as error:
            logger.error("session %s failed: %s", life.id, describe(error))
        if life.generations is None and not opened.record.done():
            opened.record.set_result(life.error or life.status)

    def _begun(self, address: SessionAddress, over: asyncio.Event) -> None:
        opened = self._open[address.id]
        opened.address, opened.over = address, over
        opened.begun.set()

    def _kept(self, life: Life, fault: str) -> None:
        """Take the fate of a record, in the writer's thread."""

        def take() -> None:
            opened = self._open.get(life.id)
            if opened is not None and opened.record is not None and not opened.record.done():
                opened.record.set_result(fault)

        assert self._loop is not None
        self._loop.call_soon_threadsafe(take)

    def _generation(self, session: LiveSession, interaction: str | None) -> int:
        """Return the number of the generation of a completion; without an id, of the last one.

        Raises:
            RefusedError: There is none.
        """
        opened = self._open.get(session.session_id)
        agent = None if opened is None or opened.address is None else self._server.session_of(opened.address.api_key)
        if agent is not None:
            numbers = {node.completion.id: node.number for node in agent.forest.delivered}
        elif opened is not None and opened.life.outcome is not None:  # it is over, and its end is not written yet
            numbers = {turn.completion: turn.number for turn in opened.life.outcome.turns if turn.completion}
        else:
            numbers = {each: number for number, each in enumerate(session.completions) if each}
        if not numbers:
            raise RefusedError(409, "no_completion", "the session has no completion yet; reward it after the first one")
        if interaction is None:
            return max(numbers.values())
        found = _CORE_ID.search(interaction)
        if found is None or found[0] not in numbers:
            raise RefusedError(
                404,
                "unknown_interaction",
                f"interaction_id {show(interaction, 60)} is no completion of the session; send the `id` of an answer",
            )
        return numbers[found[0]]

    def _refresh(self) -> None:
        for name in self._index.refresh() - self._known:
            found = self._index.sessions.get(name)
            if found is not None and found.file and found.task is not None:
                self._known.add(name)
                self._numbers[found.task] += 1

    async def _end_idle(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_S, self._settings.idle_s))
            for name, opened in list(self._open.items()):
                if opened.address is None or self._server.idle_s(opened.address.api_key) <= self._settings.idle_s:
                    continue
                try:
                    await self.end(self.find(None, name), "idle")
                except (OSError, RefusedError) as error:  # it is tried again
                    logger.warning("idle session %s is not ended: %s", name, describe(error))


def digest_of(key: str) -> str:
    """Return the form in which a key is kept and compared."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()

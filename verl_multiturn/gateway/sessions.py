"""`SessionStore`: the sessions of a gateway, open and ended, and their rewards.

    start ─▶ a session of the endpoint, and its line ─▶ end: its record on disk, then its line ─▶ rewards, at any time

Invariants:
- nothing is acknowledged before its line is on disk; what is refused is in no file;
- a session whose record the disk does not take stays in memory, and can be ended again; it counts as open;
- a reward with an id counts once for its session and target, also after a restart and over all gateways of the folder;
- a key reaches its own session alone, and is in no file: its digest is.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from verl_multiturn.describe import describe, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.gateway.files import GatewayFiles, GatewaySettings, SessionFiles
from verl_multiturn.gateway.known_sessions import KnownSessions, digest_of
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.agents.waiting import WaitingRunner
from verl_multiturn.proxy.endpoint import Endpoint
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.protocols.requests import RefusedError
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun
from verl_multiturn.records.read.sessions import DROPPED, LiveSession, RewardLine
from verl_multiturn.records.write.redaction import Redaction
from verl_multiturn.records.write.share import NO_SHARE
from verl_multiturn.rollout.life import Life, live

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
"""How often sessions are looked at that may be idle for too long."""
_AGAIN_S = 10.0
"""Seconds after which sessions are ended again by the gateway itself whose records or lines the disk did not take."""
_AT_ONCE = 256
"""So many sessions are ended at once: further ones would wait for the writer of records."""
_CORE_ID = re.compile(r"[0-9A-Za-z]*\Z")
"""The part of a completion's id that all protocols share."""
_NEEDED = frozenset(("session", "task", "user"))
"""Entries of a record that no rule may hide."""


@dataclass(eq=False)
class _Open:
    """A session whose end is not written."""

    life: Life
    files: SessionFiles
    address: SessionAddress | None = None
    over: asyncio.Event | None = None
    """Ends it."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""
    """Why it ends; "" before."""
    task: asyncio.Task[None] | None = None
    """Lets it live."""
    record: asyncio.Future[str | OSError] | None = None
    """The fate of its record, as `records.Kept` has it; None: it is to be handed over again."""
    ending: asyncio.Task[None] | None = None
    """Writes its end."""


class SessionStore:
    """The sessions of one gateway on a folder, where others may be, too. It is used on one event loop.

    Args:
        run: State that all sessions share.
        folder: Folder of the records.
        settings: Limits.
        server: Lets agents in.
        models: Returns the hashes of the weights that were deployed, in order.
        about: What is known of the model, for the run's file, as `run_file.gateway_run` has it.
        sampling: Sampling parameters of all generations.

    Raises:
        HeldError: Users are being forgotten there.
        OSError: A file cannot be created.
        ConfigError: A rule of `redact` is not a regular expression, or `about` has an unknown entry.
    """

    def __init__(
        self,
        run: ProxyRun,
        folder: Path,
        settings: GatewaySettings,
        server: ProxyServer,
        models: Callable[[], Sequence[str]],
        about: Mapping[str, Any],
        sampling: Mapping[str, Any],
    ) -> None:
        self._settings, self._server, self._models, self._sampling = settings, server, models, sampling
        self._redaction = Redaction(settings.redact)
        if hidden := sorted(self._redaction.names & _NEEDED):
            raise ConfigError(
                f"--redact {hidden[0]!r} would hide names by which sessions are found, forgotten and learned from; "
                "send names that say nothing, and leave the rule out"
            )
        self._files = GatewayFiles(folder, settings, about, self._kept, run.reader.decode)
        self.known = KnownSessions(folder)
        self._open: dict[str, _Open] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        run = replace(run, outlives_engine=True)
        self._endpoint = Endpoint(run, WaitingRunner(self._begun), server, settings.longest_s)
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._care: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self.counts: Counter[str] = Counter()
        """How often each thing happened since the start: `sessions`, `rewards`, `repeats`, `ends`, and `dropped`, ends
        without a record that was to be kept."""

    @property
    def running(self) -> int:
        """Return the number of open sessions."""
        return len(self._open)

    def is_listening(self) -> None:
        """Note that the gateway has started the server, so that the first session does not."""
        self._endpoint.is_listening()
        self._loop = asyncio.get_running_loop()
        self._care = self._loop.create_task(self._take_care())

    async def start(self, task: str, user: str | None, row: Mapping[str, Any]) -> SessionAddress:
        """Begin a session.

        Raises:
            RefusedError: There are too many, or the gateway closes.
            OSError: Its line cannot be written.
        """
        if self._closing.is_set():
            raise RefusedError(503, "closing", "the gateway is closing; start the session after its restart")
        if len(self._open) >= self._settings.most:
            raise RefusedError(
                429, "too_many_sessions", f"{len(self._open)} sessions are open, the most here; end one, or try later"
            )
        self._check_names(task_id=task, user=user)
        name, number = f"s-{secrets.token_hex(12)}", self.known.number(task)
        life = Life(id=name, group=task, number=number, loop="gateway", row=row, task=task, user=user)
        opened = self._open[name] = _Open(life, self._files.current)
        opened.files.open.add(name)
        opened.files.is_used = True
        # A client that leaves meanwhile must not leave half a session.
        return await asyncio.shield(asyncio.ensure_future(self._start(opened)))

    async def _start(self, opened: _Open) -> SessionAddress:
        assert self._loop is not None
        life = opened.life
        opened.task = self._loop.create_task(self._live(opened))
        begun = asyncio.ensure_future(opened.begun.wait())
        await asyncio.wait({begun, opened.task}, return_when=asyncio.FIRST_COMPLETED)
        if opened.address is None:
            begun.cancel()
            self._let_go(opened)
            raise RefusedError(400, "no_session", f"the session cannot begin: {show(life.error, 300)}; change the row")
        about = {"task_id": life.task, "user": life.user, "number": life.number}
        line = self.known.line("start", life.id, **about, key=digest_of(opened.address.api_key))
        try:
            await opened.files.journal.append(line)
        except OSError:
            opened.address = None  # nobody knows it
            opened.task.cancel()
            await asyncio.wait({opened.task})
            self._let_go(opened)
            raise
        self.known.read_on(opened.files.path)
        self.counts["sessions"] += 1
        return opened.address

    def refusal(self, key: str) -> RefusedError | None:
        """Return why a key opens no session at the endpoint; None: it is unknown."""
        try:
            session = self.known.find(key, None)
        except RefusedError:
            return None
        if session.ended is not None or session.session_id in self._open:
            return RefusedError(410, "session_over", "the session of this key has ended; start another one")
        return self._away(session)

    async def reward(
        self, session: LiveSession, value: float, interaction: str | None, id_: str | None, whole: bool
    ) -> bool:
        """Take a reward, and return whether it counts: one that came before under its id does not.

        Args:
            session: The session.
            value: The reward.
            interaction: Id of the completion that earned it; None: the last one, or with `whole` the session. An id
                stays with the one that was the last when it first came.
            id_: Name under which it counts once; None: it replaces the one before.
            whole: Whether a reward without `interaction` is the whole session's.

        Raises:
            RefusedError: It cannot be taken.
            OSError: Its line cannot be written.
        """
        self._check_names(id=id_)
        low, high = self._settings.rewards
        if not low <= value <= high:
            raise RefusedError(422, "reward_out_of_range", f"reward is {value!r}, expected {low:g} to {high:g}")
        lock = self._locks.setdefault(session.session_id, asyncio.Lock())
        async with lock, self.known.turn(id_):
            self.known.refresh()
            session = self.known.now(session)
            if session.ended is None and session.session_id not in self._open:
                raise self._away(session)
            generation = None if whole and interaction is None else self._generation(session, interaction)
            first = self._first(session, id_, generation, is_last=interaction is None and not whole)
            if first is not None:
                self._check_taken(first, value)
                return False
            files = self._files.of(session.file) or self._files.current
            files.is_used = True
            line = self.known.line("reward", session.session_id, generation=generation, reward=value, id=id_)
            await files.journal.append(line)
            self.known.refresh()
        self.counts["rewards"] += 1
        return True

    def _check_names(self, **names: str | None) -> None:
        """Refuse names that a rule would hide: they are in lines by which sessions are found.

        Raises:
            RefusedError: A rule hits one.
        """
        for entry, name in names.items():
            if name is not None and self._redaction.hits(name):
                raise RefusedError(400, "redacted", f"a rule of --redact hits {entry}; send a name that says nothing")

    async def end(self, session: LiveSession, why: str = "ended") -> LiveSession:
        """End a session, and return it once its record is on disk; one that has ended is returned as it is.

        Raises:
            RefusedError: Another gateway has it, or none.
            OSError: Its record or its line cannot be written; a repeat tries again.
        """
        opened = self._open.get(session.session_id)
        if opened is not None:
            await self._end(opened, why)
        else:
            self.known.refresh()
        session = self.known.now(session)
        if session.ended is None:
            raise self._away(session)
        return session

    async def aclose(self) -> None:
        """End all sessions as `closed`, with their records, and let go of the folder."""
        self._closing.set()
        if self._care is not None:
            await asyncio.wait({self._care})
        await self.known.aclose()
        await self._end_all([opened for opened in self._open.values() if opened.address is not None], "closed")
        for opened in self._open.values():
            logger.error("session %s is lost: the disk did not take its record or its end", opened.life.id)
        await self._endpoint.aclose()
        await self._files.aclose()
        self.known.close()

    async def _end(self, opened: _Open, why: str) -> None:
        """End a session; calls at the same time share its end, and a client that leaves changes nothing."""
        if opened.ending is None or opened.ending.done():
            opened.why = opened.why or why
            opened.ending = asyncio.ensure_future(self._write_end(opened))
        await asyncio.shield(opened.ending)

    async def _write_end(self, opened: _Open) -> None:
        life = opened.life
        if life.id not in self._open:
            return
        assert opened.over is not None
        assert opened.task is not None
        async with self._at_once:
            opened.over.set()
            await asyncio.wait({opened.task})
            if opened.record is None:
                opened.record = asyncio.get_running_loop().create_future()
                opened.files.recorder.keep(life)
            fate = await opened.record
            if isinstance(fate, OSError):
                opened.record = None
                raise fate
            turns = () if life.outcome is None else life.outcome.turns
            completions = [turn.completion or "" for turn in turns]
            why = f"{DROPPED}{fate}" if fate else opened.why
            await opened.files.journal.append(self.known.line("end", life.id, why=why, completions=completions))
        self.counts["ends"] += 1
        self.counts["dropped"] += fate not in ("", NO_SHARE)
        self._let_go(opened)
        self.known.read_on(opened.files.path)

    def _let_go(self, opened: _Open) -> None:
        self._open.pop(opened.life.id, None)
        opened.files.open.discard(opened.life.id)

    async def _live(self, opened: _Open) -> None:
        """Let a session live until it is ended."""
        life = opened.life
        opened.record = asyncio.get_running_loop().create_future()
        try:
            with live(life, opened.files.recorder):
                outcome, receipts = await self._endpoint.run(life.id, life.row, self._sampling)
                life.model = list(self._models())
                life.complete(outcome, receipts, life.row, self._sampling, None, False)
        except Exception as error:  # a mistake of ours: the session ends without a record, and its end says why
            logger.error("session %s failed: %s", life.id, describe(error))
        if life.generations is None and not opened.record.done():
            opened.record.set_result(life.error or life.status)

    def _begun(self, address: SessionAddress, over: asyncio.Event) -> None:
        opened = self._open[address.id]
        opened.address, opened.over = address, over
        opened.begun.set()

    def _kept(self, life: Life, fate: str | OSError) -> None:
        """Take the fate of a record, in the writer's thread."""

        def take() -> None:
            opened = self._open.get(life.id)
            if opened is not None and opened.record is not None and not opened.record.done():
                opened.record.set_result(fate)

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

    def _first(self, session: LiveSession, id_: str | None, generation: int | None, is_last: bool) -> RewardLine | None:
        """Return the reward that counts under an id and for a target; None: there is none.

        Args:
            session: The session.
            id_: The id; None: the reward has none.
            generation: The target; None: the whole session.
            is_last: Whether the client named no completion. A repeat then stands for the one that was the last when
                the id first came, though another may be the last by now.
        """
        if id_ is None:
            return None
        of_id = (each for each in sorted(session.rewards, key=lambda line: line[:3]) if each.id == id_)
        return next(
            (each for each in of_id if each.generation == generation or (is_last and each.generation is not None)), None
        )

    def _check_taken(self, first: RewardLine, value: float) -> None:
        """Count a reward that came before under its id.

        Raises:
            RefusedError: Another one did.
        """
        if first.reward != value:
            raise RefusedError(
                409, "id_taken", f"id {show(first.id, 60)} has the reward {first.reward:g}; use another id"
            )
        self.counts["repeats"] += 1

    def _away(self, session: LiveSession) -> RefusedError:
        """Return the refusal of a session that has not ended, and is not open here."""
        if self._files.of(session.file) is None and self.known.is_elsewhere(session):
            return RefusedError(409, "not_here", "the session is open at another gateway of the folder; ask that one")
        return RefusedError(
            410, "session_lost", "the session was lost in a restart of its gateway, before it had ended; start another"
        )

    async def _take_care(self) -> None:
        """End sessions that are idle or late, begin new files, and remove old ones, until the gateway closes."""
        pause_s = 0.0
        while not await self._is_closing_in(max(pause_s, min(_LOOK_S, self._settings.idle_s))):
            pause_s = 0.0
            try:
                for why, sessions in (await self._due()).items():
                    if not await self._end_all(sessions, why):
                        pause_s = _AGAIN_S
                await self._files.renew()
                if await self._files.clean():
                    self.known.refresh()
            except Exception as error:  # a full disk, or a mistake of ours, must not end the care for good
                logger.error("the gateway cannot take care of its files: %s", describe(error))
                pause_s = _AGAIN_S

    async def _is_closing_in(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
        return self._closing.is_set()

    async def _due(self) -> dict[str, list[_Open]]:
        """Return the sessions that are to be ended, by the cause."""
        found: dict[str, list[_Open]] = {"idle": [], "late": []}
        for number, opened in enumerate(list(self._open.values())):
            if number % 500 == 499:
                await asyncio.sleep(0)
            if opened.address is None or opened.task is None:
                continue
            if opened.task.done():  # its time was up, or the disk did not take its end
                found["late"].append(opened)
            elif self._server.idle_s(opened.address.api_key) > self._settings.idle_s:
                found["idle"].append(opened)
        return found

    async def _end_all(self, sessions: Sequence[_Open], why: str) -> bool:
        """End sessions, and return whether the disk took all of them."""
        failed: list[BaseException] = []
        for first in range(0, len(sessions), 2 * _AT_ONCE):
            some = sessions[first : first + 2 * _AT_ONCE]
            results = await asyncio.gather(*(self._end(opened, why) for opened in some), return_exceptions=True)
            failed += [result for result in results if isinstance(result, BaseException)]
        if failed:
            logger.warning("%d sessions are not ended, and will be: %s", len(failed), describe(failed[0]))
        return not failed

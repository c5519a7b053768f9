"""`GatewayFiles`: the files of a gateway's start, begun anew from time to time, so that old ones can be removed whole.

    current     takes new sessions, and rewards of sessions whose files are closed
    draining    their last sessions are open: these end there, and are rewarded there
    closed      joined, and removed when they are old

Invariants:
- start, record and end of a session are in files of one stem, whatever is begun anew meanwhile;
- a gateway holds the lock of each file of sessions that it writes, and lets go of it once the last one has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_multiturn.describe import describe
from verl_multiturn.gateway.journal import SessionJournal
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.read.files import SESSIONS, STEPS
from verl_multiturn.records.write.line_file import append_lines, sync
from verl_multiturn.records.write.locks import LOCK, hold
from verl_multiturn.records.write.old_files import remove_old
from verl_multiturn.records.write.recorder import Recorder
from verl_multiturn.records.write.records import RecordWriter
from verl_multiturn.records.write.redaction import Decode
from verl_multiturn.records.write.run_file import gateway_run, later_start, path_of, write_whole
from verl_multiturn.records.write.session_joins import join_sessions
from verl_multiturn.rollout.life import Life

logger = logging.getLogger(__name__)

_GATHER_S = 0.02
"""Seconds for which records of ended sessions are gathered: their clients wait for them."""
_CLEAN_S = 3600.0
"""Seconds between two looks for old files."""
_DAY_S = 86400.0


@dataclass(frozen=True)
class GatewaySettings:
    """Limits of a gateway."""

    rewards: tuple[float, float] = (0.0, 1.0)
    """The smallest and the largest reward."""
    idle_s: float = 3600.0
    """Seconds without a request after which a session ends."""
    longest_s: float = 7 * _DAY_S
    """Seconds that a session may take."""
    most: int = 1000
    """The most sessions that are open at once, those whose record the disk has not taken yet among them."""
    share: float = 1.0
    """Share of the tasks whose records are kept."""
    max_gb: float | None = None
    """The most GB of records in the folder; sessions that end beyond it have no record, and their ends name that. None:
    no limit."""
    redact: Sequence[str] = ()
    """Parts of records that are hidden, as `record_redact`. Of a session whose token ids show them counts are kept
    alone."""
    retain_days: float | None = None
    """Days for which a session is kept after its end or its last reward, and up to `rotate_h` more; None: for ever."""
    rotate_h: float = 24.0
    """Hours after which new files are begun, and with `retain_days` a quarter of these at most."""
    rotate_mb: float = 512.0
    """MB of records after which new files are begun."""

    @property
    def rotate_s(self) -> float:
        """Return the seconds after which new files are begun."""
        days = self.rotate_h / 24 if self.retain_days is None else min(self.rotate_h / 24, self.retain_days / 4)
        return days * _DAY_S


class SessionFiles:
    """The files of one stem. They are used on one event loop.

    Args:
        folder: Folder of the records.
        start: The gateway's start.
        settings: Limits.
        kept: Takes a session and the fate of its record, in the writer's thread.
        decode: Returns the text of token ids.

    Raises:
        OSError: A file cannot be created.
        ConfigError: A rule of `redact` is not a regular expression.
    """

    def __init__(
        self,
        folder: Path,
        start: str,
        settings: GatewaySettings,
        kept: Callable[[Life, str | OSError], None],
        decode: Decode,
    ) -> None:
        writer = RecordWriter(
            folder,
            start,
            share=settings.share,
            max_gb=settings.max_gb,
            redact=settings.redact,
            gather_s=_GATHER_S,
            decode=decode,
        )
        self.stem, self.recorder = writer.stem, Recorder(writer, kept)
        self.path = folder / f"{writer.stem}{SESSIONS}"
        try:
            self.journal = SessionJournal(self.path)
        except BaseException:  # the next try has another stem
            writer.remove()
            self.path.unlink(missing_ok=True)
            raise
        self.open: set[str] = set()
        """Ids of its sessions that have not ended."""
        self.is_used = False
        """Whether a session began in them."""
        self.began = time.monotonic()

    async def aclose(self) -> None:
        """Write what was handed over, and let go of the files."""
        await self.recorder.aclose()
        await self.journal.aclose()


class GatewayFiles:
    """The files of one gateway on a folder, where others may be, too. They are used on one event loop.

    Args:
        folder: Folder of the records; it is created where it does not exist.
        settings: Limits.
        about: What is known of the model, for the run's file, as `run_file.gateway_run` has it.
        kept: Takes a session and the fate of its record, in the writer's thread.
        decode: Returns the text of token ids.

    Raises:
        HeldError: Users are being forgotten there.
        OSError: A file cannot be created.
        ConfigError: A rule of `redact` is not a regular expression, or `about` has an unknown entry.
    """

    def __init__(
        self,
        folder: Path,
        settings: GatewaySettings,
        about: Mapping[str, Any],
        kept: Callable[[Life, str | OSError], None],
        decode: Decode,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._settings, self._kept, self._decode = folder, settings, kept, decode
        self._began, self._since = time.time(), time.monotonic()
        self.start = later_start(folder, self._began)
        run = gateway_run(self.start, self._began, about, asdict(settings))
        self._lock = hold(folder / LOCK, alone=False)
        try:
            write_whole(path_of(folder, self.start), line_of(run).decode())
            sync(path_of(folder, self.start))
            self.current = self._new()
        except BaseException:  # whatever it is, the folder is let go of
            self._lock.close()
            raise
        self._draining: dict[str, SessionFiles] = {}
        self._cleaned = float("-inf")
        self._has_closed = False
        """Whether files were closed that no join has."""

    def of(self, stem: str) -> SessionFiles | None:
        """Return the files of a stem that are written here; None: they are not."""
        return self.current if stem == self.current.stem else self._draining.get(stem)

    async def renew(self) -> None:
        """Begin new files where it is time, and close those whose last session has ended.

        Raises:
            OSError: New files cannot be created; the old ones go on.
        """
        current, limits = self.current, self._settings
        is_due = time.monotonic() - current.began >= limits.rotate_s
        if current.is_used and (is_due or current.recorder.writer.size >= limits.rotate_mb * 1e6):
            self.current = self._new()
            self._draining[current.stem] = current
        for stem, files in list(self._draining.items()):
            if not files.open:
                del self._draining[stem]
                self._has_closed = True
                await files.aclose()

    async def clean(self) -> bool:
        """Join the sessions of closed files, and remove old ones, in a thread; return whether any was removed."""
        is_due = time.monotonic() - self._cleaned >= min(_CLEAN_S, self._settings.rotate_s)
        if not self._has_closed and (self._settings.retain_days is None or not is_due):
            return False
        self._cleaned = time.monotonic()
        is_new, self._has_closed = self._has_closed, False
        return await asyncio.to_thread(self._clean, is_new)

    async def aclose(self) -> None:
        """Write what was handed over, and let go of the folder."""
        closing = [*self._draining.values(), self.current]
        error = ""
        for result in await asyncio.gather(*(files.aclose() for files in closing), return_exceptions=True):
            if isinstance(result, BaseException):
                error = error or f"files of sessions were not closed: {describe(result)}"
                logger.error("files of sessions were not closed: %s", describe(result))
        try:
            await asyncio.to_thread(self._join)
        finally:
            await asyncio.to_thread(self._write_end, error)
            self._lock.close()

    def _new(self) -> SessionFiles:
        return SessionFiles(self._folder, self.start, self._settings, self._kept, self._decode)

    def _clean(self, is_new: bool) -> bool:
        if is_new:
            self._join()
        if self._settings.retain_days is None:
            return False
        # A clock that jumps ahead while the gateway runs must not make everything old.
        now = min(time.time(), self._began + time.monotonic() - self._since)
        try:
            removed = remove_old(self._folder, now - self._settings.retain_days * _DAY_S)
        except OSError as error:  # the next look goes on, and the index sees what is gone
            logger.warning("old files of sessions are not removed: %s", describe(error))
            return True
        if removed.files:
            logger.info("%d sessions were older than %g days", len(removed.sessions), self._settings.retain_days)
        return bool(removed.files)

    def _join(self) -> None:
        try:
            join_sessions(self._folder, self.start)
        except OSError as error:  # the lines have all that the join would have
            logger.warning("the join of the sessions is not written: %s", describe(error))

    def _write_end(self, error: str) -> None:
        """Write that the start is over, and why it did not end well; one that is killed has no such line."""
        end = {"event": "end", "start": self.start, "at": time.time(), "error": error}
        try:
            append_lines(self._folder / STEPS, line_of(end))
        except OSError as error:
            logger.warning("the end of the gateway is not written: %s", describe(error))

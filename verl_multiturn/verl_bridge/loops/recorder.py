"""`Recorder`: hands the conversations of one process over to the writer of their records.

A record is handed over when the conversation's rows are stored, so that its timeline has the reward and the storing.
Every 2 s the writer gets the waits of the conversations that run, less often where thousands run.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from functools import partial
from typing import Any

from verl_multiturn.config import MultiTurnSettings
from verl_multiturn.describe import describe
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.records.write.records import RecordWriter
from verl_multiturn.records.write.run_file import new_start
from verl_multiturn.rollout.life import Life

logger = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds from one look at the conversations that run to the next."""
_LOOK_SHARE = 0.01
"""Largest share of the time that these looks may take; with thousands of conversations they come less often."""


class Recorder:
    """The recorder of one process.

    Args:
        writer: Writes the records and lines.
    """

    def __init__(self, writer: RecordWriter) -> None:
        self.writer = writer
        self._open: dict[Life, None] = {}
        self._told = 0
        """Dropped records that were reported."""
        self._look: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    name = "records"
    """Name of this object in the log, when it is closed."""

    async def aclose(self) -> None:
        """Write the records that were handed over, and stop."""
        await self.writer.aclose()

    def begun(self, life: Life) -> None:
        """Write that a conversation begins."""
        self.writer.begin({**_line(life), "at": life.began})
        self._open[life] = None
        loop = asyncio.get_running_loop()
        if self._look is None or self._loop is not loop:
            self._loop, self._look = loop, loop.call_later(LOOK_S, self._looks)

    def over(self, life: Life) -> None:
        """Hand over the record of a conversation that ended, and write how it ended."""
        self._open.pop(life, None)
        line, make, is_whole = _line(life), partial(record_of, life), life.generations is not None
        if is_whole:
            self.writer.keep(make, {**line, "at": life.ended})
        if life.status == "error":
            self.writer.raised({**line, "why": life.error})
        elif life.status in ("cancelled", "cut"):
            self.writer.cancel({**line, "why": life.status}, None if is_whole else make)
        elif life.score is not None:
            self.writer.scored({**line, "score": life.score})

    def take_dropped(self) -> int:
        """Return how many records could not be kept since the last call."""
        told, self._told = self._told, self.writer.dropped
        return self._told - told

    def _looks(self) -> None:
        began = time.thread_time()
        self.writer.snapshot([_shown(life) for life in self._open])
        pause_s = max(LOOK_S, (time.thread_time() - began) / _LOOK_SHARE)
        self._look = asyncio.get_running_loop().call_later(pause_s, self._looks) if self._open else None


def _line(life: Life) -> dict[str, Any]:
    return {
        "request_id": life.id,
        "uid": life.group,
        "number": life.number,
        "validation": life.validation,
        "step": life.step,
        "rerolled_from": life.rerolled_from,
    }


def _shown(life: Life) -> dict[str, Any]:
    """Return a `schema.Open`. A conversation that waits for nothing known is with our loop, or with its agent."""
    timeline = life.timeline
    assert timeline is not None, "the timeline of a conversation with a listener is kept"
    doing, since = timeline.doing() or ("loop", timeline.spans[-1].end if timeline.spans else life.began)
    shown = {name: value for name, value in _line(life).items() if name != "rerolled_from"}
    return {**shown, "began": life.began, "doing": doing, "since": since, "turn": timeline.turns}


def recorder_of(settings: MultiTurnSettings) -> Recorder | None:
    """Return the recorder of this process; None where a run keeps no records, or where its files cannot be created.

    The start-up check has looked at the folder; a worker that starts later may find the disk full.

    Raises:
        ConfigError: `record_redact` has an entry that is not a regular expression.
    """
    if settings.record_dir is None:
        return None
    return _recorder(
        settings.record_dir,
        settings.derived.record_start,
        settings.record_share,
        settings.record_max_gb,
        settings.record_redact,
    )


@functools.cache
def _recorder(
    folder: str, start: str | None, share: float, max_gb: float | None, redact: tuple[str, ...]
) -> Recorder | None:
    try:
        return Recorder(RecordWriter(folder, start or new_start(), share=share, max_gb=max_gb, redact=redact))
    except OSError as error:
        logger.error("this process keeps no records: %s; the run goes on", describe(error))
        return None

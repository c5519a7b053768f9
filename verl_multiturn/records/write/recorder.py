"""`Recorder`: hands the conversations of one process over to the writer of their records.

A record is handed over when the conversation's rows are stored, so that its timeline has the reward and the storing.
Every 2 s the writer gets the waits of the conversations that run, less often where thousands run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from verl_multiturn.records.write.encode import record_of
from verl_multiturn.records.write.records import RecordWriter
from verl_multiturn.rollout.life import Life

LOOK_S = 2.0
"""Seconds from one look at the conversations that run to the next."""
_LOOK_SHARE = 0.01
"""Largest share of the time that these looks may take; with thousands of conversations they come less often."""


class Recorder:
    """The recorder of one process.

    Args:
        writer: Writes the records and lines.
        kept: Is called in the writer's thread with a life and its record's fate (`records.Kept`); None: nobody
            waits for that.
    """

    def __init__(self, writer: RecordWriter, kept: Callable[[Life, str | OSError], None] | None = None) -> None:
        self.writer = writer
        self._kept = kept
        self._open: dict[Life, None] = {}
        self._told = 0
        """Dropped records that were reported."""
        self._look: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    name = "records"
    """Name of this object in the log, when it is closed."""

    async def aclose(self) -> None:
        """Write the records that were handed over, and stop."""
        if self._look is not None:
            self._look.cancel()
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
            self.keep(life)
        if life.status == "error":
            self.writer.raised({**line, "why": life.error})
        elif life.status in ("cancelled", "cut"):
            self.writer.cancel({**line, "why": life.status}, None if is_whole else make)
        elif life.score is not None:
            self.writer.scored(
                {**line, "score": life.score, **({"verdicts": found} if (found := life.verdicts) else {})}
            )

    def keep(self, life: Life) -> None:
        """Hand over the record of a conversation that ended by itself; again, where the disk has not taken it."""
        kept = None if self._kept is None else partial(self._kept, life)
        self.writer.keep(partial(record_of, life), {**_line(life), "at": life.ended}, kept)

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

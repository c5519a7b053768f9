"""`SharedPuts`: rows of different conversations that are written to TransferQueue in one put.

A put costs three calls of other processes, whatever is in it. So one put is under way at a time; the rows that come
meanwhile wait, and go in one put behind it:

    conversation  `put(rows)` ──▶ rows that wait ──▶ one put ──▶ TransferQueue
    conversation  `put(rows)` ──┘                       │ it failed
                                                        └──▶ each of its rows by itself

Invariants:
- rows of different forms (`NewRow.form`) share no put; each form has a lane of its own;
- an error reaches the conversation whose row cannot be written even by itself, and no other;
- a conversation that is cancelled takes back the rows whose put has not begun, and ends behind the put of the others.
  So nothing of it is written after its end, and no other row is lost by it.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from verl_multiturn.calls.tasks import finish
from verl_multiturn.describe import describe
from verl_multiturn.verl_bridge.compat.row_store import NewRow, put_rows

logger = logging.getLogger(__name__)

# The most rows of a put, and the most bytes unless one row has more. The worker's loop is blocked while they are
# packed: some 0.2 ms a row.
_MOST_ROWS = 64
_MOST_BYTES = 32 << 20


@dataclass(eq=False)
class _WaitingRow:
    row: NewRow
    size: int
    written: asyncio.Future[None]


class SharedPuts:
    """The puts of one agent-loop worker."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, _PutQueue] = {}

    async def put(self, rows: Sequence[NewRow], partition_id: str) -> None:
        """Write rows, and return when all of them are there.

        Args:
            rows: Rows of one conversation.
            partition_id: TransferQueue's partition.

        Raises:
            Exception: TransferQueue's error for one of the rows by itself.
        """
        entered = [self._lane(partition_id, row).enter(row) for row in rows]
        written = [waiting.written for waiting in entered]
        try:
            await asyncio.wait(written)
        except asyncio.CancelledError:
            for lane in self._lanes.values():
                lane.take_back(entered)
            await finish(asyncio.gather(*written, return_exceptions=True))
            raise
        errors = [each.exception() for each in written]
        if error := next(filter(None, errors), None):
            raise error

    def _lane(self, partition_id: str, row: NewRow) -> _PutQueue:
        key = partition_id, row.form()
        self._lanes = {known: lane for known, lane in self._lanes.items() if lane.is_used or known == key}
        return self._lanes.setdefault(key, _PutQueue(partition_id))


class _PutQueue:
    """The puts of the rows of one form, one under way at a time."""

    def __init__(self, partition_id: str) -> None:
        self._partition_id = partition_id
        self._waiting: list[_WaitingRow] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def is_used(self) -> bool:
        """Whether rows wait or are being written."""
        return self._task is not None

    def enter(self, row: NewRow) -> _WaitingRow:
        """Let a row wait for the next put, which begins at once where none is under way."""
        waiting = _WaitingRow(row, row.size(), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._task is None:
            # In no conversation's context, since the puts are of all of them.
            self._task = contextvars.Context().run(asyncio.ensure_future, self._write_all())
        return waiting

    def take_back(self, rows: Sequence[_WaitingRow]) -> None:
        """Write those of the rows no more that still wait for a put."""
        for waiting in rows:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                waiting.written.cancel()

    async def _write_all(self) -> None:
        taken: list[_WaitingRow] = []
        try:
            while self._waiting:
                taken = self._take()
                await self._write(taken)
        finally:
            self._task = None
            for waiting in (*taken, *self._waiting):  # the worker ends
                waiting.written.cancel()

    def _take(self) -> list[_WaitingRow]:
        """Take the rows of the next put, in the order in which they came."""
        count, size = 1, self._waiting[0].size
        for waiting in self._waiting[1:_MOST_ROWS]:
            size += waiting.size
            if size > _MOST_BYTES:
                break
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    async def _write(self, taken: Sequence[_WaitingRow]) -> None:
        try:
            await put_rows([waiting.row for waiting in taken], self._partition_id)
        except Exception as error:  # TransferQueue's errors; each row's own goes to its conversation
            if len(taken) == 1:
                taken[0].written.set_exception(error)
                return
            logger.warning("a put of %d rows has failed, and each is put by itself: %s", len(taken), describe(error))
            await asyncio.gather(*(self._write([waiting]) for waiting in taken))
        else:
            for waiting in taken:
                waiting.written.set_result(None)

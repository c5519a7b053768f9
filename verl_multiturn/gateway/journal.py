"""`SessionJournal`: the lines of a gateway's sessions, on disk before anybody is answered.

Invariants:
- `append` returns when the line is on disk for good; many at once share one fsync;
- lines that cannot be written leave nothing in the file, and the next ones are tried anew.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.write.line_file import append_lines, sync
from verl_multiturn.records.write.locks import hold


class SessionJournal:
    """The file of one gateway's sessions, which no other gateway writes. It is used on one event loop.

    Args:
        path: The file; it is created where it does not exist.

    Raises:
        HeldError: Another gateway writes it.
        OSError: It cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = hold(path, alone=True)
        sync(path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sessions")
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def append(self, line: Mapping[str, Any]) -> None:
        """Write a line, a `schema.SessionLine`; the store calls it before it answers.

        Raises:
            OSError: It is not written, and nothing of it is in the file.
        """
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((line_of(dict(line)), done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write())
        await done

    async def aclose(self) -> None:
        """Write what was handed over, and let go of the file."""
        if self._writer is not None:
            await asyncio.wait({self._writer})
        self._thread.shutdown(wait=True)
        self._held.close()

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            lines = [line for line, _ in batch]
            fault: Exception | None = None
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._commit, lines)
            except Exception as error:  # each request gets it
                fault = error
            for _, done in batch:
                if done.done():  # its request was cancelled
                    continue
                if fault is None:
                    done.set_result(None)
                else:
                    done.set_exception(fault)

    def _commit(self, lines: Sequence[bytes]) -> None:
        size = self._path.stat().st_size
        append_lines(self._path, b"".join(lines))
        try:
            sync(self._path)
        except OSError:
            os.truncate(self._path, size)
            raise

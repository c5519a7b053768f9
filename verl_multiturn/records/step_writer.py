"""`StepWriter`: the thread that writes what the trainer knows of its steps, so that no step waits for a disk.

    trainer   step(…)  line(…)       references alone, in microseconds
    thread    join/….parquet, then the line in steps.jsonl, which says whether the join is there

Invariants:
- no step fails or waits because something could not be written. It is said once, and again when it works again;
- lines keep their order, and the line of a step comes after its join;
- at most `_MOST_JOINS` joins wait. With a disk that is slower, joins are dropped, and their lines say so.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from verl_multiturn.describe import describe
from verl_multiturn.records import joins, run_file
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.writer import append_lines

_LOG = logging.getLogger(__name__)

STEPS = "steps.jsonl"
_MOST_JOINS = 4
_CLOSE_S = 30.0


@dataclass
class _Join:
    """A join that waits to be written."""

    name: str
    make: Callable[[], pa.Table]


class StepWriter:
    """Writer of a run's file, its joins and `steps.jsonl`.

    Args:
        folder: Folder of the records; it is created where it does not exist.
        start: The run's start.
    """

    def __init__(self, folder: str | Path, start: str) -> None:
        self.folder, self.start = Path(folder), start
        self._tasks: deque[Callable[[], None]] = deque()
        self._joins = 0
        """Number of joins that wait."""
        self._joined: dict[str, int] = {}
        """Number of rows of each join that was written and has no line yet."""
        self._lines: list[bytes] = []
        """Lines that could not be written so far."""
        self._failing = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)
        self._thread.start()

    def run(self, make: Callable[[], dict[str, Any]]) -> None:
        """Write the run's file anew; `make` is called in the thread and returns a `schema.RunFile`."""
        self._hand(lambda: self._write_run(make))

    def join(self, validation: bool, step: int, make: Callable[[], pa.Table]) -> None:
        """Write the join of a step or a validation; `make` is called in the thread.

        Args:
            validation: Whether it is that of a validation.
            step: The step.
            make: Function that returns a table of `schema.JOINED`. Nothing that it reads may be changed any more.
        """
        with self._changed:
            if self._joins >= _MOST_JOINS:
                self._fail(f"{self._joins} joins wait already, since the disk is too slow")
                return
            self._joins += 1
        join = _Join(joins.name_of(validation, step, self.start), make)
        self._hand(lambda: self._write_join(join))

    def line(self, line: dict[str, Any]) -> None:
        """Append a `StepLine`, without its `start`, `join` and `rows`."""
        name = joins.name_of(line["event"] == "validation", line["step"], self.start)
        self._hand(lambda: self._write_line(self._with_join(line, name)))

    def other(self, line: dict[str, Any]) -> None:
        """Append a line of another kind (`Clock`, `End`)."""
        self._hand(lambda: self._write_line(line))

    def close(self) -> None:
        """Write what was handed over, and stop. It waits for a slow disk, but not forever."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _LOG.warning("joins are lost: %s could not be written to its end within %.0f s", self.folder, _CLOSE_S)

    def _hand(self, task: Callable[[], None]) -> None:
        with self._changed:
            if not self._closing:
                self._tasks.append(task)
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closing)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            try:
                task()
            except OSError as error:
                self._fail(describe(error))
            except Exception as error:  # what a run is like is no reason to end it, whatever is wrong with it
                self._fail(f"it could not be made: {describe(error)}")
            else:
                if self._failing:
                    _LOG.warning("joins and steps are written again: %s", self.folder)
                self._failing = False

    def _fail(self, why: str) -> None:
        if not self._failing:
            _LOG.warning("what the trainer made of its rows is not recorded: %s: %s; the run goes on", self.folder, why)
        self._failing = True

    def _write_run(self, make: Callable[[], dict[str, Any]]) -> None:
        run_file.write_whole(run_file.path_of(self.folder, self.start), line_of(make()).decode())

    def _write_join(self, join: _Join) -> None:
        try:
            table = join.make()
            joins.write(self.folder, join.name, table)
            self._joined[join.name] = table.num_rows
        finally:
            with self._changed:
                self._joins -= 1

    def _with_join(self, line: dict[str, Any], name: str) -> dict[str, Any]:
        rows = self._joined.pop(name, None)
        return {**line, "start": self.start, "join": None if rows is None else name, "rows": rows or 0}

    def _write_line(self, line: dict[str, Any]) -> None:
        self._lines.append(line_of(line))
        self.folder.mkdir(parents=True, exist_ok=True)
        append_lines(self.folder / STEPS, b"".join(self._lines))
        self._lines = []


def clock_of(stem: str, asked: float, there: float, answered: float) -> dict[str, Any]:
    """Return how far a worker's clock is from this process's (`schema.Clock`).

    Args:
        stem: Beginning of the names of its files.
        asked: Time here (`time.time`) when it was asked for its time.
        there: What it answered.
        answered: Time here when the answer had come.
    """
    error_s = max(0.0, answered - asked) / 2
    return {"event": "clock", "file": stem, "offset_s": (asked + answered) / 2 - there, "error_s": error_s}

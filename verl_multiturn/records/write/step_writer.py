"""`StepWriter`: writes the trainer's data of its steps, in a thread (`background`).

    trainer   step(…)  line(…)       references alone, in microseconds
    thread    join/….parquet, then the line in steps.jsonl, which shows whether the join is there

Invariants:
- no step fails or waits because something could not be written. A loss at the end is counted and reported;
- lines keep their order, and the line of a step comes after its join;
- at most `_MOST_JOINS` joins wait. With a disk that is slower, joins are dropped, and their lines note it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from verl_multiturn.describe import describe
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.read import joins
from verl_multiturn.records.read.files import STEPS
from verl_multiturn.records.write import run_file
from verl_multiturn.records.write.background import BackgroundWriter, Losses
from verl_multiturn.records.write.line_file import LineFile

_MOST_JOINS = 3
"""So many joins wait, besides the one that is being written."""


class _WriteTask(NamedTuple):
    """Something to write."""

    write: Callable[[], None]
    is_join: bool = False


class StepWriter:
    """Writer of a run's file, its joins and `steps.jsonl`.

    Args:
        folder: Folder of the records; it is created where it does not exist.
        start: The run's start.
    """

    def __init__(self, folder: str | Path, start: str) -> None:
        self.folder, self.start = Path(folder), start
        self._joined: dict[str, int] = {}
        """Number of rows of each join that was written and has no line yet."""
        self._losses = Losses("joins and steps", self.folder)
        self._lines = LineFile(self.folder / STEPS, "steps")
        self._background: BackgroundWriter[_WriteTask] = BackgroundWriter(
            "steps", self._write, self._losses, most=_MOST_JOINS, last=self._lines.end
        )

    def run(self, make: Callable[[], dict[str, Any]]) -> None:
        """Write the run's file anew; `make` is called in the thread and returns a `schema.RunFile`."""
        self._hand(_WriteTask(partial(self._write_run, make)))

    def join(self, validation: bool, step: int, make: Callable[[], pa.Table]) -> None:
        """Write the join of a step or a validation; `make` is called in the thread.

        Args:
            validation: Whether it is that of a validation.
            step: The step.
            make: Function that returns a table of `schema.JOINED`. Nothing that it reads may be changed any more.
        """
        name = joins.name_of(validation, step, self.start)
        self._hand(_WriteTask(partial(self._write_join, name, make), is_join=True))

    def line(self, line: dict[str, Any]) -> None:
        """Append a `StepLine`, without its `start`, `join` and `rows`."""
        name = joins.name_of(line["event"] == "validation", line["step"], self.start)
        self._hand(_WriteTask(lambda: self._write_line(self._with_join(line, name))))

    def other(self, line: dict[str, Any]) -> None:
        """Append a line of another kind (`Clock`, `RunEnd`)."""
        self._hand(_WriteTask(partial(self._write_line, line)))

    def close(self) -> None:
        """Write the data handed over, and stop, within `background.CLOSE_S`."""
        self._background.close()

    def _hand(self, task: _WriteTask) -> None:
        self._background.put(task, large=task.is_join)

    def _write(self, tasks: Sequence[_WriteTask]) -> None:
        for task in tasks:
            try:
                task.write()
            except OSError as error:
                self._losses.add(describe(error), task.is_join)  # a line that is not written is kept
            except Exception as error:  # an error of a step's record must not end the run
                self._losses.add(f"it could not be made: {describe(error)}", task.is_join)
            else:
                if not self._lines.is_late:
                    self._losses.end()

    def _write_run(self, make: Callable[[], dict[str, Any]]) -> None:
        run_file.write_whole(run_file.path_of(self.folder, self.start), line_of(make()).decode())

    def _write_join(self, name: str, make: Callable[[], pa.Table]) -> None:
        table = make()
        joins.write(self.folder, name, table)
        self._joined[name] = table.num_rows

    def _with_join(self, line: dict[str, Any], name: str) -> dict[str, Any]:
        rows = self._joined.pop(name, None)
        return {**line, "start": self.start, "join": None if rows is None else name, "rows": rows or 0}

    def _write_line(self, line: dict[str, Any]) -> None:
        self._lines.hold([line_of(line)])
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lines.write()


def clock_of(stem: str, asked: float, there: float, answered: float) -> dict[str, Any]:
    """Return how far a worker's clock is from this process's (`schema.Clock`).

    Args:
        stem: Beginning of the names of its files.
        asked: Time here (`time.time`) of the request for its time.
        there: Its answer.
        answered: Time here when the answer had come.
    """
    error_s = max(0.0, answered - asked) / 2
    return {"event": "clock", "file": stem, "offset_s": (asked + answered) / 2 - there, "error_s": error_s}

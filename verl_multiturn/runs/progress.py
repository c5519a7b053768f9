"""The display of a run while it lasts: the phases of its start-up, then a line for each step and each validation.

    phase: starting Ray, after 52 s
    step  12  reward 0.913  calls/trajectory 0.98  11.2 s  finished 99 %, response_length 1 %  left 0:01:30

In a terminal the phases are in the progress bar; elsewhere each is a line, when it begins.

All of it is read from the files that verl's trainer writes. The trainer itself gets no requests.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from verl_multiturn.describe import describe
from verl_multiturn.observe.metric_files import REWARD, read_entry, reward_failures
from verl_multiturn.records.read.files import record_files
from verl_multiturn.runs.start_up import StartUp

_STOP = "rollout/stop/"
_VALIDATED = re.compile(r"val-core/(.*)/(acc|reward)/mean@\d+")
_TOTAL = re.compile(r"Total training steps: (\d+)")
# The line of verl's console logger for a step. It is shown in a run whose metrics are in no file.
_CONSOLE_STEP = re.compile(r"\bstep:\d+ - .*")
_RECENT = 10
"""Number of latest steps whose mean time gives the estimate of the remaining time."""


def follow(path: Path, begin: int = 0) -> Iterator[str]:
    """Yield the lines of a growing file, and an empty string whenever there is no new complete line.

    Empty lines of the file are skipped. The iterator never ends.

    Args:
        path: The file. It need not exist yet.
        begin: Number of bytes to skip at the beginning of the file.
    """
    position, rest = begin, b""
    while True:
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                text = file.read()
                position = file.tell()
            *lines, rest = (rest + text).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines if line)
        yield ""


def _size(records: Path | None) -> int:
    """Return the number of bytes of the conversations' records in a folder; 0 if there is none."""
    if records is None or not records.is_dir():
        return 0
    return sum(path.stat().st_size for path in record_files(records))


def say(text: str) -> None:
    """Print a line. A run goes on when its output is not read any more."""
    try:
        print(text, flush=True)
    except OSError:  # a closed pipe or terminal, or a full disk
        _say_nothing()


def _say_nothing() -> None:
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class RunConsole(Console):
    """A console whose program goes on when its output is not read any more, as with `| head`."""

    def _write_buffer(self) -> None:
        try:
            super()._write_buffer()
        except OSError:  # rich itself would end the program
            _say_nothing()


def validation_scores(data: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the results of a validation, each with its name: a data set's accuracy, or its reward where it has none.

    Args:
        data: Metrics of one entry of verl's file.
    """
    found = {match: value for key, value in data.items() if (match := _VALIDATED.fullmatch(key)) and value is not None}
    accurate = {match[1] for match in found if match[2] == "acc"}
    shown = {match: value for match, value in found.items() if match[2] == "acc" or match[1] not in accurate}
    names = {"acc": "accuracy", "reward": "reward"}
    return [
        (f"validation {names[match[2]]}{f' of {match[1]}' if len(shown) > 1 else ''}", value)
        for match, value in shown.items()
    ]


class StepLines:
    """The lines that show the logged metrics of a run.

    Args:
        total: Number of training steps of the whole run; None: not known yet.
    """

    def __init__(self, total: int | None) -> None:
        self.total = total
        self._seconds: list[float] = []

    def of(self, step: int, data: dict[str, Any]) -> list[str]:
        """Return the lines for one entry of verl's file of metrics.

        A training step gives one line, and a validation one line for each data set.

        Args:
            step: Number of the training step.
            data: The metrics, by name.
        """
        lines = [self._of_step(step, data)] if data.get(REWARD) is not None else []
        lines += [f"step {step:3d}  {name} {value:.3f}" for name, value in validation_scores(data)]
        return lines

    def _of_step(self, step: int, data: dict[str, Any]) -> str:
        parts = [f"step {step:3d}", f"reward {data[REWARD]:.3f}"]
        parts += [f"{number:.0f} rewards {name}" for name, number in reward_failures(data).items()]
        calls = data.get("rollout/calls/per_trajectory/mean")
        if calls is not None:
            parts.append(f"calls/trajectory {calls:.2f}")
        seconds = data.get("timing_s/step")
        if seconds is not None:
            parts.append(f"{seconds:.1f} s")
            self._seconds.append(seconds)
        stops = {key.removeprefix(_STOP): value or 0.0 for key, value in data.items() if key.startswith(_STOP)}
        often = sorted((share, reason) for reason, share in stops.items() if share >= 0.005)[::-1]
        if often:
            parts.append(", ".join(f"{reason} {share:.0%}".replace("%", " %") for share, reason in often))
        if raised := data.get("rollout/raised"):
            parts.append(f"{raised:.0f} raised (search the log for Error)")
        if self.total is not None and self._seconds and step < self.total:
            left = (self.total - step) * mean(self._seconds[-_RECENT:])
            parts.append(f"left {timedelta(seconds=round(left))}")
        return "  ".join(parts)


class Display:
    """The display of one run.

    It reads the log from its present end on, and the metrics from their beginning.

    Args:
        log: File with the output of the trainer.
        metrics: File of verl's file logger.
        records: Folder of the conversations' records; None: the run writes none.
        total: Number of training steps; None: it is read from the log.
        console: Console for the output.
        start_up: The run's start-up; None: a run without conversations.
    """

    def __init__(
        self,
        log: Path,
        metrics: Path,
        records: Path | None,
        total: int | None,
        console: Console,
        start_up: StartUp | None,
    ) -> None:
        # A resumed run appends to the log of its earlier starts.
        self._log = follow(log, log.stat().st_size if log.exists() else 0)
        self._metrics = follow(metrics)
        self._has_metrics = False
        self._records = records
        # A resumed run has the records of its earlier starts.
        self._recorded = _size(records)
        self._lines = StepLines(total)
        self._console = console
        self._start_up = start_up
        self._not_shown: set[str] = set()
        self._phase = ""
        """The phase whose line was printed."""

    def show_while(self, is_running: Callable[[], bool]) -> None:
        """Show the run until it ends.

        Args:
            is_running: Function that returns whether the run still lasts.
        """
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress:
            bar = progress.add_task(self._doing, total=self._lines.total)
            running = True
            while running:
                running = is_running()
                try:
                    self._see(progress, bar)
                except Exception as error:  # an error of the display must not end a training
                    if (problem := describe(error)) not in self._not_shown:
                        self._not_shown.add(problem)
                        self._console.print(f"not shown: {problem}", markup=False, highlight=False, soft_wrap=True)
                if running:
                    time.sleep(0.3)

    @property
    def _doing(self) -> str:
        return "training" if self._start_up is None else self._start_up.doing

    def _print_phase(self) -> None:
        """Print the line of a phase that has begun, where no progress bar is seen."""
        seen = self._console.is_terminal and not self._console.is_dumb_terminal
        if self._start_up is None or seen or self._phase == self._doing:
            return
        self._phase = self._doing
        line = f"phase: {self._phase}, after {self._start_up.elapsed:.0f} s"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _see(self, progress: Progress, bar: TaskID) -> None:
        self._print_phase()
        for line in iter(lambda: next(self._log), ""):
            self._see_log(line)
            self._print_phase()
        for line in iter(lambda: next(self._metrics), ""):
            self._has_metrics = True
            if (entry := read_entry(line)) is None:
                continue
            step, data = entry
            if data.get(REWARD) is not None:
                if self._start_up is not None and not self._start_up.is_over:
                    self._start_up.end()
                    self._print_phase()
                progress.update(bar, completed=step)
            for shown in self._lines.of(step, data):
                self._console.print(shown, highlight=False, markup=False, soft_wrap=True)
        if self._start_up is not None and not self._start_up.is_over and _size(self._records) > self._recorded:
            self._start_up.end()
            self._print_phase()
        progress.update(bar, description=self._doing, total=self._lines.total)

    def _see_log(self, line: str) -> None:
        if self._start_up is not None:
            self._start_up.see(line)
        if self._lines.total is None and (total := _TOTAL.search(line)):
            self._lines.total = int(total[1])
        step = _CONSOLE_STEP.search(line)
        if step and not self._has_metrics and self._start_up is None:
            self._console.print(step[0], highlight=False, markup=False, soft_wrap=True)

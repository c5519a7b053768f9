"""The start-up of a run: the time of each phase until the first conversation ends, from the run's log."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

from verl_multiturn.paths import open_regular

_LONGEST_LINE = 100_000
_ERROR = re.compile(r"(?:\([^)]*\) )?([\w.]*(?:Error|Exception|Exit)\b.*)")
"""A line that names an exception; Ray puts the name of an actor before it."""

# Each phase: its name, its text in the progress bar, and a part of the line in the trainer's log that ends it.
_PHASES = (
    ("checks", "importing verl, checking the settings", "ray init kwargs"),
    ("ray", "starting Ray", "Started a local Ray"),
    ("fsdp", "loading data and model", "actor and ref model engine initialized"),
    ("sglang", "starting SGLang", "checkpoint engine manager initialized"),
    ("first_conversation", "starting the agent loop, waiting for the first conversation", None),
)


class StartUp:
    """The phases of a run until its first conversation is over.

    Args:
        started: Time when the command was given, in seconds since the epoch.

    Attributes:
        seconds: Duration in seconds of each phase that is over, by name.
    """

    def __init__(self, started: float) -> None:
        self.seconds: dict[str, float] = {}
        self._since = started

    @property
    def is_over(self) -> bool:
        """Return whether the first conversation is over."""
        return len(self.seconds) == len(_PHASES)

    @property
    def doing(self) -> str:
        """Return the text of the present phase; "training" after the last one."""
        return "training" if self.is_over else _PHASES[len(self.seconds)][1]

    @property
    def elapsed(self) -> float:
        """Return the seconds that the phases before the present one took together."""
        return sum(self.seconds.values())

    def see(self, line: str) -> None:
        """Read a line of the log, and end the phase that it belongs to.

        All earlier phases end, too, since the line that should have ended them may be missing. The first of the phases
        that end together gets their whole time, and the others get 0 seconds.

        Args:
            line: A line of the trainer's log.
        """
        for index, (_, _, sign) in enumerate(_PHASES):
            if sign is not None and sign in line and index >= len(self.seconds):
                self._end(index)

    def end(self) -> None:
        """End the last phase, because a conversation is over."""
        self._end(len(_PHASES) - 1)

    def _end(self, index: int) -> None:
        now = time.time()
        for name, _, _ in _PHASES[len(self.seconds) : index + 1]:
            self.seconds[name] = round(now - self._since, 1)
            self._since = now


def end_of_log(log: Path) -> str:
    """Return how far a run came by its log, and the last error there, as one sentence.

    Example: `the run ended while starting Ray (ValueError: …); whole log: outputs/mine/train.log`.

    Args:
        log: The trainer's log.
    """
    start_up, error = StartUp(0.0), ""
    with io.TextIOWrapper(open_regular(log, within=log.parent), encoding="utf-8", errors="replace") as lines:
        while line := lines.readline(_LONGEST_LINE):
            start_up.see(line)
            found = _ERROR.match(line)
            error = found[1] if found else error
    return f"the run ended while {start_up.doing}{f' ({error.strip()[:200]})' if error else ''}; whole log: {log}"

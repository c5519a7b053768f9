"""The start-up of a run: how long each phase takes until the first conversation, as the run's log and records tell."""

from __future__ import annotations

import time
from pathlib import Path

# Each phase, what the progress bar says of it, and the line of the trainer's log that ends it.
_PHASES = (
    ("checks", "importing verl, checking the settings", "ray init kwargs"),
    ("ray", "starting Ray", "Started a local Ray"),
    ("fsdp", "loading data and model", "actor and ref model engine initialized"),
    ("sglang", "starting SGLang", "checkpoint engine manager initialized"),
    ("first_conversation", "starting the agent loop, waiting for the first conversation", None),
)


class StartUp:
    """The phases of a run before its first conversation is over.

    Attributes:
        seconds: of each phase that is over.
    """

    def __init__(self, started: float) -> None:
        """Begin with the first phase.

        Args:
            started: when the command was given, in seconds of the epoch.
        """
        self.seconds: dict[str, float] = {}
        self._since = started

    @property
    def is_over(self) -> bool:
        """Return whether the first conversation is over."""
        return len(self.seconds) == len(_PHASES)

    @property
    def doing(self) -> str:
        """Return what the run is doing, in words."""
        return "training" if self.is_over else _PHASES[len(self.seconds)][1]

    def see(self, line: str) -> None:
        """Take a line of the log into account; a line that is missing ends with the next that is there."""
        for index, (_, _, sign) in enumerate(_PHASES):
            if sign is not None and sign in line and index >= len(self.seconds):
                self._end(index)

    def look_for_conversations(self, records: Path) -> None:
        """End the last phase once a conversation's record is written, in a folder that may not be there yet."""
        if any(path.stat().st_size for path in records.glob("*.jsonl")):
            self.end()

    def end(self) -> None:
        """End the last phase: a conversation is over."""
        self._end(len(_PHASES) - 1)

    def _end(self, index: int) -> None:
        now = time.time()
        for name, _, _ in _PHASES[len(self.seconds) : index + 1]:
            self.seconds[name] = round(now - self._since, 1)
            self._since = now

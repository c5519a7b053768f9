"""`StopRequest`: the file that asks a trainer to end when the step that runs has ended, with a checkpoint.

    the launcher at SIGUSR1, or a user:  touch CHECKPOINTS/stop
      → the trainer, where the next step would begin: it saves, writes its answer into the file, and ends
      → the launcher reads the answer, and removes the file

The folder is that of the checkpoints (`trainer.default_local_dir`), because every trainer knows it, and the nodes of a
run share it.

Invariants:
- a file that holds anything but an answer is a request; an answer never ends a run.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import NamedTuple

NAME = "stop"
"""Name of the file."""


class StopAnswer(NamedTuple):
    """The answer of a trainer that ended at a request.

    Attributes:
        step: Step that the weights have finished; 0: none was trained.
        said: A sentence for the user: the saved state, and how to go on.
    """

    step: int
    said: str


class StopRequest:
    """The request in a folder of checkpoints.

    Args:
        checkpoints: The folder. It need not exist.
    """

    def __init__(self, checkpoints: Path) -> None:
        self.path = checkpoints / NAME
        self._has_made_folder = False

    def make(self) -> None:
        """Ask the trainer to end."""
        if not self.path.parent.exists():
            self.path.parent.mkdir(parents=True)
            self._has_made_folder = True
        self.path.write_bytes(b"")

    def is_made(self) -> bool:
        """Return whether the trainer has a request to end."""
        return self.path.exists() and self._answer() is None

    def answer(self, answer: StopAnswer) -> None:
        """Put the trainer's answer in the place of the request."""
        part = self.path.with_name(f".{NAME}.part")
        part.write_text(json.dumps(answer._asdict()) + "\n", encoding="utf-8")
        os.replace(part, self.path)

    def take(self) -> StopAnswer | None:
        """Remove the file, and return the answer that it held; None: it held none.

        The folder goes, too, if `make` made it and it is empty. One of the user's stays, with its rights and stripes.
        """
        answer = self._answer()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
            if self._has_made_folder:
                self.path.parent.rmdir()  # fails where there are checkpoints
        return answer

    def _answer(self) -> StopAnswer | None:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return StopAnswer(int(found["step"]), str(found["said"]))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

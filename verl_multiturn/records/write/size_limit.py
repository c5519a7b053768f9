"""`FolderRoom`: whether a folder of records has reached its limit (`record_max_gb`)."""

from __future__ import annotations

import time
from pathlib import Path

_LOOK_S = 10.0
"""How often the folder's size is looked at, with a limit."""


class FolderRoom:
    """The rest of a folder's limit, checked now and then; files of earlier starts count.

    Args:
        folder: The folder of the records.
        max_gb: Its limit in GB; None: none.
    """

    def __init__(self, folder: Path, max_gb: float | None) -> None:
        self._folder, self._most = folder, None if max_gb is None else max_gb * 1e9
        self._there, self._looked = 0, float("-inf")
        self.written = 0

    def took(self, size: int) -> None:
        """Count bytes that were written."""
        self._there += size
        self.written += size

    def is_full(self) -> bool:
        """Return whether the folder has reached its limit."""
        if self._most is None:
            return False
        if time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            self._there = sum(path.stat().st_size for path in self._folder.glob("*.jsonl.gz"))
        return self._there >= self._most

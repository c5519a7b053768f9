"""`LineFile`: a file of lines, and the lines that a full disk has not taken; `append`: writes whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from verl_multiturn.describe import describe
from verl_multiturn.records.write.background import Losses


class LineFile:
    """A file of lines, and those that it could not take yet: they are written with the next ones, or lost at the end.

    Args:
        path: The file; it is created where it does not exist.
        what: The subject of its lines, in the plural, such as `steps`.
        most: The most lines that are held; None: no limit. The oldest ones are lost first.
    """

    def __init__(self, path: Path, what: str, most: int | None = None) -> None:
        self.path, self._most = path, most
        self._losses = Losses(f"lines of {what}", path)
        self._held: list[bytes] = []

    @property
    def is_late(self) -> bool:
        """Return whether there are lines that the file has not taken yet."""
        return bool(self._held)

    def hold(self, lines: Sequence[bytes]) -> None:
        """Take lines that are to be written next."""
        self._held += lines

    def write(self) -> None:
        """Append the lines that are held.

        Raises:
            OSError: They cannot be written, and are held; those beyond `most` are lost.
        """
        if not self._held:
            return
        try:
            append_lines(self.path, b"".join(self._held))
        except OSError as error:
            if self._most is not None and (many := len(self._held) - self._most) > 0:
                del self._held[:many]
                self._losses.add(describe(error), many)
            raise
        self._held = []
        self._losses.end()

    def end(self) -> None:
        """Write the held lines for the last time, and report how many lines are lost; called when no more come."""
        try:
            self.write()
        except OSError as error:
            self._losses.last(describe(error), len(self._held))


def sync(path: Path) -> None:
    """Have the disk take a file and its name in the folder for good; called before somebody is promised that.

    Raises:
        OSError: It cannot.
    """
    for each, flags in ((path, os.O_RDWR), (path.parent, os.O_RDONLY)):
        handle = os.open(each, flags)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def append_lines(path: Path, data: bytes) -> int:
    """Append lines to a file as `append` does; a line that a kill has torn ends before them.

    Raises:
        OSError: They cannot be written.
    """
    return append(path, data, after_torn=b"\n")


def append(path: Path, data: bytes, after_torn: bytes = b"") -> int:
    """Append to a file, and return where the data begin. Nothing of the data stays when it cannot be written whole.

    Args:
        path: The file; it is created where it does not exist.
        data: The bytes to append.
        after_torn: The bytes to write before the data where the file does not end with them; "": nothing.

    Raises:
        OSError: It cannot be written.
    """
    with path.open("a+b", buffering=0) as file:
        start = file.seek(0, os.SEEK_END)
        if data and after_torn and start:
            file.seek(start - len(after_torn))
            if file.read() != after_torn:
                data = after_torn + data
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(start)
            raise
    return start

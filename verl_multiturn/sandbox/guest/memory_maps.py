"""Replacement of `mmap.mmap` for the sandbox, where the system call filter refuses shared anonymous memory.

`mmap.mmap(-1, length)` maps a file without a name instead.

Runs inside the sandbox. Imports the standard library only.
"""

from __future__ import annotations

import mmap
import os
from typing import Any


class _Mapping(mmap.mmap):
    """`mmap.mmap` whose shared anonymous memory lies in the sandbox's folder, where `disk_mb` limits it."""

    def __new__(cls, fileno: int, length: int, flags: int = mmap.MAP_SHARED, *arguments: Any, **named: Any) -> _Mapping:
        access = arguments[1] if len(arguments) > 1 else named.get("access", mmap.ACCESS_DEFAULT)
        if fileno != -1 or length <= 0 or not flags & mmap.MAP_SHARED or access == mmap.ACCESS_COPY:
            return super().__new__(cls, fileno, length, flags, *arguments, **named)
        file = os.open(os.environ.get("TMPDIR", "/tmp"), os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(file, 0, length)
            return super().__new__(cls, file, length, flags & ~mmap.MAP_ANONYMOUS, *arguments, **named)
        finally:
            os.close(file)


def install() -> None:
    """Replace `mmap.mmap` in this process and in its forks."""
    _Mapping.__name__ = _Mapping.__qualname__ = "mmap"
    _Mapping.__module__ = "mmap"
    mmap.mmap = _Mapping  # type: ignore[misc]

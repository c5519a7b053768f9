"""Names that show which process made a thing: a trial, a folder. The remains of a killed process are found by them.

Imports the standard library only: it runs in the worker and in a harness's own Python.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

_NAMED = re.compile(r"vmt-([0-9a-f]{8})-(\d+)-(\d+)-")


def owner(process: int | None = None) -> str:
    """Return the prefix of the names of the things that a process makes, such as `vmt-0f3a9c21-4711-8530-`.

    It has the machine and its process namespace, the process's number and the time at which it started, so that no two
    processes have the same.
    """
    process = os.getpid() if process is None else process
    return f"vmt-{_machine()}-{process}-{_started(process)}-"


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:8]


def _started(process: int) -> int:
    """Return when a process started, in ticks; 0 if there is none."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def is_left(name: str) -> bool:
    """Return whether a name is that of a thing that a process of this machine made which is no more."""
    found = _NAMED.search(name)
    return found is not None and found[1] == _machine() and _started(int(found[2])) != int(found[3])

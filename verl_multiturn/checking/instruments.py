"""Instruments of every examination: a process's open resources, and blocks of its event loop.

Invariant: only growth counts. The examined object may keep a pool or a connection, but may not let it grow.
"""

from __future__ import annotations

import asyncio
import os
import sysconfig
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TypeVar

import psutil

from verl_multiturn.calls.loop_blocks import LoopWatch

_LOOKS_S = 0.005
LATE_S = 0.1
"""Seconds for which the event loop may be blocked; longer, it holds up the other conversations."""
SETTLE_S = 2.0
"""Seconds in which a cancelled or closed object has to end."""
T = TypeVar("T")


@dataclass(frozen=True)
class ResourceSnapshot:
    """Names of this process's open resources, by kind: tasks, threads, processes, descriptors, temporary files."""

    kinds: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def take(cls, temporary: Path) -> ResourceSnapshot:
        """Take a snapshot now; `temporary` is the folder of temporary files."""
        descriptors = Path("/proc/self/fd")
        return cls(
            {
                "task": [task.get_name() for task in asyncio.all_tasks()],
                "thread": [thread.name for thread in threading.enumerate()],
                "process": [_describe(process) for process in psutil.Process().children(recursive=True)],
                "file descriptor": [_target(entry) for entry in descriptors.iterdir()] if descriptors.is_dir() else [],
                "temporary file": [entry.name for entry in temporary.iterdir()],
            }
        )

    def beyond(self, before: ResourceSnapshot) -> list[str]:
        """Return the kinds of which there is more than before, in words."""
        found = []
        for kind, items in self.kinds.items():
            earlier = list(before.kinds[kind])
            new = [item for item in items if not _take_out(item, earlier)]
            if (count := len(items) - len(before.kinds[kind])) > 0:
                found.append(f"{count} {kind}{'' if count == 1 else 's'} ({', '.join(new[:3])})")
        return found


def _take_out(item: str, of: list[str]) -> bool:
    if item in of:
        of.remove(item)
        return True
    return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.name()}"
    except psutil.Error:
        return str(process.pid)


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:
        return "closed"


async def growth(action: Callable[[], Awaitable[None]], temporary: Path) -> list[str]:
    """Return the resources that every run of an action leaves behind; one left only once may be a pool."""
    await action()
    before = await _settled(ResourceSnapshot(), temporary)
    found: list[str] = []
    for _ in range(2):
        await action()
        after = await _settled(before, temporary)
        found = after.beyond(before)
        if not found:
            return []
        before = after
    return found


async def _settled(before: ResourceSnapshot, temporary: Path) -> ResourceSnapshot:
    """Take a snapshot, after a wait for resources that end soon."""
    loop = asyncio.get_running_loop()
    until = loop.time() + (SETTLE_S if before.kinds else 0.1)
    while True:
        await asyncio.sleep(0.02)
        now = ResourceSnapshot.take(temporary)
        if loop.time() > until or (before.kinds and not now.beyond(before)):
            return now


@contextmanager
def private_temporary_folder() -> Iterator[Path]:
    """Use a new folder for this process's temporary files, as a context manager."""
    variable, cached = os.environ.get("TMPDIR"), tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="check-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = cached
            if variable is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = variable


class ExaminationWatch(LoopWatch):
    """A watch that notes when the event loop is blocked, and at which line of code."""

    def __init__(self) -> None:
        super().__init__(LATE_S, _LOOKS_S)
        self.blocks: list[tuple[float, str]] = []
        """Seconds and place of each standstill, in order."""
        self.place = ""
        """Line of code at which the loop is blocked now."""

    def blocked(self, task: asyncio.Task[object] | None, frame: FrameType) -> None:
        """Note where the loop is blocked.

        Args:
            task: The task that runs now.
            frame: Current frame of the loop's thread.
        """
        if task is None and frame.f_code.co_name == "select":
            return  # the loop waits by now: the code that kept the interpreter's lock has gone on
        self.place = _place(frame)

    def over(self, seconds: float) -> None:
        """Note how long the loop was blocked.

        Args:
            seconds: How long it was.
        """
        self.blocks.append((seconds, self.place))
        self.place = ""

    async def longest(self, awaited: Awaitable[T]) -> tuple[T, float, str]:
        """Await an outcome, and return it with the seconds and the place of the longest standstill meanwhile."""
        await asyncio.sleep(2 * _LOOKS_S)
        self.blocks.clear()
        self.place = ""
        outcome = await awaited
        await asyncio.sleep(2 * _LOOKS_S)
        seconds, place = max(self.blocks, default=(0.0, ""))
        return outcome, seconds, place


def _place(frame: FrameType | None) -> str:
    """Return the innermost line of code that belongs to no library; otherwise the innermost line of all."""
    libraries = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib"))
    innermost = ""
    while frame is not None:
        code = frame.f_code
        place = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        if not code.co_filename.startswith((*libraries, "<")):
            return place
        innermost = innermost or place
        frame = frame.f_back
    return innermost

"""`kept_running`: a process that somebody stops (SIGSTOP) while we wait for it goes on.

A stopped process has not ended, so nothing else reports that its answer never comes. Any process of the same user can
stop it: an author's environment, or a program that an agent started.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Iterator

_LOOK_S = 0.5
"""Seconds between two looks at the process."""
_TIMES = 3
"""How often a process is continued while it is waited for: somebody may stop it again."""


@contextlib.contextmanager
def kept_running(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Continue a process that is stopped; kill it when it is found stopped for the fourth time.

    It is looked at when the block begins, and every half second until the block ends.

    Args:
        process: A child of this process.
    """
    loop = asyncio.get_running_loop()
    remedies = [signal.SIGKILL, *[signal.SIGCONT] * _TIMES]

    timers: list[asyncio.TimerHandle] = []

    def look() -> None:
        if remedies and process.poll() is None and is_stopped(process.pid):
            process.send_signal(remedies.pop())
        timers[:] = [loop.call_later(_LOOK_S, look)]

    look()
    try:
        yield
    finally:
        timers[0].cancel()


def is_stopped(process: int) -> bool:
    """Return whether a process was stopped by a signal; one that a debugger holds is not.

    Args:
        process: Its process id.
    """
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].startswith(b"T")
    except OSError:  # it has ended
        return False

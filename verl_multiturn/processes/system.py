"""Linux's services for processes: to end with their parent, to adopt orphans, to end all that a process has started.

This file imports only the standard library, and little of it, because the guard of a program runs it without the
package (`guard.py`). Code inside the sandbox has its own (`sandbox/guest/syscalls.py`), and so has the script
`cpu_processes/forkserver.py`: neither can import this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STRAYS_S = 2.0
"""Seconds for the end of processes that were killed; one that the kernel holds ends later."""
_LEAST_ROUNDS = 100
"""Rounds before the time counts: a process that did not run for seconds has not tried."""
_prctl = ctypes.CDLL(None).prctl  # found at import: a process that was just forked calls it and loads nothing


def end_with_parent(parent: int, signum: int = signal.SIGKILL) -> bool:
    """Ask the kernel to end this process when its parent ends, and return whether the parent is still there.

    The kernel also does so when only the thread ends that started this process.

    Args:
        parent: Process id of the parent.
        signum: Signal that ends this process.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    return os.getppid() == parent


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends, so that `end_children` finds it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_group(leader: int) -> None:
    """Kill a process group, if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_children(but: Collection[int] = ()) -> bool:
    """Kill the children of this process, which adopts orphans, and with them all processes below it.

    When a child ends, its children become children of this process, so that the rounds reach every generation.

    Args:
        but: Process ids of children that stay.

    Returns:
        Whether they have ended, within two seconds and at least a hundred rounds.
    """
    until, rounds = time.monotonic() + _STRAYS_S, 0
    while strays := _children() - set(but):
        for stray in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(stray, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(stray, os.WNOHANG)
        rounds += 1
        if rounds >= _LEAST_ROUNDS and time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def _children() -> set[int]:
    """Return the process ids of the children of this process, ended ones too."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return set(map(int, file.read().split()))
    except FileNotFoundError:  # a kernel without this file
        return _children_among_all()


def _children_among_all() -> set[int]:
    found, here = set(), os.getpid()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as stat:
            if int(stat.read().rpartition(b")")[2].split()[1]) == here:
                found.add(int(name))
    return found

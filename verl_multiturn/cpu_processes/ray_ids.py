"""Ids of Ray in processes that are forks of one: the forkserver's workers, and the lanes of the tests.

Ray's core draws ids of calls and objects from a generator that no program can seed. From the first draw on it has a
seed, which forks inherit: two workers would then give the same ids to their calls, and a process that gets both dies or
mixes their results. So a process that is forked draws none before (`class_ids`), and looks whether it has
(`draws_alike`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

_LONGEST_S = 30.0
"""Seconds after which a fork that draws an id is killed."""
_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def class_ids() -> Iterator[None]:
    """Let classes become Ray's actors without a draw of Ray's core, which draws an id for each such class.

    With another version of Ray that has no such class of ids, nothing is changed.
    """
    try:
        actor: Any = importlib.import_module("ray.actor")
        ids = actor.ActorClassID
    except (Exception, SystemExit):  # the import may fail in any way
        yield
        return
    actor.ActorClassID = types.SimpleNamespace(from_random=lambda: ids(os.urandom(ids.size())))
    try:
        yield
    finally:
        actor.ActorClassID = ids


def draws_alike() -> bool:
    """Return whether two forks of this process may draw the same ids of Ray.

    They may where two did, where one drew none, and where a thread of this process may hold a lock that a fork needs.
    """
    if (ray := sys.modules.get("ray")) is None:
        return False
    if threading.active_count() > 1:
        return True
    try:
        first, second = _drawn(ray), _drawn(ray)
    except OSError:  # no further process or descriptor
        return True
    return b"" in (first, second) or first == second


def _drawn(ray: Any) -> bytes:
    """Return an id that a fork of this process draws; b"" where it draws none."""
    read, write = os.pipe()
    with open(read, "rb") as ids:
        parent = os.getpid()
        try:
            if (pid := os.fork()) == 0:
                try:
                    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                    if os.getppid() == parent:
                        os.write(write, ray.NodeID.from_random().binary())
                finally:  # also where another version of Ray raises
                    os._exit(0)
        finally:
            os.close(write)
        if not select.select([ids], [], [], _LONGEST_S)[0]:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return ids.read()

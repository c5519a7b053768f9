"""Locks of a folder of a gateway's records: who writes there, and who may take something away.

    sessions.lock                shared: a gateway runs on the folder; alone: `sessions forget` is at work
    sessions.rewards.lock        alone: a gateway looks up a reward's id and writes it
    <stem>.sessions.jsonl        alone: the gateway that writes the file runs

Invariants:
- the kernel lets go of a lock when its process ends, however it ends: no lock is ever stale;
- a folder from which a user is half forgotten is refused until the command was repeated: its lock file is not empty.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from verl_multiturn.errors import MultiTurnError

LOCK = "sessions.lock"
"""Name of the folder's lock file. It is empty, but while users are forgotten (`forgetting`)."""
REWARDS_LOCK = "sessions.rewards.lock"
"""Name of the lock file of rewards with ids. It is empty."""


class HeldError(MultiTurnError):
    """Another process holds a lock."""


def hold(path: Path, *, alone: bool) -> BinaryIO:
    """Lock a file, which is created where it does not exist, until the returned file is closed or the process ends.

    Gateways call it for the folder's `LOCK`, shared, and for each file of sessions that they write, alone.

    Args:
        path: The file.
        alone: Whether nobody else may hold it; else others may share it.

    Raises:
        HeldError: Another process holds it, or users are half forgotten.
        OSError: It cannot be opened.
    """
    file = path.open("a+b")
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        who = "a gateway is running there; stop it" if alone else "`verl-multiturn sessions forget` is at work; wait"
        raise HeldError(f"{str(path)!r} is held by another process: {who}, and try again") from None
    if path.name == LOCK and not alone and os.fstat(file.fileno()).st_size:
        file.close()
        raise HeldError(
            f"{str(path)!r} is not empty: `verl-multiturn sessions forget` was cut off here; repeat that command first"
        )
    return file


def is_held(path: Path) -> bool:
    """Return whether a process holds a file alone; readers call it to learn whether its gateway runs."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False

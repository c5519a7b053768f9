"""Actions of processes that a test spawns; it imports little, since a child that is no fork imports it anew."""

from __future__ import annotations

import os
import sys
import time
from typing import Any


def tell(connection: Any, status: int) -> None:
    """Send who this process is, and who its parent is; then end with a status."""
    import psutil

    connection.send((os.getpid(), psutil.Process().parent().pid, "decimal" in sys.modules))
    os._exit(status)


def stay(connection: Any) -> None:
    """Send this process's id, and stay."""
    connection.send(os.getpid())
    time.sleep(600)

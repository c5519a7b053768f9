"""The folder of a command: the file of its row, and that of its result.

The worker makes the folder and names it to the keeper. Both remove it: the keeper, since it outlives a worker that is
killed; the worker, since an agent may kill or stop its keeper. The row in it may hold the right answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_multiturn.errors import AgentContractError
from verl_multiturn.proxy.agents.end import AgentResult, read_result
from verl_multiturn.sandbox.guest.removal import remove_tree

_RESULT_BYTES = 2**22
_REMOVED_S = 1.0
"""Seconds in which a folder is removed; processes that are just being killed may still write into it."""


def make_folder() -> str:
    """Return the path of a new folder, which this user alone can read.

    Raises:
        OSError: There is no room for it.
    """
    return tempfile.mkdtemp(prefix="verl-multiturn-agent-")


def remove_folder(folder: str) -> bool:
    """Remove a folder and all that is in it, also parts that an agent has closed to its own user.

    Returns:
        Whether it is gone.
    """

    def open_up(function: Callable[..., Any], path: str, raised: Any) -> None:
        """Give the owner all rights where something could not be read or removed; the next round gets further."""
        for each in (path, os.path.dirname(path)):
            inside = each == folder or each.startswith(f"{folder}{os.sep}")
            with contextlib.suppress(OSError):
                if inside and stat.S_ISDIR(os.lstat(each).st_mode):
                    os.chmod(each, 0o700)

    until = time.monotonic() + _REMOVED_S
    while os.path.lexists(folder):
        if os.path.isdir(folder) and not os.path.islink(folder):
            remove_tree(folder, open_up)
        else:  # the agent has put something else in its place
            with contextlib.suppress(OSError):
                os.unlink(folder)
        if time.monotonic() > until:
            break
        time.sleep(0.005)
    return not os.path.lexists(folder)


def read_result_file(path: Path) -> dict[str, Any] | None:
    """Return the report of a command that ended well, from its result file; None where there is none."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):  # a folder, a link, a pipe, a socket or a device
            return {"wrong_type": "the agent's result file is no plain file; write JSON to it"}
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            text = file.read(_RESULT_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        return {"wrong_type": f"the agent's result file cannot be read: {error}"}
    if len(text) > _RESULT_BYTES:
        return {
            "wrong_type": f"the agent's result file has more than {_RESULT_BYTES >> 20} MiB; write the rewards alone"
        }
    if not text.strip():
        return None
    try:
        result: AgentResult = read_result(json.loads(text))
    except (ValueError, RecursionError) as error:
        return {"wrong_type": f"the agent's result file has no JSON ({error}): {text[:100]!r}; write its reward there"}
    except AgentContractError as error:
        return {"wrong_type": str(error)}
    return {"result": dataclasses.asdict(result)}

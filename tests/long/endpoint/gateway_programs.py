"""Programs that play sessions of a gateway and end badly: those of `endpoint_ends`, as clients that nobody watches.

    python -m tests.long.endpoint.gateway_programs ADDRESS

Each end is a process that starts a session, plays, sends its result as the session's reward, and ends it; one that does
not get so far leaves its session open, which the gateway ends when it closes. A line of JSON for each says how it went.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import psutil

from tests.long.endpoint.endpoint_ends import ENDS, HostileEnd, play
from tests.support.gateway_process import ADMIN

_PATIENCE_S = 300.0
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER: processes that a program leaves become children of this one, and are ended."""


class Ended(NamedTuple):
    """How a program's session ends."""

    reward: int | None
    """Status of the reward; None: none was sent."""
    why: str
    completions: int | None
    """None: it depends on when the server sees that a client has gone."""


_LEFT = Ended(None, "closed", 1)
AT_GATEWAY: Mapping[str, Ended] = {
    **{end.name: _LEFT for end in ENDS if end.name.startswith("raises ")},
    "returns nothing": Ended(None, "ended", 1),
    "returns a number": Ended(200, "ended", 1),
    "returns zero": Ended(200, "ended", 1),
    "returns true": Ended(400, "ended", 1),
    "returns NaN": Ended(400, "ended", 1),
    "returns infinity": Ended(400, "ended", 1),
    "returns minus infinity": Ended(400, "ended", 1),
    "returns a number beyond sums": Ended(422, "ended", 1),
    "returns a whole number beyond floats": Ended(400, "ended", 1),
    "returns a complex number": _LEFT,  # JSON has none
    "returns a text": Ended(400, "ended", 1),
    "returns bytes": _LEFT,
    "returns a list": Ended(400, "ended", 1),
    "returns an object": _LEFT,
    "returns an unknown entry": Ended(400, "ended", 1),
    "returns a reward that is a text": Ended(400, "ended", 1),
    "returns a reward of a completion that is not there": Ended(400, "ended", 1),
    "returns a completion that is a number": Ended(400, "ended", 1),
    "returns completions that are a list": Ended(400, "ended", 1),
    "returns roles where there are none": Ended(400, "ended", 1),
    "returns empty roles": Ended(400, "ended", 1),
    "never asks": Ended(409, "ended", 0),
    "raises before it asks": Ended(None, "closed", 0),
    "names a wrong setting before it asks": Ended(None, "closed", 0),
    "asks with a foreign key": Ended(None, "closed", 0),
    "asks with a foreign key and its own": Ended(200, "ended", 1),
    "asks in a thread that stays": Ended(200, "ended", None),
    "leaves a stream in its middle": Ended(200, "ended", None),
    "leaves a request open": Ended(200, "ended", None),
    "hangs before it asks": Ended(None, "closed", 0),
    "exits with 0": _LEFT,
    "exits with 1": _LEFT,
    "exits before it asks": Ended(None, "closed", 0),
    "ends by SIGKILL": _LEFT,
    "ends by SIGTERM": _LEFT,
    "ends by SIGSEGV": _LEFT,
    "leaves a child": Ended(200, "ended", 1),
    "leaves a child of its own session": Ended(200, "ended", 1),
    "closes its output": Ended(200, "ended", 1),
    "is killed within a stream": Ended(None, "closed", None),
}
"""How the session of each end has to end at a gateway."""


def _program(end: HostileEnd, address: str, report: int) -> None:
    """Be the program: play a session, and report its id and the status of its reward."""

    def post(path: str, key: str, body: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{address}/rl/{path}", content=body, headers=headers, timeout=_PATIENCE_S)

    started = post("start_session", ADMIN, json.dumps({"task_id": end.name})).raise_for_status().json()
    os.write(report, f"{started['session_id']}\n".encode())
    result = play({"extra_info": {"source": end.source}}, SimpleNamespace(**started))
    if result is not None:
        status = post("set_reward", started["api_key"], json.dumps({"reward": result})).status_code
        os.write(report, f"{status}\n".encode())
    post("end_session", started["api_key"], "{}").raise_for_status()


def _run(end: HostileEnd, address: str) -> dict[str, Any]:
    """Run a program in a process of its own, and return what it reported."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            _program(end, address, write)
        finally:
            os._exit(1)  # whatever it raised
    os.close(write)
    handle = os.pidfd_open(process)
    select.select([read], [], [], _PATIENCE_S)
    said = os.read(read, 1000)  # the time that it has begins with its session
    if not select.select([handle], [], [], min(end.wall_clock_s, _PATIENCE_S))[0]:
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    os.close(handle)
    _end_remains()
    with os.fdopen(read, "rb") as reported:
        session_id, *status = (said + reported.read()).decode().split()
    return {"name": end.name, "session_id": session_id, "reward": int(status[0]) if status else None}


def _end_remains() -> None:
    """End the processes that a program left; they have become this one's children."""
    while remains := psutil.Process().children():
        for each in remains:
            os.kill(each.pid, signal.SIGKILL)
            os.waitpid(each.pid, 0)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    for each in ENDS:
        print(json.dumps(_run(each, sys.argv[1])), flush=True)

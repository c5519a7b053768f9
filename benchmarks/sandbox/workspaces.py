"""Workspaces: cost of a command and an opening, and whether time-outs lose a folder or leave anything behind.

    python -m benchmarks.workspaces

1. opening, with the pool warm, and a command that does nothing, one after the other;
2. many workspaces open at once, each with a file of its own that it reads back;
3. time-outs: commands that hang in nine ways, each with a file written before that has to be there afterwards, and
   whose processes must all be gone;
4. resources of this process after the pool is closed beside those before: processes, descriptors, folders and control
   groups.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

from verl_multiturn.sandbox.control_groups import find_parent
from verl_multiturn.workspaces.settings import WorkspaceSettings
from verl_multiturn.workspaces.workspace import Workspace, WorkspacePool

HANGS = (
    "sleep 1000",
    "while :; do :; done",
    "trap '' TERM INT HUP QUIT; while :; do sleep 1; done",
    "sleep 1000 & sleep 1000 & wait",
    "( ( sleep 1000 & ) & ) ; setsid sleep 1000 & exec sleep 1000",
    "exec > /dev/null 2>&1 < /dev/null; nohup setsid bash -c 'trap \"\" TERM; sleep 1000' & sleep 1000",
    "python3 -c 'import os, signal, time\n"
    "for number in range(1, 65):\n"
    "    try: signal.signal(number, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\n"
    "for _ in range(3): os.fork()\n"
    "while True: time.sleep(1)'",
    "kill -STOP $$; sleep 1000",
    "f() { f | f & }; f 2> /dev/null; sleep 1000",
)
_COUNT = "set -- /proc/[0-9]*; echo $#"
_OWN_PROCESSES = "2\n"
"""The output of `_COUNT` where nothing else runs: the driver, and the shell itself."""


async def timed_ms(work: Callable[[], Awaitable[Any]]) -> float:
    """Return the milliseconds that some work takes."""
    started = time.perf_counter()
    await work()
    return (time.perf_counter() - started) * 1000


async def openings_ms(pool: WorkspacePool, count: int) -> list[float]:
    """Return the times of openings, each with the pool warm again."""
    times = []
    for _ in range(count):
        times.append(await timed_ms(lambda: _open_and_close(pool)))
        await asyncio.sleep(0.1)  # until the next one is ready
    return times


async def _open_and_close(pool: WorkspacePool) -> None:
    (await pool.open()).close()


async def at_once(pool: WorkspacePool, count: int) -> int:
    """Return how many of the workspaces that are open at once have their own file."""

    async def serve(number: int) -> bool:
        async with await pool.open() as workspace:
            await workspace.run(f"echo {number} > mine")
            await all_open.wait()
            return (await workspace.run("cat mine")).output == f"{number}\n"

    all_open = asyncio.Barrier(count)
    return sum(await asyncio.gather(*map(serve, range(count))))


async def time_outs(pool: WorkspacePool, count: int, side_by_side: int) -> dict[str, int]:
    """Return the state of folders and processes after commands that hang."""
    found = {"timeouts": 0, "folders_lost": 0, "processes_left": 0}
    numbers = iter(range(count))

    async def serve() -> None:
        workspace: Workspace | None = None
        for number in numbers:
            if workspace is None or workspace.stopped is not None:
                workspace = await pool.open()
            await workspace.run(f"echo {number} > mine")
            result = await workspace.run(HANGS[number % len(HANGS)], timeout_s=0.3)
            found["timeouts"] += result.timed_out
            found["folders_lost"] += (await workspace.run("cat mine")).output != f"{number}\n"
            found["processes_left"] += (await workspace.run(_COUNT)).output != _OWN_PROCESSES
        if workspace is not None:
            workspace.close()

    await asyncio.gather(*(serve() for _ in range(side_by_side)))
    return found


def held() -> dict[str, int]:
    """Count this process's resources of each kind that could leak.

    `tempfile.tempdir` has to be a folder of its own: others use the machine's, too.
    """
    parent = find_parent()
    return {
        "processes": len(psutil.Process().children(recursive=True)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "folders": len(os.listdir(tempfile.gettempdir())),
        "groups": 0 if parent is None else len(list(parent.glob(f"verl-multiturn-{os.getpid()}-*"))),
    }


async def measure(openings: int, commands: int, workspaces: int, hangs: int, side_by_side: int = 16) -> dict[str, Any]:
    """Return the figures of all parts.

    Args:
        openings: Number of openings.
        commands: Number of commands.
        workspaces: Number of workspaces open at once.
        hangs: Number of time-outs.
        side_by_side: Number of workspaces among which the time-outs are shared out.
    """
    found: dict[str, Any] = {}
    started = time.perf_counter()
    async with WorkspacePool(WorkspaceSettings(memory_mb=256, disk_mb=32)) as pool:
        found["first_ms"] = await timed_ms(lambda: _open_and_close(pool))
        opened = await openings_ms(pool, openings)
        async with await pool.open() as workspace:
            ran = [await timed_ms(lambda: workspace.run("true")) for _ in range(commands)]
        for name, times in (("open", opened), ("command", ran)):
            found[f"{name}_p50_ms"] = statistics.median(times)
            found[f"{name}_p95_ms"] = sorted(times)[int(0.95 * len(times))]
        found["at_once"] = await at_once(pool, workspaces)
        found |= await time_outs(pool, hangs, side_by_side)
    return {name: round(value, 2) for name, value in found.items()} | {
        "seconds": round(time.perf_counter() - started, 1)
    }


def main() -> None:
    """Measure, and print the figures as one line of JSON; end with 1 if a folder was lost or something remains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openings", type=int, default=100)
    parser.add_argument("--commands", type=int, default=300)
    parser.add_argument("--workspaces", type=int, default=128)
    parser.add_argument("--timeouts", type=int, default=500)
    options = parser.parse_args()
    asyncio.run(asyncio.sleep(0))  # the event loop opens it once
    with tempfile.TemporaryDirectory() as tempfile.tempdir:
        before = held()
        figures = asyncio.run(measure(options.openings, options.commands, options.workspaces, options.timeouts))
        after = held()
    left = {kind: after[kind] - before[kind] for kind in before if after[kind] != before[kind]}
    figures |= {"leaks": sum(map(abs, left.values())), "left": left}
    print(json.dumps(figures))
    whole = figures["timeouts"] == options.timeouts and figures["at_once"] == options.workspaces
    sys.exit(not whole or bool(figures["folders_lost"] or figures["processes_left"] or figures["leaks"]))


if __name__ == "__main__":
    main()

"""Resources that a process holds and could leak, for the benchmarks that inject faults."""

from __future__ import annotations

import asyncio
import gc
import threading

import psutil


def held(threads: tuple[str, ...]) -> dict[str, int]:
    """Count this process's resources.

    Args:
        threads: Beginnings of the names of the threads that count.
    """
    gc.collect()
    process = psutil.Process()
    return {
        "processes": len(process.children(recursive=True)),
        "file descriptors": process.num_fds(),
        "threads": sum(thread.name.startswith(threads) for thread in threading.enumerate()),
    }


async def left(before: dict[str, int], threads: tuple[str, ...], within_s: float = 15.0) -> dict[str, int]:
    """Return this process's resources beyond `before`, tasks included. Calls that were given up have time to end.

    Args:
        before: Result of `held` when nothing had begun.
        threads: As in `held`.
        within_s: Largest number of seconds to wait until nothing remains.
    """
    until = asyncio.get_running_loop().time() + within_s
    while True:
        after = held(threads) | {"tasks": len(asyncio.all_tasks()) - 1}
        leaks = {name: max(0, count - before.get(name, 0)) for name, count in after.items()}
        if not any(leaks.values()) or asyncio.get_running_loop().time() > until:
            return leaks
        await asyncio.sleep(0.2)

"""Cost of a call of the sandboxed interpreter, through the real `PythonTool`.

    python -m benchmarks.sandbox_speed

It measures one-shot calls of `print(1 + 1)`, each in a conversation (and so a sandbox) of its own: their latency one
after the other, with the pool warm, and their rate with `--concurrency` calls at a time. It also measures the first
call of a worker, a call of a stateful conversation, and bubblewrap with a fresh Python for each call, which is the cost
that the pool saves.

`benchmarks/speed/tool_speed.py` reports `sandbox_p50_ms` and `sandbox_calls_per_s` of `measure()`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from verl_multiturn.sandbox.settings import SandboxSettings
from verl_multiturn.sandbox.view import bwrap_arguments, find_bwrap
from verl_multiturn.tools.python import PythonTool

_CODE = {"code": "print(1 + 1)"}


async def _call(tool: PythonTool, conversation: str) -> None:
    """Run a whole conversation with one call."""
    await tool.create(conversation)
    try:
        answer = (await tool.execute(conversation, _CODE)).text
    finally:
        await tool.release(conversation)
    assert answer == "2\n", answer


async def _execute_ms(tool: PythonTool, conversation: str) -> float:
    started = time.perf_counter()
    answer = (await tool.execute(conversation, _CODE)).text
    elapsed_ms = (time.perf_counter() - started) * 1000
    assert answer == "2\n", answer
    return elapsed_ms


async def _one_shot(calls: int, concurrency: int) -> dict[str, float]:
    tool = PythonTool({"stateful": False, "pool": 2 * concurrency})
    try:
        started = time.perf_counter()
        await _call(tool, "cold")
        cold_ms = (time.perf_counter() - started) * 1000
        latencies_ms = []
        for i in range(calls):
            await tool.create(f"alone-{i}")
            latencies_ms.append(await _execute_ms(tool, f"alone-{i}"))
            await tool.release(f"alone-{i}")
        numbers = iter(range(calls))

        async def worker() -> None:
            for i in numbers:
                await _call(tool, f"many-{i}")

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        seconds = time.perf_counter() - started
    finally:
        await tool.aclose()
    return {
        "sandbox_p50_ms": statistics.median(latencies_ms),
        "sandbox_p95_ms": statistics.quantiles(latencies_ms, n=20)[-1],
        "sandbox_calls_per_s": calls / seconds,
        "cold_start_ms": cold_ms,
    }


async def _stateful(calls: int) -> float:
    tool = PythonTool({"stateful": True})
    try:
        await tool.create("one")
        await tool.execute("one", _CODE)
        latencies_ms = [await _execute_ms(tool, "one") for _ in range(calls)]
        await tool.release("one")
    finally:
        await tool.aclose()
    return statistics.median(latencies_ms)


def _fresh_bwrap(calls: int) -> float:
    python = [os.path.realpath(sys.executable), "-I", "-S", "-c", _CODE["code"]]
    command = [find_bwrap(), *bwrap_arguments(SandboxSettings()), *python]
    latencies_ms = []
    for _ in range(calls):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env={})
        latencies_ms.append((time.perf_counter() - started) * 1000)
    return statistics.median(latencies_ms)


def measure(calls: int = 400, concurrency: int = 4) -> dict[str, float]:
    """Measure all figures.

    Args:
        calls: Number of calls for each figure; a tenth of it for bubblewrap with a fresh Python.
        concurrency: Number of calls at a time for the rate.

    Returns:
        Milliseconds (`…_ms`), and calls per second (`…_per_s`).
    """
    figures: dict[str, Any] = asyncio.run(_one_shot(calls, concurrency))
    figures["stateful_p50_ms"] = asyncio.run(_stateful(calls))
    figures["fresh_bwrap_p50_ms"] = _fresh_bwrap(max(2, calls // 10))
    return {name: round(value, 2) for name, value in figures.items()}


def main() -> None:
    """Print the figures as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--concurrency", type=int, default=4)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.calls, arguments.concurrency)))


if __name__ == "__main__":
    main()

"""A tool with every fault that `benchmarks.tool_faults` injects."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from verl_multiturn import BaseTool, ToolResponse, ToolSchema

TIMEOUT_S = 0.2


EXECUTE = (
    "hang", "sleep", "raise", "exit", "cancels_itself", "big", "invalid_utf8", "child_killed", "fork", "leaks_thread",
    "sync_hang", "ignores_cancellation", "blocks_loop", "odd_metrics", "oserror", "recursion", "stop_iteration",
    "drips", "unspeakable", "far_unspeakable", "unspeakable_metrics", "nan_reward", "huge_reward",
    "big_metrics", "image", "far_reward", "farther_reward", "nan_array_reward", "array_reward",
)  # fmt: skip


LIFECYCLE = ("hang", "raise", "cancels_itself", "sleep", "unspeakable")


BIG = {"many": [0] * 1_000_000, "text": "x" * 10_000_000}


class Unspeakable(Exception):
    """An exception that raises in the place of giving its text."""

    def __str__(self) -> str:
        raise AttributeError("response")

    __repr__ = __str__


class FarUnspeakable(BaseException):
    """A `BaseException` that raises in the place of giving its text; no `except Exception` catches it."""

    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class Tally:
    """Counts of injected faults, and of events in the tools."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        self.created: Counter[str] = Counter()
        self.released: Counter[str] = Counter()
        self.after_release = 0
        self.shared: dict[str, list[str]] = {"notes": []}
        """Object that every row shares. Each tool writes into the copy that it gets."""


class FaultyTool(BaseTool):
    """A tool that misbehaves by its argument or its row; it keeps a temporary folder for each conversation."""

    def __init__(self, name: str, tally: Tally, root: Path) -> None:
        parameters = {"type": "object", "properties": {"fault": {"type": "string"}}, "required": ["fault"]}
        function = {"name": name, "description": "Misbehaves.", "parameters": parameters}
        super().__init__({}, ToolSchema.read({"type": "function", "function": function}, "benchmark"))
        self.tally = tally
        self.root = root

    def folder(self, instance_id: str) -> Path:
        """Return the temporary folder of a conversation."""
        return self.root / f"{self.name}-{instance_id}"

    async def create(self, instance_id: str, fault: str = "", **kwargs: Any) -> None:
        """Make the conversation's folder, then misbehave by the row."""
        self.tally.created[f"{self.name} {instance_id}"] += 1
        self.folder(instance_id).mkdir()
        await self.misbehave("create", fault)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Write into the row's shared object, then misbehave by the argument."""
        self.tally.after_release += self.tally.released[f"{self.name} {instance_id}"]
        fault = parameters.pop("fault")
        kwargs["shared"]["notes"].append(instance_id)
        self.tally.faults[f"execute {fault}"] += bool(fault)
        return await getattr(self, f"do_{fault or 'nothing'}")()

    async def calc_reward(self, instance_id: str, fault: str = "", **kwargs: Any) -> float:
        """Misbehave by the row, else return 1.0."""
        await self.misbehave("calc_reward", fault)
        return float("nan") if fault == "sleep" else 1.0

    async def release(self, instance_id: str, fault: str = "", **kwargs: Any) -> None:
        """Remove the conversation's folder, then misbehave by the row."""
        self.tally.released[f"{self.name} {instance_id}"] += 1
        shutil.rmtree(self.folder(instance_id))
        # The runtime waits 5 s for a tool that hangs here. Only a few do, or the benchmark would take hours.
        await self.misbehave("release", fault)

    async def misbehave(self, method: str, fault: str) -> None:
        """Do one of the faults `LIFECYCLE`; any other name does nothing."""
        self.tally.faults[f"{method} {fault}"] += bool(fault)
        if fault == "hang":
            await asyncio.Event().wait()
        elif fault == "sleep":
            await asyncio.sleep(2 * TIMEOUT_S)
        elif fault == "raise":
            raise RuntimeError(f"{method} fails")
        elif fault == "cancels_itself":
            raise asyncio.CancelledError
        elif fault == "unspeakable":
            raise Unspeakable

    async def do_nothing(self) -> ToolResponse:
        """Answer as a good tool does."""
        return ToolResponse("ok")

    async def do_hang(self) -> None:
        """Hang forever."""
        await asyncio.Event().wait()

    async def do_sleep(self) -> str:
        """Answer after the time limit."""
        await asyncio.sleep(2 * TIMEOUT_S)
        return "too late"

    async def do_raise(self) -> None:
        """Raise an ordinary error."""
        raise KeyError("of the tool")

    async def do_exit(self) -> None:
        """Raise `SystemExit`."""
        sys.exit(3)

    async def do_cancels_itself(self) -> None:
        """Raise `CancelledError`."""
        raise asyncio.CancelledError

    async def do_big(self) -> str:
        """Return 10 million characters."""
        return "0123456789" * 1_000_000

    async def do_invalid_utf8(self) -> str:
        """Return lone surrogates, which UTF-8 cannot encode."""
        return "\ud800\udfff " + b"\xff\xfe".decode("utf-8", "surrogateescape")

    async def do_child_killed(self) -> str:
        """Start a process that kills itself."""
        child = await asyncio.create_subprocess_exec("sh", "-c", "kill -9 $$")
        return f"exit status {await child.wait()}"

    async def do_fork(self) -> str:
        """Fork; the child returns into the conversation's loop."""
        child = os.fork()
        if child == 0:
            return "the child goes on with the conversation"
        return f"exit status {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}"  # noqa: ASYNC222  # ends at once

    async def do_leaks_thread(self) -> str:
        """Leave a thread running."""
        threading.Thread(target=time.sleep, args=(1.0,), daemon=True, name="leaked").start()
        return "left a thread behind"

    async def do_sync_hang(self) -> str:
        """Block a thread beyond the time limit."""
        await asyncio.to_thread(time.sleep, 2 * TIMEOUT_S)
        return "too late"

    async def do_ignores_cancellation(self) -> str:
        """Go on after a cancellation, until three time limits have passed."""
        until = time.monotonic() + 3 * TIMEOUT_S
        while time.monotonic() < until:
            try:
                await asyncio.sleep(until - time.monotonic())
            except asyncio.CancelledError:
                continue
        return "at last"

    async def do_blocks_loop(self) -> str:
        """Block the event loop for 5 ms."""
        time.sleep(0.005)  # noqa: ASYNC251  # the fault
        return "held everybody up"

    async def do_odd_metrics(self) -> Any:
        """Return metrics that JSON cannot hold."""
        return "ok", True, {("a", "tuple"): object(), "set": {1, 2}}

    async def do_oserror(self) -> None:
        """Raise an `OSError`."""
        raise OSError(24, "Too many open files")

    async def do_recursion(self) -> Any:
        """Recurse without end."""
        return await self.do_recursion()

    async def do_stop_iteration(self) -> None:
        """Raise an error with half a character in its text, caused by `StopAsyncIteration`."""
        raise ValueError("half a character \ud83d") from StopAsyncIteration()

    async def do_drips(self) -> str:
        """Sleep in small steps, 10 s in all."""
        for _ in range(1000):
            await asyncio.sleep(0.01)
        return "done"

    async def do_unspeakable(self) -> None:
        """Raise `Unspeakable`."""
        raise Unspeakable

    async def do_far_unspeakable(self) -> None:
        """Raise `FarUnspeakable`."""
        raise FarUnspeakable

    async def do_unspeakable_metrics(self) -> Any:
        """Return metrics that raise when converted to text."""
        return "ok", 0.0, {"odd": Unspeakable(), "deep": [{"er": Unspeakable()}]}

    async def do_nan_reward(self) -> Any:
        """Return a reward of NaN."""
        return "ok", float("nan"), {}

    async def do_huge_reward(self) -> Any:
        """Return a reward too large for a float."""
        return "ok", 10**400, {"huge": 10**5000}

    async def do_far_reward(self) -> Any:
        """Return a reward that is infinite as float32."""
        return "ok", 1e39, {}

    async def do_farther_reward(self) -> Any:
        """Return a reward of NumPy near the end of Python's floats."""
        return "ok", np.float64(-1e300), {}

    async def do_nan_array_reward(self) -> Any:
        """Return NaN in an array without dimensions."""
        return "ok", np.array(np.nan), {}

    async def do_array_reward(self) -> Any:
        """Return a reward and a metric in arrays without dimensions."""
        return "ok", np.array(0.5), {"array": np.array(0.5)}

    async def do_big_metrics(self) -> Any:
        """Return metrics with a million numbers and ten million characters."""
        return "ok", 0.0, BIG

    async def do_image(self) -> Any:
        """Return an image."""
        return ToolResponse("a picture", image=[Image.new("RGB", (8, 8))])

    async def do_wrong_type(self) -> Any:
        """Return the wrong type: the author's mistake."""
        return 42

"""Tools for the tests of `check-tool`: a sound one, and others that are broken in one way each."""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import pytest

from tests.conftest import make_schema
from tests.idle_loop import IdleLoop
from verl_multiturn import BaseTool, ToolResponse, ToolSchema
from verl_multiturn.checking import examination, instruments

never = threading.Event()
seen = threading.Event()
"""Set by the tests when the watch has seen that the loop is blocked."""
processes: list[subprocess.Popen[bytes]] = []


def on_any_machine(patch: pytest.MonkeyPatch, late_s: float = 60.0) -> None:
    """Let a check find the same on a busy machine.

    Args:
        patch: The test's own.
        late_s: Seconds for which the loop may be blocked, as it does where the machine is busy.
    """
    patch.setattr(asyncio.events, "new_event_loop", IdleLoop)
    patch.setattr(instruments, "SETTLE_S", 0.3)
    for module in (instruments, examination):
        patch.setattr(module, "LATE_S", late_s)


class Sound(BaseTool):
    """A sound tool: state under the instance_id, waits that may be cancelled, no leaks."""

    def __init__(self, config: dict[str, Any] | None = None, tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config or {}, tool_schema)
        self.notes: dict[str, list[str]] = {}

    def get_schema(self) -> ToolSchema:
        text = {"type": "string", "description": "What to write down.", "examples": ["tea"]}
        parameters = {"type": "object", "properties": {"text": text}, "required": ["text"]}
        function = {"name": "notes", "description": "Write down, and read all.", "parameters": parameters}
        return ToolSchema.read({"type": "function", "function": function}, "test")

    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        await asyncio.sleep(0.002)
        self.notes[instance_id] = []

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        await asyncio.sleep(0.01)
        self.notes[instance_id].append(parameters["text"])
        return ToolResponse(" ".join(self.notes[instance_id])[:1000])

    async def release(self, instance_id: str, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        self.notes.pop(instance_id, None)


class NoResult(Sound):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return 42


class NoId(Sound):
    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        return 42


class NoNumber(Sound):
    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return float("nan")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise AttributeError("response")

    __repr__ = __str__


class RaisesWhatCannotBeTold(Sound):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        raise Unspeakable


class ReturnsWhatCannotBeTold(Sound):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return Unspeakable()


class NoFiniteStep(Sound):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return "ok", float("inf"), {}


class Raises(Sound):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        raise AttributeError("no such thing")


class WithoutItsService(Sound):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        raise ConnectionRefusedError("nobody listens")


class Exits(Sound):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        sys.exit(3)


class CreateHangs(Sound):
    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        await asyncio.Event().wait()


class ReleaseRaises(Sound):
    async def release(self, instance_id: str, **kwargs: Any) -> Any:
        raise RuntimeError("boom")


class Blocks(Sound):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        seen.clear()
        time.sleep(0.15)  # noqa: ASYNC251  # the fault that the check must find
        seen.wait(60)
        return await super().execute(instance_id, parameters)


class KeepsLock(Sound):
    """A tool whose regular expression backtracks for over 0.3 s, and keeps the interpreter's lock meanwhile."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        began, length = time.monotonic(), 20
        while time.monotonic() - began < 0.3:
            began, length = time.monotonic(), length + 1
            re.match(r"(a+)+$", "a" * length + "b")
        return await super().execute(instance_id, parameters)


class BlocksForEver(Sound):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        never.wait()


class OneForAll(Sound):
    """A tool that serves only the conversation that began last."""

    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        self.text = ""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.text += parameters["text"]
        return ToolResponse(self.text[-1000:])


class SameId(Sound):
    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        self.notes["me"] = []
        return "me"

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse("ok")


class SharedCounter(Sound):
    calls = 0

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.calls += 1
        return ToolResponse(f"call number {self.calls}")


class FewSeats(Sound):
    """A tool that waits in `create` for a seat that others give back in `release`."""

    def __init__(self) -> None:
        super().__init__()
        self.seats = asyncio.Semaphore(8)

    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        await self.seats.acquire()
        self.notes[instance_id] = []

    async def release(self, instance_id: str, **kwargs: Any) -> Any:
        if self.notes.pop(instance_id, None) is not None:
            self.seats.release()


class OneAfterTheOther(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.lock = asyncio.Lock()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        async with self.lock:
            await asyncio.sleep(0.03)
        return ToolResponse("ok")


class LeavesTask(Sound):
    """A tool whose task stays behind when the call is cancelled."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        task = asyncio.create_task(asyncio.sleep(30), name="left behind")
        await asyncio.sleep(0.02)
        task.cancel()
        return ToolResponse("ok")


class LeavesProcess(Sound):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        process = subprocess.Popen(["sleep", "20"])  # noqa: ASYNC220  # quick enough here
        processes.append(process)
        await asyncio.sleep(0.02)
        process.kill()
        process.wait()
        return ToolResponse("ok")


class LeavesFolder(Sound):
    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        folder = tempfile.mkdtemp()
        await asyncio.sleep(0.01)
        self.notes[instance_id] = [folder]

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse("ok")

    async def release(self, instance_id: str, **kwargs: Any) -> Any:
        for folder in self.notes.pop(instance_id, []):
            os.rmdir(folder)


class LeavesDescriptor(Sound):
    """A tool whose `release` closes its descriptors only after a wait, in which it may be cancelled."""

    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        self.notes[instance_id] = [os.open(os.devnull, os.O_RDONLY)]  # type: ignore[list-item]

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse("ok")

    async def release(self, instance_id: str, **kwargs: Any) -> Any:
        descriptors = self.notes.pop(instance_id, [])
        await asyncio.sleep(0.01)
        for descriptor in descriptors:
            os.close(descriptor)  # type: ignore[arg-type]


class LeavesThread(Sound):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        threading.Thread(target=never.wait, args=(20,), daemon=True, name="left behind").start()
        return ToolResponse("ok")


class LeavesZombie(Sound):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        processes.append(subprocess.Popen(["true"]))  # noqa: ASYNC220  # quick enough here
        return ToolResponse("ok")


class Remembers(Sound):
    async def release(self, instance_id: str, **kwargs: Any) -> Any:
        pass


class Stubborn(Sound):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            await asyncio.sleep(0.5)
        return ToolResponse("ok")


class Spoiled(Sound):
    """A tool whose cancelled call takes away the state that `release` needs."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        notes = self.notes.pop(instance_id)
        await asyncio.sleep(0.01)
        self.notes[instance_id] = notes
        return ToolResponse("ok")

    async def release(self, instance_id: str, **kwargs: Any) -> Any:
        del self.notes[instance_id]


class KeepsTheRow(Sound):
    """A tool that writes into the list that the row gave it."""

    async def create(self, instance_id: str, notes: list[str] | None = None, **kwargs: Any) -> Any:
        self.notes[instance_id] = [] if notes is None else notes


class EatsItsArguments(Sound):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse(parameters.pop("text")[:1000])


class Demanding(Sound):
    """A tool whose schema does not name the argument it needs."""

    def get_schema(self) -> ToolSchema:
        schema = super().get_schema().as_dict()
        schema["function"]["parameters"]["required"] = []
        return ToolSchema.read(schema, "test")


class Chatty(Sound):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse("long " * 10_000)


class Unsure(Sound):
    """A tool that requires an argument without describing it, and has no description itself."""

    def get_schema(self) -> ToolSchema:
        schema = make_schema("no.tes", text="string").as_dict()
        schema["function"]["description"] = ""
        schema["function"]["parameters"]["required"] = ["text", "colour"]
        return ToolSchema.read(schema, "test")

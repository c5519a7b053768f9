"""Instruments of `contract`: call a tool's methods, find what they leave behind, watch the event loop, make arguments.

Invariants:
- a method is called as the runtime calls it: with a copy of bound kwargs, in a task of its own, a synchronous one in a
  thread;
- only growth counts: a tool may keep a pool or a connection, but may not let it grow.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import inspect
import json
import os
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from verl_multiturn.describe import message_of, show
from verl_multiturn.errors import ToolContractError
from verl_multiturn.tasks import finish
from verl_multiturn.tools.agent_data import AgentData
from verl_multiturn.tools.base import is_foreign
from verl_multiturn.tools.calls.call import is_coroutine_method, read_answer, read_reward
from verl_multiturn.tools.kwargs import bind_kwargs, copy_kwargs
from verl_multiturn.tools.registry import METHODS, schema_of

_PULSE_S = 0.005
LATE_S = 0.1
"""Seconds for which the event loop may stand still; longer, it holds up the other conversations."""
_SETTLE_S = 2.0
_ENOUGH = 10_000_000
# A guessed number is small, since the tool may use it as a number of rounds.
_SMALL = 7


class HangsError(Exception):
    """A method did not end in time."""


@dataclass(frozen=True)
class Probed:
    """Result of a call of a method: a value or an error, and the seconds that it took."""

    value: Any = None
    error: Exception | None = None
    seconds: float = 0.0

    @property
    def timed_out(self) -> bool:
        """True if the method did not end in time."""
        return isinstance(self.error, HangsError)

    def text(self, name: str) -> str:
        """Return the text that the model would read; `name` is the tool's, for the error.

        Raises:
            ToolContractError: The value is no result of a tool.
        """
        if self.error is not None:
            return f"Error: {message_of(self.error)}"
        return read_answer(name, self.value, _ENOUGH, foreign=True).text


def own_id(created: Any, given: str) -> str:
    """Return a conversation's id: the one that `create` returned, otherwise the given one."""
    own = created[0] if isinstance(created, tuple) and created else created
    return own if isinstance(own, str) else given


class Probe:
    """A tool under examination.

    Args:
        tool: The tool.
        kwargs: The kwargs of a data row: `create_kwargs`, `execute_kwargs`, …
        timeout_s: Seconds after which a method counts as hanging.
    """

    def __init__(self, tool: Any, kwargs: Mapping[str, Mapping[str, Any]], timeout_s: float) -> None:
        self.tool = tool
        self.schema = schema_of(tool)
        self.timeout_s = timeout_s
        self.is_coroutine = {method: is_coroutine_method(getattr(tool, method)) for method in METHODS}
        self._kwargs: dict[str, dict[str, Any]] = {}
        for method in METHODS:
            bound = bind_kwargs(tool, method, kwargs.get(f"{method}_kwargs", {}), "check-tool")
            self._kwargs[method] = copy_kwargs(bound, tool.name, method, "check-tool")
        self._agent_data: defaultdict[str, AgentData] = defaultdict(
            lambda: AgentData(uuid.uuid4().hex, {tool.name: kwargs})
        )
        self.given: list[tuple[str, Any, str]] | None = None
        """Calls while it is a list: method, what was passed, and the `repr` of that before the call."""

    def invoke(self, method: str, *arguments: Any) -> asyncio.Task[Any]:
        """Start a call of a method, and return its task."""
        kwargs = copy.deepcopy(self._kwargs[method])
        if method == "execute" and kwargs.get("agent_data", self) is None:
            kwargs["agent_data"] = self._agent_data[arguments[0]]
        if self.given is not None:
            self.given.append((method, (arguments, kwargs), repr((arguments, kwargs))))
        call = partial(getattr(self.tool, method), *arguments, **kwargs)
        run = _awaited(call) if self.is_coroutine[method] else _threaded(call)
        return asyncio.create_task(run, name=f"{method} of the tool")

    async def call(self, method: str, *arguments: Any) -> Probed:
        """Call a method, and return how it ended; one that does not end within `timeout_s` is cancelled."""
        started = time.perf_counter()
        task = self.invoke(method, *arguments)
        await asyncio.wait({task}, timeout=self.timeout_s)
        seconds = time.perf_counter() - started
        if not task.done():
            task.cancel()
            return Probed(error=HangsError(f"no answer within {self.timeout_s:g} s"), seconds=seconds)
        if task.cancelled():
            return Probed(error=RuntimeError("the tool was cancelled by its own code"), seconds=seconds)
        error = task.exception()
        if isinstance(error, Exception):
            return Probed(error=error, seconds=seconds)
        return Probed(task.result(), seconds=seconds)

    async def begin(self, instance_id: str | None = None) -> tuple[str, Probed]:
        """Create a conversation, and return the id for its other methods and the outcome of `create`."""
        given = instance_id or uuid.uuid4().hex
        created = await self.call("create", given)
        return own_id(created.value, given), created

    async def converse(self, calls: Sequence[Mapping[str, Any]]) -> list[str]:
        """Run a whole conversation with calls of these arguments, and return the texts that the model would read."""
        instance_id, _ = await self.begin()
        outcomes = [await self.call("execute", instance_id, dict(arguments)) for arguments in calls]
        await self.call("release", instance_id)
        return [outcome.text(self.tool.name) for outcome in outcomes]

    async def cancel(self, method: str, wait: Callable[[], Awaitable[None]], *arguments: Any) -> tuple[bool, Any]:
        """Start a call, cancel it after `wait`, and return whether it ended, and its value if it returned one."""
        task = self.invoke(method, *arguments)
        await asyncio.sleep(0)
        await wait()
        task.cancel()
        # A thread cannot be cancelled: it gets the time to end by itself.
        await asyncio.wait({task}, timeout=_SETTLE_S if self.is_coroutine[method] else self.timeout_s)
        if not task.done() or task.cancelled() or task.exception() is not None:
            return task.done(), None
        return True, task.result()


async def _awaited(call: Callable[[], Any]) -> Any:
    try:
        return await call()
    except SystemExit as error:
        raise RuntimeError(f"the tool called exit({show(error.code)})") from error


async def _threaded(call: Callable[[], Any]) -> Any:
    """Run a call in a thread of its own, and wait for its end, also when cancelled."""
    ended: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:  # pass it on, in a form that a future accepts
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            ended.set_exception(error if plain else RuntimeError(f"the tool raised {show(error)}"))

    threading.Thread(target=run, daemon=True, name="thread of the tool").start()
    returned = await finish(asyncio.wrap_future(ended))
    return await returned if inspect.isawaitable(returned) else returned


@dataclass(frozen=True)
class Snapshot:
    """Names of what this process has open, by kind: tasks, threads, processes, descriptors, temporary files."""

    kinds: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def take(cls, temporary: Path) -> Snapshot:
        """Take a snapshot now; `temporary` is the folder of temporary files."""
        descriptors = Path("/proc/self/fd")
        return cls(
            {
                "task": [task.get_name() for task in asyncio.all_tasks()],
                "thread": [thread.name for thread in threading.enumerate()],
                "process": [_describe(process) for process in psutil.Process().children(recursive=True)],
                "file descriptor": [_target(entry) for entry in descriptors.iterdir()] if descriptors.is_dir() else [],
                "temporary file": [entry.name for entry in temporary.iterdir()],
            }
        )

    def beyond(self, before: Snapshot) -> list[str]:
        """Return the kinds of which there is more than before, in words."""
        found = []
        for kind, items in self.kinds.items():
            earlier = list(before.kinds[kind])
            new = [item for item in items if not _take_out(item, earlier)]
            if (count := len(items) - len(before.kinds[kind])) > 0:
                found.append(f"{count} {kind}{'' if count == 1 else 's'} ({', '.join(new[:3])})")
        return found


def _take_out(item: str, of: list[str]) -> bool:
    if item in of:
        of.remove(item)
        return True
    return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.name()}"
    except psutil.Error:
        return str(process.pid)


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:
        return "closed"


async def growth(action: Callable[[], Awaitable[None]], temporary: Path) -> list[str]:
    """Return what an action leaves behind every time that it runs; what it leaves only once may be a pool."""
    await action()
    before = await _settled(Snapshot(), temporary)
    found: list[str] = []
    for _ in range(2):
        await action()
        after = await _settled(before, temporary)
        found = after.beyond(before)
        if not found:
            return []
        before = after
    return found


async def _settled(before: Snapshot, temporary: Path) -> Snapshot:
    """Take a snapshot, after waiting for what takes a moment to end."""
    until = time.monotonic() + (_SETTLE_S if before.kinds else 0.1)
    while True:
        await asyncio.sleep(0.02)
        now = Snapshot.take(temporary)
        if time.monotonic() > until or (before.kinds and not now.beyond(before)):
            return now


@contextmanager
def private_temporary_folder() -> Iterator[Path]:
    """Use a new folder for this process's temporary files, as a context manager."""
    variable, cached = os.environ.get("TMPDIR"), tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="check-tool-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = cached
            if variable is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = variable


class Watch:
    """Watch over an event loop from another thread: when it stands still, and at which line of code."""

    def __init__(self) -> None:
        self.blocks: list[tuple[float, str]] = []
        """Seconds and place of each standstill, in order."""
        self._beat = time.perf_counter()
        self._place = ""
        self._thread = 0

    async def pulse(self) -> None:
        """Note that the loop runs, again and again; run it as a task on the loop."""
        self._thread = threading.get_ident()
        while True:
            self._beat = time.perf_counter()
            await asyncio.sleep(_PULSE_S)
            late = time.perf_counter() - self._beat - _PULSE_S
            if late > LATE_S:
                self.blocks.append((late, self._place))
            self._place = ""

    def look(self) -> float:
        """Return the seconds for which the loop has stood still; the other thread calls it again and again."""
        late = time.perf_counter() - self._beat - _PULSE_S
        if late > LATE_S and not self._place:
            self._place = _place(sys._current_frames().get(self._thread))
        return late

    @property
    def place(self) -> str:
        """Line of code at which the loop stands still now."""
        return self._place

    async def longest(self, awaited: Awaitable[Probed]) -> tuple[Probed, float, str]:
        """Await an outcome, and return it with the seconds and the place of the longest standstill meanwhile."""
        await asyncio.sleep(2 * _PULSE_S)
        self.blocks.clear()
        outcome = await awaited
        await asyncio.sleep(2 * _PULSE_S)
        seconds, place = max(self.blocks, default=(0.0, ""))
        return outcome, seconds, place


def _place(frame: Any) -> str:
    """Return the innermost line of code that belongs to no library; otherwise the innermost line of all."""
    libraries = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib"))
    innermost = ""
    while frame is not None:
        code = frame.f_code
        place = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        if not code.co_filename.startswith((*libraries, "<")):
            return place
        innermost = innermost or place
        frame = frame.f_back
    return innermost


def example_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Guess arguments from a schema's examples, defaults and types; check them against the schema."""
    value = _example(schema)
    return value if isinstance(value, dict) else {}


def _example(schema: Mapping[str, Any]) -> Any:
    if schema.get("examples"):
        return schema["examples"][0]
    for key in ("default", "const"):
        if schema.get(key) is not None:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        options = [option for option in schema.get(key, []) if option.get("type") != "null"]
        if options:
            return _example(options[0])
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        required = schema.get("required", [])
        properties = schema.get("properties", {})
        return {name: _example(of) for name, of in properties.items() if name in required or of.get("examples")}
    if kind == "array":
        return [_example(schema.get("items") or {})] * max(1, schema.get("minItems", 1))
    if kind in ("integer", "number"):
        least = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
        return min(least, schema.get("maximum", least))
    if kind == "boolean":
        return True
    return "example".ljust(schema.get("minLength", 0), "e")[: schema.get("maxLength", 100)]


def bad_arguments(schema: Mapping[str, Any], good: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return wrong arguments as a model may write them, by a short description; `good` are right ones."""
    names = list(schema.get("properties", {}))
    cases: dict[str, dict[str, Any]] = {"nothing": {}, "an unknown argument": {**good, "no_such_argument": 1}}
    for name in names:
        cases[f"{name!r} left out"] = {key: value for key, value in good.items() if key != name}
        for kind, value in (("null", None), ("a number", _SMALL), ("an array", []), ("an object", {"a": 1})):
            cases[f"{name!r} as {kind}"] = {**good, name: value}
        if isinstance(good.get(name), str):
            cases[f"{name!r} empty"] = {**good, name: ""}
            cases[f"{name!r} of a million characters"] = {**good, name: "x" * 1_000_000}
            cases[f"{name!r} with control characters"] = {**good, name: "\x00\x1b[31m \ud800 \u202e"}
    return cases


def as_call(arguments: Mapping[str, Any]) -> str:
    """Return arguments as the JSON text of a call."""
    return json.dumps(dict(arguments))


def is_result(tool: Any, outcome: Probed) -> str:
    """Return what is wrong with what `execute` returned; an empty text if it is a result."""
    value, foreign = outcome.value, is_foreign(tool)
    try:
        read_answer(tool.name, value, _ENOUGH, foreign)
        reward = value[1] if isinstance(value, tuple) and not foreign else None
        if reward is not None and read_reward(tool.name, "execute", reward) is None:
            return f"the step reward must be a finite number, got {show(reward)}"
    except ToolContractError as error:
        return str(error)
    return ""

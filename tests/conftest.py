"""Shared pieces: a chat without a real tokenizer for unit tests, and tools that record calls of their methods."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import os
import random
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.idle_loop import IdleLoop
from tests.support.warm_python import session_servers
from verl_multiturn import BaseTool, ToolResponse, ToolSchema

ROOT = Path(__file__).resolve().parents[1]
_LONG = ROOT / "tests" / "long"
_OF_FILE = r"^pytestmark = (\[[^\]]*?)?pytest\.mark\.({})\b"
_OF_THE_STACK = re.compile(_OF_FILE.format("stack|engine"), re.MULTILINE)
_IS_LONG = re.compile(_OF_FILE.format("long"), re.MULTILINE)
_ASKED = re.compile(r"(stack|engine|deaths)( and not \w+)*")
# How long an example takes depends on the machine, not on the code. The examples are the same in each run, so that a
# failure is one of the change's; `--hypothesis-profile search` draws others, `all` draws more.
settings.register_profile("search", deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("any machine", settings.get_profile("search"), derandomize=True)
settings.register_profile("all", settings.get_profile("any machine"), max_examples=300)
settings.load_profile("any machine")
_SESSION = pytest.StashKey[pytest.Session]()
_SEEN = SimpleNamespace(modules=0)
# The default, 700, lets it look at the objects of a test a dozen times in each import.
gc.set_threshold(50_000, *gc.get_threshold()[1:])
END = 0x110000
"""Id of the token that ends a turn in `CharTokenizer`; no character has it."""


@pytest.fixture(autouse=True, scope="module")
def _no_workspaces_are_kept() -> Iterator[None]:
    """End the processes that `open_workspace` keeps for the life of a process, so that later tests do not see them."""
    yield
    threads: Any = sys.modules.get("verl_multiturn.workspaces.threads")
    if threads is not None:
        threads._kept.get().end()
        threads._kept.forget()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file or folder of which a run's expression of marks chooses no test.

    To read such a file would take its imports, which may be the whole stack.
    """
    files = list(collection_path.glob("test_*.py")) if collection_path.is_dir() else [collection_path]
    left_out = [_is_left_out(path, config) for path in files if path.match("test_*.py")]
    return True if left_out and all(left_out) else None


def _is_left_out(path: Path, config: pytest.Config) -> bool:
    """Return whether `not stack` or `not long` excludes a file, or no test in it has the requested mark."""
    text, expression = path.read_text(), config.option.markexpr
    if "not long" in expression and (_is_long(path, config) or _IS_LONG.search(text)):
        return True
    if "not stack" in expression:
        return bool(_OF_THE_STACK.search(text))
    asked = _ASKED.fullmatch(expression)
    return asked is not None and f"mark.{asked[1]}" not in text


def _is_long(path: Path, config: pytest.Config) -> bool:
    """Return whether a file's folder gives its tests the mark `long`.

    Where the command line names a file or folder of `tests/long`, as `benchmarks.mutants` does, it gives none: then
    `not long` chooses the short forms.
    """
    named = (config.invocation_params.dir / word.partition("::")[0] for word in config.args)
    return path.is_relative_to(_LONG) and not any(each.resolve().is_relative_to(_LONG) for each in named)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Leave such a file out also where the command line names it: then pytest does not ask the function above."""
    if pytest_ignore_collect(module_path, parent.config):
        return _LeftOut.from_parent(parent, path=module_path)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Give tests in `tests/long` the mark `long`."""
    for item in items:
        if _is_long(item.path, config):
            item.add_marker("long")


def _stack_modules() -> set[str]:
    return {"verl", "ray", "sglang"} & set(sys.modules)


_AT_START = _stack_modules()
"""Parts of the stack that this process, as a fork of one that has them, had before pytest began."""


class _LeftOut(pytest.Module):
    def collect(self) -> list[pytest.Item | pytest.Collector]:
        return []


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run with `-m "not stack"` that imported verl's stack: a test lacks the mark `stack`."""
    session.config.stash[_SESSION] = session
    gc.unfreeze()  # pytest's last check for unclosed resources sees all
    found = _stack_modules() - _AT_START
    if "not stack" in session.config.option.markexpr and found:
        pytest.exit(f"tests without the mark `stack` imported {sorted(found)}; mark them", returncode=1)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    leave_out_of_the_collector()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    if len(sys.modules) > _SEEN.modules + 100:
        leave_out_of_the_collector()


def leave_out_of_the_collector() -> None:
    """Let the garbage collector skip imported objects: it took a sixth of the tests' CPU time."""
    gc.collect()
    gc.freeze()
    _SEEN.modules = len(sys.modules)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End a run that imported verl's stack before the interpreter is taken down, with the tests' own exit status.

    Twice a native thread of that stack ran into memory that was freed meanwhile: the process died by SIGSEGV after the
    summary, and a run whose tests had passed would have failed. The necessary work at the end is done here as well.
    """
    if "ray" in sys.modules and _SESSION in config.stash and "PYTEST_CURRENT_TEST" not in os.environ:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(config.stash[_SESSION].exitstatus))


def pytest_asyncio_loop_factories() -> dict[str, type[IdleLoop]]:
    """Run every asynchronous test on a loop whose clock stops while the machine is busy."""
    return {"idle": IdleLoop}


class CharTokenizer:
    """A tokenizer with one id for each character; `END` is its only control token."""

    eos_token_id = END
    pad_token_id = END

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join("" if i == END and skip_special_tokens else "¶" if i == END else chr(i) for i in token_ids)

    def turn(self, text: str) -> list[int]:
        """Return the ids that an engine samples for a turn with this text."""
        return [*self.encode(text), END]


class Merged:
    def __init__(self, token_ids: list[int], inserted: list[int]) -> None:
        self.token_ids = token_ids
        self.inserted_token_ids = inserted
        self.removed_prefix_token_count = 0


class CharBuilder:
    """A Continuous Token builder in miniature: `P` and the prompt, `[text]` for each tool answer, `>` as the header."""

    def build_initial_tokens(self, messages: list[Any], *, tools: list[Any] | None = None) -> list[int]:
        return [ord(c) for c in "P" + "".join(m["content"] for m in messages) + ">"]

    def merge_context_tokens(
        self, previous: list[Any], updated: list[Any], runtime: list[int], *, tools: list[Any] | None = None
    ) -> Merged:
        inserted = [ord("\n")] if runtime[-1] == END else []
        added = "".join(f"[{m['content']}]" for m in updated[len(previous) :]) + ">"
        return Merged([*runtime, *inserted, *(ord(c) for c in added)], inserted)


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended.

    A zombie counts as ended, since process 1 of a container may never reap it.
    """
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def child_processes(recursive: bool = False) -> list[psutil.Process]:
    """Return this process's children, and with `recursive` all below them.

    The servers of `warm_python` are left out: a session keeps one from the first test that needs it to its end, so that
    whether there is one depends on the tests before.
    """
    found = [each for each in psutil.Process().children() if each.pid not in session_servers]
    if recursive:
        for child in list(found):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += child.children(recursive=True)
    return found


def names_of_children() -> list[str]:
    """Return the names of the processes below this one. One that ends meanwhile is skipped."""
    found = []
    for process in child_processes(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(process.name())
    return found


async def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds that has no event, such as one of another process."""
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.01)


def free_port() -> int:
    """Return a free port below those that the kernel hands out.

    Other tests take many of the kernel's ports before this one would be used, or used again.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def make_schema(name: str, **properties: str) -> ToolSchema:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    function = {"name": name, "description": name, "parameters": parameters}
    return ToolSchema.read({"type": "function", "function": function}, "test")


class EchoTool(BaseTool):
    """A tool that answers with its argument `text`, counts the calls of its methods, and misbehaves on request."""

    def __init__(self, config: dict[str, Any] | None = None, tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config or {}, tool_schema or make_schema("echo", text="string"))
        self.events: list[tuple[Any, ...]] = []
        self.counts: Counter[str] = Counter()
        self.running = 0
        self.most_running = 0
        self.started = asyncio.Event()
        """Event that is set when an `execute` has begun."""

    def _note(self, method: str, *details: Any) -> None:
        self.counts[method] += 1
        self.events.append((method, *details))

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        self._note("create", instance_id, kwargs)
        await self._misbehave("create")

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self._note("execute", instance_id, parameters, kwargs)
        self.running += 1
        self.started.set()
        self.most_running = max(self.most_running, self.running)
        try:
            await self._misbehave("execute")
            await asyncio.sleep(self.config.get("delays", {}).get(parameters["text"], 0))
        finally:
            self.running -= 1
        return self.config.get("returns", ToolResponse(parameters["text"]))

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        self._note("calc_reward", instance_id, kwargs)
        await self._misbehave("calc_reward")
        return float(self.config.get("reward", 0.0))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._note("release", instance_id, kwargs)
        await self._misbehave("release")
        if isinstance(self.config.get("release"), float):
            self.events.append(("released",))

    async def _misbehave(self, method: str) -> None:
        fault = self.config.get(method)
        if fault == "hang":
            await asyncio.Event().wait()
        elif isinstance(fault, float):
            await asyncio.sleep(fault)
        elif fault is not None:
            raise fault

"""Runs the tests of a tier in lanes side by side; each lane is a fork of one process that has imported its modules.

    python -m tests.support.lanes [--all | --fast]      scripts/test.sh

    imports pytest, LIGHT_MODULES     forks the lanes without the stack, and the server of `light_python`
    imports PyTorch, SGLang           forks the server of `warm_python`
    imports Ray, verl                 forks the server of `stack_python`, and the lanes with the stack

The stack takes some 10 s of CPU to import, and each lane and its children would import it anew. There are more lanes
than cores, because the tests wait much of their time.

A lane is named by the marks of its tests and by folders. Each test is in one lane of `--all`; the default leaves out
the mark `long`, and `--fast` all that takes seconds (`tests/unit/project/test_lanes.py`).
"""

from __future__ import annotations

import asyncio
import fnmatch
import functools
import importlib
import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from _pytest.mark.expression import Expression

from tests.support.warm_python import LIGHT_MODULES, ROOT, SHARED, SHARED_LIGHT, SHARED_STACK, environment_of_server
from verl_multiturn.cpu_processes.environment import STAND_INS
from verl_multiturn.cpu_processes.forkserver import EVERY
from verl_multiturn.cpu_processes.forkserver import main as serve
from verl_multiturn.cpu_processes.handle import SLOW_MODULES, fork_command, listen_at, write_spawned
from verl_multiturn.cpu_processes.ray_ids import class_ids, draws_alike

_CHANGED = "VERL_MULTITURN_TESTS_CHANGED"
"""Environment variable: JSON of the lanes' values of those variables that have other values in this process."""
_LIGHT = ("pytest", "hypothesis", "pytest_asyncio", "pytest_timeout", "numpy", "aiohttp", *LIGHT_MODULES)
_STACK = ("verl.trainer.main_ppo", "sglang.srt.entrypoints.http_server")


@dataclass(frozen=True)
class Lane:
    """Tests that run one after another.

    Args:
        name: Shown above their output.
        marks: Expression over the marks of its tests.
        folders: Patterns of paths below the repository; its tests are below one of them.
        without: Patterns of paths that it leaves out.
    """

    name: str
    marks: str
    folders: tuple[str, ...] = ("tests",)
    without: tuple[str, ...] = ()

    @property
    def stack(self) -> bool:
        """Return whether its tests import the stack."""
        return "not stack" not in self.marks

    def has(self, path: str, marks: Collection[str]) -> bool:
        """Return whether a test of a file, with marks, is one of the lane's."""
        return (
            _compiled(self.marks).evaluate(lambda name, **_: name in marks)
            and any(_is_below(path, each) for each in self.folders)
            and not any(_is_below(path, each) for each in self.without)
        )

    def arguments(self) -> list[str]:
        """Return the words of pytest's command line."""
        found = [path for each in self.folders for path in sorted(ROOT.glob(each)) if (path / "__init__.py").is_file()]
        folders = [str(path.relative_to(ROOT)) for path in found]
        without = [f"--ignore-glob={ROOT / each}" for each in self.without]
        return ["--durations=10", "-m", self.marks, *without, *folders]


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of the children that it has waited for; 0 when it has ended."""
    try:
        return sum(psutil.Process(pid).cpu_times()[:4])
    except psutil.NoSuchProcess:
        return 0.0


_compiled = functools.cache(Expression.compile)


def _is_below(path: str, pattern: str) -> bool:
    parts = path.split("/")
    return any(fnmatch.fnmatch("/".join(parts[:number]), pattern) for number in range(1, len(parts) + 1))


_AT_ONCE = 6
"""Lanes that run at once. With more, tests of servers and processes wait for a core longer than a peer has patience."""
_FREE = "not stack and not engine and not deaths"
_STACK_ALONE = "stack and not engine and not deaths"
_ALL = (
    *(Lane(f"unit {each}", _FREE, (f"tests/unit/[{each}]*",)) for each in ("a-k", "l-o", "p-q", "r", "s-z")),
    Lane("others", _FREE, without=("tests/unit",)),
    Lane("engine", "engine"),  # one lane, since two engines would not fit in memory
    Lane("deaths", "deaths and not engine"),
    Lane("integration a-o", _STACK_ALONE, ("tests/integration",), ("tests/integration/test_[p-z]*",)),
    Lane("integration p-z", _STACK_ALONE, ("tests/integration",), ("tests/integration/test_[!p-z]*",)),
    Lane("stack", _STACK_ALONE, without=("tests/integration",)),
)
_QUICK = f"{_FREE} and not slow and not long"
# The tests in tests/faults start servers and sandboxes, those of recipes compose verl's configurations.
_LEFT_OUT = ("tests/faults", "tests/unit/recipes")
LANES = {
    "--all": _ALL,
    "": tuple(Lane(each.name, f"{each.marks} and not long", each.folders, each.without) for each in _ALL),
    "--fast": (
        Lane("rollout, s-z", _QUICK, ("tests/unit/rollout", "tests/unit/[s-z]*"), _LEFT_OUT),
        Lane("others", _QUICK, without=(*_LEFT_OUT, "tests/unit/rollout", "tests/unit/[s-z]*")),
    ),
}
"""Lanes of each tier."""


@dataclass
class _Forks:
    """The processes that run beside this one.

    Args:
        folder: Folder of their output.
    """

    folder: Path
    lanes: dict[int, str] = field(default_factory=dict)
    """Names of the lanes that run, by process id."""
    servers: list[int] = field(default_factory=list)
    """Process ids of the servers."""
    interrupted: bool = False
    turns: tuple[int, int] = field(default_factory=os.pipe)
    """A pipe with a byte for each lane that may begin."""

    def __post_init__(self) -> None:
        os.write(self.turns[1], bytes(_AT_ONCE))

    def log(self, name: str) -> Path:
        """Return the file of a lane's output."""
        return self.folder / f"{name}.log"

    def fork(self, name: str, lane: bool = True) -> bool:
        """Fork a process, and return whether this is the fork; after an interrupt there is none."""
        if self.interrupted:
            return False
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            if lane:
                self.lanes[pid] = name
            else:
                self.servers.append(pid)
            return False
        self.lanes.clear()
        self.servers.clear()
        os.setpgid(0, 0)  # so that it can be interrupted with all that it starts
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        with open(os.devnull) as nothing, self.log(name).open("w") as log:
            os.dup2(nothing.fileno(), 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        random.seed()
        return True

    def wait(self) -> int:
        """Print each lane's output when it has ended, and return the first exit status that is not 0."""
        status = 0
        while self.lanes:
            pid, code = os.wait()
            if name := self.lanes.pop(pid, None):
                os.write(self.turns[1], b"\0")
                code = os.waitstatus_to_exitcode(code)
                status = status or abs(code)
                print(f"\n{f' {name} ':-^100}\n{self.log(name).read_text(errors='replace')}", flush=True)
                if code < 0:
                    print(f"lanes: {name} ended by signal {-code}", flush=True)
        # No process waits for the servers, so that `time` does not count the time of their forks.
        print(f"forks of the servers: CPU {sum(map(_cpu_s, self.servers)):.0f} s", flush=True)
        return 130 if self.interrupted else status

    def test(self, lane: Lane) -> int:
        """Run the tests of a lane, in a fork, when it is its turn; return pytest's exit status."""
        os.read(self.turns[0], 1)
        return _test(lane)

    def interrupt(self, *_: object) -> None:
        """Interrupt all lanes, which then end by themselves."""
        self.interrupted = True
        for pid in self.lanes:
            os.killpg(pid, signal.SIGINT)


def main(tier: str) -> Callable[[], int]:
    """Start all lanes, and wait for them.

    Returns:
        The remaining work: in this process nothing but to end, in a fork its work.
    """
    plain = _plain_environment()
    forks = _Forks(Path(tempfile.mkdtemp(prefix="lanes-")))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forks.interrupt)
    addresses = {name: str(forks.folder / name / "forkserver") for name in (SHARED, SHARED_LIGHT, SHARED_STACK)}
    for name, address in addresses.items():
        Path(address).parent.mkdir()
        write_spawned(address)
        plain[name] = shlex.join(fork_command(address))
    lanes = LANES[tier]
    if forks.fork("mypy"):
        return lambda: os.execve(str(ROOT / ".venv/bin/mypy"), ["mypy"], plain)

    warm, stand_ins = dict(os.environ), str(STAND_INS)
    _become(plain)
    sys.path.remove(stand_ins)
    _import(_LIGHT)
    me = os.getpid()
    if forks.fork(SHARED_LIGHT, lane=False):
        return lambda: _serve(addresses[SHARED_LIGHT], me, LIGHT_MODULES)
    for lane in lanes:
        if not lane.stack and forks.fork(lane.name):
            return partial(forks.test, lane)
    if any(lane.stack for lane in lanes):
        _become(warm)
        sys.path.append(stand_ins)
        # SGLang's models are imported by the server alone: with them comes their registry, and our plugin is not there
        # yet.
        _import([name for name in SLOW_MODULES if not name.endswith(EVERY)])
        set_by_imports = {name: value for name, value in os.environ.items() if warm.get(name) != value}
        _become(warm)
        if forks.fork(SHARED, lane=False):
            return lambda: _serve(addresses[SHARED], me, SLOW_MODULES)
        plain |= set_by_imports
        _become(plain)
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # as verl does, and before Ray is imported
        with class_ids():
            _import(_STACK)
        if draws_alike():
            raise RuntimeError("two lanes may draw the same ids of Ray: one of _STACK has drawn some, or has a thread")
        plain |= os.environ
        _become(warm)
        if forks.fork(SHARED_STACK, lane=False):
            return lambda: _serve(addresses[SHARED_STACK], me, ())
        _become(plain)
        for lane in lanes:
            if lane.stack and forks.fork(lane.name):
                return partial(forks.test, lane)
    status = forks.wait()
    shutil.rmtree(forks.folder, ignore_errors=True)
    return lambda: status


def _plain_environment() -> dict[str, str]:
    """Return the lanes' environment, in a process that was started with that of their children's server.

    Some variables are read when Python and its libraries are loaded, so this process starts anew with them.
    """
    if (told := os.environ.pop(_CHANGED, None)) is None:
        wanted = environment_of_server()
        changed = {name: os.environ.get(name) for name in wanted if os.environ.get(name) != wanted[name]}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**wanted, _CHANGED: json.dumps(changed)})
    plain: dict[str, str | None] = {**os.environ, **json.loads(told)}
    return {name: value for name, value in plain.items() if value is not None}


def _become(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _import(modules: Sequence[str]) -> None:
    import gc
    import warnings

    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the forks share these pages
    gc.enable()


def _serve(address: str, parent: int, modules: Sequence[str]) -> int:
    os.environ["SPT_NOENV"] = "1"  # a process's title must not overwrite its environment
    serve(listen_at(address).detach(), parent, modules)
    return 0


def _test(lane: Lane) -> int:
    import pytest

    asyncio.set_event_loop_policy(None)  # SGLang's, which it sets when it is imported, cannot wait for processes
    # Some of its plugins have been imported already.
    arguments = ["-W", "ignore::pytest.PytestAssertRewriteWarning", *lane.arguments()]
    if lane in LANES["--all"]:
        arguments += ["--hypothesis-profile", "all"]
    sys.argv = ["pytest", *arguments]
    return int(pytest.main(arguments, [_Cost(lane.name)]))


class _Cost:
    """Plugin of pytest that reports a lane's time."""

    def __init__(self, name: str) -> None:
        self._name, self._began = name, time.monotonic()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        user, system, *of_children, _ = os.times()
        terminalreporter.write_line(
            f"{self._name}: {time.monotonic() - self._began:.0f} s; "
            f"CPU {user + system:.0f} s, of its children {sum(of_children):.0f} s"
        )


if __name__ == "__main__":
    sys.exit(main("".join(sys.argv[1:]))())

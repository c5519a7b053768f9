"""A Python that has imported slow modules already: programs that tests start with it run in a fork of one process.

A process that imports verl takes some 20 s of CPU, a fork 3. The process that is forked is that of CPU runs
(`verl_multiturn.cpu_processes`). A session of pytest starts it when a test first needs it; tests without the mark
`stack` have another one, without PyTorch. The lanes of `scripts/test.sh` share those of `lanes.py`.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

from verl_multiturn.cpu_processes.environment import SPEED, engine_variables, run_variables
from verl_multiturn.cpu_processes.forkserver import READ_AT_IMPORT
from verl_multiturn.cpu_processes.handle import ForkServer

ROOT = Path(__file__).resolve().parents[2]
SHARED = "VERL_MULTITURN_TESTS_SERVER"
"""Environment variable with the `executable` of a server that is there already, for processes that need the stack."""
SHARED_LIGHT = "VERL_MULTITURN_TESTS_LIGHT_SERVER"
"""The same of a server with `LIGHT_MODULES`."""
SHARED_STACK = "VERL_MULTITURN_TESTS_STACK_SERVER"
"""The same of a server that has imported Ray, verl and our plugin, too."""
LIGHT_MODULES = ("hydra", "matplotlib.pyplot", "pandas", "pyarrow.parquet", "pydantic", "rich.progress", "typer")
"""Imports of the command `verl-multiturn` and of the rows' scripts, without PyTorch."""
session_servers: set[int] = set()
"""Process ids of the servers that this session has started, and that live until its end."""


@functools.cache
def environment_of_server() -> dict[str, str]:
    """Return this process's environment with the variables of a run's processes on the CPU platform."""
    return run_variables(os.environ)


def variables() -> dict[str, str]:
    """Return this process's environment for a fork: variables read at import are as the server has them."""
    read = {name: value for name, value in environment_of_server().items() if _is_read_at_import(name)}
    other = {name: value for name, value in os.environ.items() if not _is_read_at_import(name)}
    return {**SPEED, **other, **engine_variables(os.environ), **read}


def _is_read_at_import(name: str) -> bool:
    return name.startswith(READ_AT_IMPORT)


@functools.cache
def executable() -> str:
    """Return the program that starts a fork of this session's server; Ray may use it as Python in a `py_executable`."""
    if SHARED in os.environ:
        return os.environ[SHARED]
    return _started(ForkServer(environment=environment_of_server()))


@functools.cache
def warm_python() -> str:
    """Return the path of a program to start in place of Python, with a FILE, `-m MODULE` or `-c PROGRAM`.

    It is for processes whose environment is `variables()` and more; with other variables that are read at import, the
    program starts Python itself.
    """
    return _program(executable())


@functools.cache
def stack_python() -> str:
    """Return the same of a server that has imported verl, too; in a session without the lanes, it is `warm_python`.

    It is for programs to which it is the same when verl was imported, and whose platform is the lanes'. Workers of Ray
    are none: Ray reads the environment when it is imported.
    """
    return _program(os.environ.get(SHARED_STACK) or executable())


@functools.cache
def light_python() -> str:
    """Return such a program that has imported `LIGHT_MODULES` alone, for processes with this one's environment."""
    if SHARED_LIGHT in os.environ:
        return _program(os.environ[SHARED_LIGHT])
    return _program(_started(ForkServer(LIGHT_MODULES)))


def _started(server: ForkServer) -> str:
    session_servers.add(server.pid)
    atexit.register(server.close)
    return server.executable


def _program(executable: str) -> str:
    folder = tempfile.TemporaryDirectory(prefix="warm-python-")
    atexit.register(folder.cleanup)
    program = Path(folder.name) / "python"
    program.write_text(f'#!/bin/sh\nexec {executable} "$@"\n')
    program.chmod(0o700)
    return str(program)


def start_ray(num_cpus: int) -> None:
    """Start a Ray cluster of this process; its workers are forks, too."""
    import ray

    from verl_multiturn.cpu.ray_start import adapt_start

    adapt_start()
    own = {"py_executable": executable()}
    settings = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    # Nothing reads the messages of Ray's processes on logs and the machine.
    quiet = {
        "LOG_NAME_UPDATE_INTERVAL_S": "86400",  # for more files than the next
        "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
        "REPORTER_UPDATE_INTERVAL_MS": "86400000",
    }
    with mock.patch.dict(os.environ, {**variables(), **quiet}, clear=True):
        ray.init(num_cpus=num_cpus, runtime_env=own, **settings)


def stop_ray() -> None:
    """Stop the Ray cluster of this process, and wait until its processes have ended.

    Ray itself gives some of them a signal alone. On a busy machine Python warns of those that still run.
    """
    import ray
    from ray._private import worker

    node = worker._global_node
    infos = [] if node is None else [info for each in node.all_processes.values() for info in each]
    ray.shutdown()
    for info in infos:
        info.process.wait()


def of_run() -> tuple[dict[str, str], list[str]]:
    """Return the environment and the words of a run's command with which its processes are forks of this server.

    A run has a server of its own otherwise, which imports everything again.
    """
    own = f"++ray_kwargs.ray_init.runtime_env.py_executable='{executable()}'"
    return {**variables(), "PYTHON": warm_python()}, [own]


def run_with_stack(
    *words: str, cwd: str | Path = ROOT, timeout_s: float = 550, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a fork as `run_warm` does, but one of `stack_python`."""
    return _run(stack_python(), *words, cwd=cwd, timeout_s=timeout_s, **environment)


def run_warm(
    *words: str, cwd: str | Path = ROOT, timeout_s: float = 550, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words of its command line in a fork, and return how it ended and its output.

    Args:
        words: A file, `-m` and a module, or `-c` and a program; then its arguments.
        cwd: Folder to run in.
        timeout_s: Seconds after which it hangs.
        environment: Variables beside those of `variables()`.
    """
    return _run(warm_python(), *words, cwd=cwd, timeout_s=timeout_s, **environment)


def _run(
    program: str, *words: str, cwd: str | Path, timeout_s: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env={**variables(), **environment},
        cwd=cwd,
    )

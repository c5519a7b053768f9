"""The process that a CPU run's workers are forked from. What it forks has to be as good as a new Python."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from verl_multiturn.cpu.activate import environment
from verl_multiturn.cpu.forkserver import SLOW_MODULES, ForkServer

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(["decimal", "numpy", "there_is_no_such_module"])
    yield server
    server.close()


def run(server: ForkServer, program: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*shlex.split(server.executable), str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def test_a_fork_is_as_a_new_python(server: ForkServer, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "print('decimal' in sys.modules, 'ray' in sys.modules, 'verl' in sys.modules, __name__)\n"
        "print(sys.argv[1:], sys.orig_argv[1:], os.getcwd(), os.getpriority(os.PRIO_PROCESS, 0))\n"
        "print(sorted(os.environ.items()))\n"
        "print(sys.stdin.read(), file=sys.stderr)\n"
        "sys.exit(7)\n"
    )
    environment = {"GREETING": "grüß dich", "LC_ALL": "C.UTF-8"}
    options = {"input": "said", "env": environment, "cwd": tmp_path, "preexec_fn": lambda: os.nice(5)}
    ran = run(server, program, "a b", "", **options)
    assert ran.stdout.splitlines() == [
        "True False False __main__",
        f"{['a b', '']} {[str(program), 'a b', '']} {tmp_path} {os.getpriority(os.PRIO_PROCESS, 0) + 5}",
        str(sorted(environment.items())),
    ]
    assert ran.stderr == "said\n"
    assert ran.returncode == 7


def test_forks_draw_different_random_numbers(server: ForkServer, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import random, numpy\nprint(random.random(), numpy.random.random(), sep='\\n')\n")
    numbers = [number for _ in range(3) for number in run(server, program).stdout.splitlines()]
    assert len(set(numbers)) == 6


def test_a_traceback_and_a_signal_reach_who_started_it(server: ForkServer, tmp_path: Path) -> None:
    broken, killed = tmp_path / "broken.py", tmp_path / "killed.py"
    broken.write_text("raise ValueError('no such thing')\n")
    killed.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    ran = run(server, broken)
    assert ran.returncode == 1
    assert "ValueError: no such thing" in ran.stderr
    assert run(server, killed).returncode == -signal.SIGKILL


def test_a_fork_ends_with_who_started_it(server: ForkServer, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    client = subprocess.Popen([*shlex.split(server.executable), str(program)], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    fork = psutil.Process(int(client.stdout.readline()))
    assert fork.pid != client.pid
    client.kill()
    client.communicate(timeout=60)
    fork.wait(60)


def test_without_a_server_python_is_started(tmp_path: Path) -> None:
    server = ForkServer([])
    server.close()
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint(sys.argv[1:])\nsys.exit(3)\n")
    ran = run(server, program, "a")
    assert ran.stdout == "['a']\n"
    assert ran.returncode == 3
    assert "no forkserver" in ran.stderr


def test_the_server_ends_with_the_process_that_started_it() -> None:
    source = (
        "import os, sys\n"
        "from verl_multiturn.cpu.forkserver import ForkServer\n"
        "print(ForkServer([])._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
        "os._exit(0)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    server = psutil.Process(int(driver.stdout.readline()))
    driver.communicate(timeout=60)
    server.wait(60)


def test_what_it_imports_leaves_ray_to_the_workers() -> None:
    # Ray's core keeps what the environment said when it was imported, and a worker's environment is its own.
    imports = "\n".join(f"import {name}" for name in SLOW_MODULES)
    check = f"import sys\n{imports}\nprint([name for name in ('ray', 'verl', 'transfer_queue') if name in sys.modules])"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", check],
        env={**os.environ, **environment()},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.stdout.splitlines()[-1] == "[]", ran.stderr

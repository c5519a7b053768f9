"""The guard beside a program, such as an MCP server: the events that end it, and the processes that it ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import has_ended
from verl_multiturn.processes import guard, system

GUARD = [sys.executable, *guard.ARGUMENTS]
OLDER_KERNEL = """
import os, sys

def pidfd_open(pid, flags=0):
    raise OSError(38, "not implemented")

os.pidfd_open = pidfd_open
sys.path.append(sys.argv.pop(1))
from processes.guard import run

run()
"""
*OPTIONS, _, FOLDER = GUARD
WITHOUT_PIDFD = [*OPTIONS, OLDER_KERNEL, FOLDER]
# A server that starts a program in a session of its own, through a shell that ends at once. The server ignores SIGTERM,
# and ends when its input ends.
SERVER = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
shell = "sleep 60 < /dev/null > /dev/null 2>&1 & echo $!"
print(subprocess.run(["sh", "-c", shell], start_new_session=True, stdout=subprocess.PIPE, text=True).stdout, end="")
sys.stdout.flush()
sys.stdin.readline()
"""
# A worker that hands on its standard input and output to the guard.
WORKER = "import os, subprocess, sys; subprocess.run([*sys.argv[1:7], str(os.getpid()), *sys.argv[7:]])"


def wait_for_the_end(process: psutil.Process) -> None:
    deadline = time.monotonic() + 120
    while not has_ended(process):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("guard", [GUARD, WITHOUT_PIDFD])
def test_a_server_outlives_the_thread_that_started_it(guard: list[str]) -> None:
    started: list[subprocess.Popen[str]] = []

    def start() -> None:
        command = [*guard, str(os.getpid()), sys.executable, "-c", "while True: print(input(), flush=True)"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        print("one", file=process.stdin, flush=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "one\n"

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():
        time.sleep(0.01)
    (process,) = started
    answer, _ = process.communicate("two\n", timeout=120)
    assert answer == "two\n"


@pytest.mark.parametrize("guard", [GUARD, WITHOUT_PIDFD])
@pytest.mark.parametrize("what_ends", ["the worker", "the server", "the group is told to"])
def test_what_has_left_the_servers_group_ends_too(guard: list[str], what_ends: str) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, *guard, sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    left_behind = psutil.Process(int(worker.stdout.readline()))
    (beside,) = psutil.Process(worker.pid).children()
    if what_ends == "the worker":
        worker.kill()
    elif what_ends == "the server":
        print(file=worker.stdin, flush=True)
    else:
        os.killpg(beside.pid, signal.SIGTERM)
    wait_for_the_end(left_behind)
    wait_for_the_end(beside)
    worker.communicate(timeout=120)


@pytest.mark.parametrize(("ends", "status"), [("sys.exit(0)", 0), ("sys.exit(7)", 7), ("os.abort()", -signal.SIGKILL)])
def test_it_ends_as_the_program_did(ends: str, status: int) -> None:
    command = [*GUARD, str(os.getpid()), sys.executable, "-c", f"import os, sys; {ends}"]
    assert subprocess.run(command, start_new_session=True, timeout=120).returncode == status


def test_a_kernel_without_the_list_of_children_has_them_among_all_processes() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            assert child.pid in system._children()
            assert child.pid in system._children_among_all()
        finally:
            child.kill()
            child.wait()
        assert child.pid not in system._children_among_all()

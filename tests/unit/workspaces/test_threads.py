"""Workspaces for threads: many at once, interrupted ones, dropped ones, forks, and the end of the process."""

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.conftest import ROOT, names_of_children
from verl_multiturn.errors import ConfigError
from verl_multiturn.workspaces import threads
from verl_multiturn.workspaces.settings import WorkspaceSettings
from verl_multiturn.workspaces.tars import read_tar, write_tar
from verl_multiturn.workspaces.threads import ThreadWorkspace, open_workspace
from verl_multiturn.workspaces.workspace import CommandResult

SETTINGS = WorkspaceSettings(timeout_s=60, pool=0)


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the thread and its pools after each test, however long that takes, and see that nothing remains."""
    monkeypatch.setattr(threads, "_CLOSE_S", 120.0)
    yield
    threads._kept.get().end()
    threads._kept.forget()
    wait_for(lambda: not {"bwrap", "workspace"} & set(names_of_children()))


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_many_threads_at_once() -> None:
    def work(number: int) -> str:
        with open_workspace(SETTINGS) as workspace:
            workspace.put(write_tar({"given": str(number).encode()}))
            assert workspace.run("echo $(cat given) > mine; sleep 1000 &") == CommandResult("", 0)
            workspace.end_processes()
            return read_tar(workspace.get("mine")).files["mine"].decode()

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(32))) == [f"{number}\n" for number in range(32)]
    wait_for(lambda: "workspace" not in names_of_children())


def test_one_workspace_may_serve_several_threads() -> None:
    with open_workspace(SETTINGS) as workspace, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: workspace.run(f"echo {number} >> file"), range(40)))
        lines = workspace.run("sort -n file").output.split()
    assert lines == [str(number) for number in range(40)]


def test_a_thread_that_is_given_up_leaves_nothing() -> None:
    ends: list[BaseException] = []

    def agent() -> None:
        try:
            with open_workspace(SETTINGS) as workspace:
                workspace.run("sleep 1000")
        except BaseException as error:
            ends.append(error)

    thread = threading.Thread(target=agent)
    thread.start()
    wait_for(lambda: "sleep" in names_of_children())
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    thread.join(120)
    assert [type(error) for error in ends] == [SystemExit]
    ends.clear()  # its traceback has the frames
    wait_for(lambda: not {"sleep", "workspace"} & set(names_of_children()))


def test_a_dropped_workspace_ends() -> None:
    workspace: ThreadWorkspace | None = threads._kept.get().wait(threads._kept.get().open(SETTINGS))
    assert workspace is not None
    assert workspace.run("sleep 1000 & sleep 0") == CommandResult("", 0)
    workspace = None
    gc.collect()
    wait_for(lambda: not {"sleep", "workspace"} & set(names_of_children()))


def test_a_closed_workspace_says_so() -> None:
    with open_workspace(SETTINGS) as workspace:
        pass
    assert workspace.run("true") == CommandResult("", stopped="the workspace ended: the workspace was closed")
    assert workspace.stopped == "the workspace ended: the workspace was closed"


def test_what_cannot_be_closed_leaves_nothing_else() -> None:
    class Broken:
        async def aclose(self) -> None:
            raise RuntimeError("broken")

    with open_workspace(SETTINGS):
        keeper = threads._kept.get()
        keeper._kept = {"broken": Broken(), **keeper._kept}
        keeper.end()
        wait_for(lambda: not {"bwrap", "workspace"} & set(names_of_children()))


def test_wrong_settings_are_refused_in_the_thread_that_asks() -> None:
    with (
        pytest.raises(ConfigError, match="packages: 'no-such-package' is not installed"),
        open_workspace(WorkspaceSettings(packages=("no-such-package",))),
    ):
        pass


PROGRAM = """
import os, sys, threading
from verl_multiturn.workspaces.settings import WorkspaceSettings
from verl_multiturn.workspaces.threads import open_workspace

settings = WorkspaceSettings(timeout_s=60, pool=1)

def work():
    with open_workspace(settings) as workspace:
        workspace.run("sleep 1000 & sleep 0")
        print("begun", flush=True)
        workspace.run("sleep 1000")

with open_workspace(settings) as workspace:
    child = os.fork()
    if child == 0:
        try:
            workspace.run("true")
        except RuntimeError as error:
            print(error, flush=True)
        with open_workspace(settings) as own:
            print(own.run("echo own").output, end="", flush=True)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
threading.Thread(target=work, daemon=True).start()
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_end_of_the_process_leaves_nothing(is_killed: bool) -> None:
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[0].startswith("this workspace belongs to the process that this one was forked from")
        assert lines[1:] == ["own\n", "begun\n"]
        wait_for(lambda: {"sleep", "workspace"} <= set(names_of_children()))  # a fork has its name after its exec
        below = psutil.Process(process.pid).children(recursive=True)
        if is_killed:
            process.kill()
        else:
            assert process.stdin is not None
            process.stdin.close()
        assert process.wait(120) == (-9 if is_killed else 0)
    gone, alive = psutil.wait_procs(below, 120)
    assert not alive
    assert len(gone) == len(below)
    assert os.getpid() not in {each.pid for each in below}

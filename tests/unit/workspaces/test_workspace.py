"""One workspace: commands, files in and out, files that stay or not."""

import asyncio
import errno
import importlib.util
import io
import json
import os
import re
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock, create_autospec

import pytest

from tests.conftest import names_of_children, until
from verl_multiturn.errors import ConfigError
from verl_multiturn.sandbox.sandbox import CellResult, Sandbox
from verl_multiturn.workspaces import driver
from verl_multiturn.workspaces.settings import WorkspaceSettings
from verl_multiturn.workspaces.workspace import CommandResult, Workspace, WorkspaceError, WorkspacePool

DRIVER = Path(driver.__file__).read_bytes()


@pytest.fixture
async def workspace() -> AsyncIterator[Workspace]:
    async with WorkspacePool(WorkspaceSettings(timeout_s=60, pool=0)) as pool, await pool.open() as workspace:
        yield workspace


def tar_of(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


async def test_a_command_has_its_output_and_its_exit_status(workspace: Workspace) -> None:
    assert await workspace.run("echo out; echo err >&2; exit 3") == CommandResult("out\nerr\n", 3)
    assert await workspace.run("kill -9 $$") == CommandResult("", 137)
    assert (await workspace.run("no_such_command")).exit_code == 127
    assert await workspace.run("cat; echo end") == CommandResult("end\n", 0), "standard input is empty"


async def test_files_stay_and_the_shell_does_not(workspace: Workspace) -> None:
    assert await workspace.run("mkdir -p a/b; cd a/b; X=1; export X; echo text > file") == CommandResult("", 0)
    assert await workspace.run('pwd; echo "[$X]"; cat a/b/file') == CommandResult("/tmp/workspace\n[]\ntext\n", 0)
    assert await workspace.run("pwd; echo $Y", cwd="a/b", env={"Y": "é 2"}) == CommandResult(
        "/tmp/workspace/a/b\né 2\n", 0
    )
    assert await workspace.run("pwd", cwd="/tmp") == CommandResult("/tmp\n", 0)
    assert await workspace.run("pwd", cwd="none") == CommandResult(
        "bash: No such file or directory: /tmp/workspace/none\n", 126
    )


async def test_git_and_python_work_without_care(workspace: Workspace) -> None:
    result = await workspace.run(
        "git init -q && echo 1 > f && git add f && git commit -qm first && git log --format=%an%s\n"
        "python -c 'import sys; print(sys.version_info[:2])'; python3 -m json.tool <<< '[1]' | tr -d ' \\n'"
    )
    assert result == CommandResult(result.output, 0)
    assert result.output.startswith("agentfirst\n(3, ")
    assert result.output.endswith("[1]")


@pytest.mark.parametrize(
    ("module", "name"),
    [("verl_multiturn.workspaces.driver", "_PIPE_BYTES"), ("verl_multiturn.sandbox.guest.usage", "FILE_BYTES")],
)
def test_a_pipe_is_known_to_hold_16_pages(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sysconf = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda asked: 65_536 if asked == "SC_PAGE_SIZE" else sysconf(asked))
    found = importlib.util.find_spec(module)
    assert found is not None
    spec = importlib.util.spec_from_file_location(f"{module}_of_large_pages", found.origin)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    assert getattr(loaded, name) == 2**20


async def test_a_late_command_ends_and_the_folder_stays(workspace: Workspace) -> None:
    late = "echo begun; echo x > kept; trap '' TERM; setsid sleep 1000 & (sleep 1000 &) ; sleep 1000"
    for timeout_s in (0.5, 4, 32, 256):  # until that is enough for the command's first actions
        result = await workspace.run(late, timeout_s=timeout_s)
        if await workspace.run("ls") == CommandResult("kept\n", 0):
            break
        assert result == CommandResult(result.output, None, timed_out=True)
    assert result == CommandResult("begun\n", None, timed_out=True)
    assert await workspace.run("ls; pgrep -c sleep") == CommandResult("kept\n0\n", 1)


async def test_what_a_command_left_runs_on_until_it_is_ended(workspace: Workspace) -> None:
    left = "(while [ ! -e stop ]; do echo noise; sleep 0.01; done; echo out; echo done > seen) & echo $!"
    result = await workspace.run(left)
    assert result.exit_code == 0
    waited = "touch stop; while [ ! -e seen ]; do sleep 0.01; done; cat seen"
    assert await workspace.run(waited) == CommandResult("done\n", 0)
    await workspace.run("sleep 1000 & sleep 1000 > /dev/null &")
    begun = await workspace.run("until [ $(pgrep -c sleep) = 2 ]; do :; done")  # a fork has its name after its exec
    assert begun.exit_code == 0
    await workspace.end_processes()
    assert await workspace.run("pgrep -c .; ls") == CommandResult("2\nseen\nstop\n", 0), "driver and shell"


async def test_the_driver_names_processes_that_do_not_end(workspace: Workspace) -> None:
    """Here nothing is killed; a process that waits in the kernel for a disk does not end, either."""
    await workspace.put(tar_of({"driver.py": DRIVER}))
    script = "import os, driver; driver._END_S = 0.01; os.kill = lambda *_: None; print(driver._end_all())"
    result = await workspace.run(f"sleep 1000 & until pgrep sleep > one; do :; done; exec python3 -c '{script}'")
    number = (await workspace.run("cat one")).output.strip()
    assert f"{number} (sleep) S" in result.output
    assert re.fullmatch(r"\[('\d+ \([^']+\) \w'(, )?)+\]\n", result.output)


def test_a_process_table_that_cannot_be_read_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "open", lambda *_, **__: io.StringIO("cut"), raising=False)
    assert driver._others() == []
    monkeypatch.setattr(os, "listdir", Mock(side_effect=OSError(errno.EMFILE, "no descriptor is left")))
    assert driver._others() == []


async def test_processes_that_do_not_end_are_told(caplog: pytest.LogCaptureFixture) -> None:
    sandbox = create_autospec(Sandbox, instance=True)
    sandbox.stopped = None
    workspace = Workspace(sandbox, WorkspaceSettings())
    for unended in ([], ["12 (sleep) D", "x" * 100_000]):
        header = {"bytes": 0, "exit_code": 0, "unended": unended}
        sandbox.run.return_value = CellResult("", value=json.dumps(header).encode() + b"\n")
        for ending in (workspace.end_processes(), workspace.run("true")):
            caplog.clear()
            await ending
            told = [record.getMessage() for record in caplog.records]
            assert len(told) == bool(unended)
            assert all("still there after 10 s: ['12 (sleep) D', " in each and len(each) < 1_000 for each in told)


async def test_a_caller_that_gives_up_ends_its_command_alone(workspace: Workspace) -> None:
    running = asyncio.create_task(workspace.run("touch begun; sleep 1000"))
    waiting = asyncio.create_task(workspace.run("touch never"))
    await until(lambda: "sleep" in names_of_children())
    for task in (waiting, running):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await workspace.run("pgrep -c sleep; ls") == CommandResult("0\nbegun\n", 0)
    for moment in range(4):  # before the command is sent, and after
        early = asyncio.create_task(workspace.run("sleep 1000"))
        for _ in range(moment):
            await asyncio.sleep(0)
        early.cancel()
        assert await workspace.run("pgrep -c sleep") == CommandResult("0\n", 1)


async def test_files_go_in_and_out_as_tars(workspace: Workspace) -> None:
    await workspace.put(tar_of({"a/run.sh": b"#!/bin/sh\necho ran", "é": bytes(range(256)) * 2000}), "sub/dir")
    assert await workspace.run("sub/dir/a/run.sh; wc -c < sub/dir/é") == CommandResult("ran\n512000\n", 0)
    await workspace.run("ln sub/dir/é hard; mkfifo pipe; chmod 000 sub/dir/a/run.sh; ln -s /etc link")
    with tarfile.open(fileobj=io.BytesIO(await workspace.get("é", "a", "none", path="sub/dir"))) as tar:
        assert [member.name for member in tar] == ["é", "a"]
    with tarfile.open(fileobj=io.BytesIO(await workspace.get())) as tar:
        kinds = {member.name: member.type for member in tar}
    assert kinds == {"hard": b"0", "link": b"2", "pipe": b"6", "sub": b"5"} | {
        f"sub/dir{name}": kind for name, kind in {"": b"5", "/a": b"5", "/é": b"0"}.items()
    }


async def test_files_that_are_too_large_or_no_tar(workspace: Workspace) -> None:
    await workspace.run("truncate -s 200M sparse; echo small > small")
    with pytest.raises(WorkspaceError, match="too large: more than 100000 bytes"):
        await workspace.get("sparse", max_bytes=100_000)
    assert len(await workspace.get("small", max_bytes=100_000)) == 10240
    with pytest.raises(WorkspaceError, match=r"cannot be unpacked into '\.': ReadError"):
        await workspace.put(b"no tar at all")
    with pytest.raises(WorkspaceError, match="OutsideDestinationError"):
        await workspace.put(tar_of({"../../out": b""}))
    assert await workspace.run("ls / /tmp") == await workspace.run("ls / /tmp; true")


async def test_what_cannot_be_handed_over_is_answered(workspace: Workspace) -> None:
    assert await workspace.run("echo \0") == CommandResult("bash: a command cannot hold a NUL character\n", 126)
    for name, value in {"A=B": "1", "": "1", "A\0": "1", "A": "\0"}.items():
        expected = "expected a name, without '=', and no NUL character in name or value"
        assert await workspace.run("true", env={name: value}) == CommandResult(
            f"bash: the variable {name!r}: {expected}\n", 126
        )
    assert (await workspace.run("echo " + "x" * 100_000)).output.startswith("bash: the command has 1000")
    assert (await workspace.run("echo '" + "é" * 40_000 + "' | wc -c")).output == "80001\n"
    assert await workspace.run("echo \ud800") == CommandResult("?\n", 0)
    for seconds in (0, -1, float("nan"), 1e9):
        with pytest.raises(ConfigError, match="of a command: expected a number above 0, at most 600"):
            await workspace.run("true", timeout_s=seconds)


async def test_a_workspace_that_ended_says_why(workspace: Workspace) -> None:
    stopped = "the workspace ended: the process that starts the commands was killed by signal SIGKILL"
    assert await workspace.run("kill -9 $PPID; sleep 1000") == CommandResult("", stopped=stopped)
    assert await workspace.run("true") == CommandResult("", stopped=stopped)
    assert workspace.stopped == stopped
    for asked in (workspace.get(), workspace.put(b""), workspace.end_processes()):
        with pytest.raises(WorkspaceError, match=stopped):
            await asked


async def test_an_answer_in_crumbs_ends_the_workspace() -> None:
    """A command may write into the driver's memory. A tar of 64 MB, one byte a call, would never end."""
    sandbox = create_autospec(Sandbox, instance=True)
    sandbox.stopped = None
    sandbox.run.side_effect = [
        CellResult("", value=json.dumps({"bytes": 1_000_000}).encode() + b"\n"),
        *[CellResult("", value=b"x")] * 100,
    ]
    with pytest.raises(WorkspaceError):
        await Workspace(sandbox, WorkspaceSettings()).get()
    sandbox.kill.assert_called_once_with("a command spoilt the process that starts the commands")
    assert sandbox.run.await_count == 2

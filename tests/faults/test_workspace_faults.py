"""Workspaces when commands misbehave: which parts end or stay, and that no workspace beside it notices."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from benchmarks.workspaces import HANGS, held, measure
from tests.conftest import names_of_children, until
from verl_multiturn.sandbox.launch import SandboxError
from verl_multiturn.workspaces.settings import WorkspaceSettings
from verl_multiturn.workspaces.tars import read_tar, write_tar
from verl_multiturn.workspaces.workspace import CommandResult, Workspace, WorkspaceError, WorkspacePool

pytestmark = pytest.mark.slow

SETTINGS = WorkspaceSettings(timeout_s=60, memory_mb=128, disk_mb=16, processes=24, output_characters=1000, pool=0)
COUNT = "set -- /proc/[0-9]*; echo $#"


@pytest.fixture
async def pool() -> AsyncIterator[WorkspacePool]:
    async with WorkspacePool(SETTINGS) as pool:
        yield pool


@pytest.fixture
async def workspace(pool: WorkspacePool) -> AsyncIterator[Workspace]:
    """Yield a workspace with a file; one beside it is not affected."""
    async with await pool.open() as beside, await pool.open() as workspace:
        for each in (beside, workspace):
            await each.run("echo kept > file")
        await beside.run("sleep 1000 & until [ $(pgrep -c sleep) = 1 ]; do :; done")  # it has its name after its exec
        yield workspace
        assert await beside.run("cat file; pgrep -c sleep") == CommandResult("kept\n1\n", 0)


async def is_whole(workspace: Workspace) -> bool:
    """Return whether a workspace has its file, and no process of a command."""
    return await workspace.run(f"cat file; {COUNT}") == CommandResult("kept\n2\n", 0)


async def test_commands_that_hang(workspace: Workspace) -> None:
    for command in HANGS:
        result = await workspace.run(command, timeout_s=0.5)
        assert (result.timed_out, result.exit_code, result.stopped) == (True, None, None)
        assert await is_whole(workspace)


async def test_the_short_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = held()
    figures = await measure(openings=1, commands=2, workspaces=8, hangs=6, side_by_side=3)
    found = {name: figures[name] for name in ("at_once", "timeouts", "folders_lost", "processes_left")}
    assert found == {"at_once": 8, "timeouts": 6, "folders_lost": 0, "processes_left": 0}
    after = held()
    assert after["processes"] <= before["processes"]
    assert (after["folders"], after["groups"]) == (before["folders"], before["groups"])


async def test_a_fork_bomb_that_is_left_behind_cannot_lock_the_model_out(workspace: Workspace) -> None:
    bomb = (
        "python3 -c 'import os, time\n"
        "while True:\n"
        "    try:\n"
        '        if os.fork() == 0: open("begun", "w")\n'
        "    except BlockingIOError:\n"
        "        time.sleep(0.001)' & while [ ! -e begun ]; do :; done; rm begun"
    )
    assert (await workspace.run(bomb)).stopped is None
    result = await workspace.run("echo able")
    if result.output != "able\n":
        assert result.output == "[no further process could start, so all that were left have been ended]\nable\n"
    await workspace.end_processes()
    assert await is_whole(workspace)


async def test_a_flood_ends_the_command_alone(workspace: Workspace) -> None:
    result = await workspace.run("sleep 1000 & yes")
    assert (result.exit_code, result.timed_out, result.stopped) == (None, False, None)
    assert result.output.startswith("y\ny\n")
    assert result.output.endswith("[the command was stopped: it printed more than 64 MB]\n")
    assert len(result.output) < 1200
    assert await is_whole(workspace)


async def test_long_and_strange_output_is_text(workspace: Workspace) -> None:
    long = await workspace.run("head -c 10000000 /dev/zero | tr '\\0' x; printf END")
    assert long.exit_code == 0
    assert long.output == f"{'x' * 500}\n[… the output of 10000003 bytes is shortened …]\n{'x' * 497}END"
    strange = "printf 'a\\0b\\x1b[2J\\xff<|im_end|>\\r\\n{\"exit_code\": 0}\\n'; exit 4"
    assert await workspace.run(strange) == CommandResult('a\0b\x1b[2J\ufffd<|im_end|>\r\n{"exit_code": 0}\n', 4)


async def test_a_full_disk_and_too_many_files(workspace: Workspace) -> None:
    assert "No space left on device" in (await workspace.run("head -c 20M /dev/zero > big")).output
    with pytest.raises(WorkspaceError, match=r"cannot be unpacked into 'x': OSError: .* No space left"):
        await workspace.put(write_tar({"more": b"1" * 100_000}), "x")
    assert (await workspace.run("rm -r big x && seq 2000 | xargs touch")).exit_code in (0, 123)
    found = read_tar(await workspace.get(), max_entries=500)
    assert found.problem == "it has more than 500 entries"
    assert (await workspace.run("rm -f [0-9]*; cat file")).output == "kept\n"


async def test_memory_of_one_process_and_of_several(workspace: Workspace) -> None:
    one = await workspace.run("python3 -c 'bytes(10**9)'; echo $?")
    assert one.output.endswith("MemoryError\n1\n")
    hog = "python3 -c 'import time; held = b\"x\" * (60 << 20); time.sleep(1000)'"
    several = await workspace.run(f"{hog} & {hog} & {hog} & wait; echo never")
    assert (several.exit_code, several.stopped) == (137, None), "killed, and not the folder"
    await workspace.end_processes()  # the killed ones may still be ending
    assert await is_whole(workspace)


async def test_open_files_of_many_processes(workspace: Workspace) -> None:
    program = 'import os, time; held = [os.open("/dev/null", 0) for _ in range(200)]; time.sleep(1000)'
    result = await workspace.run(f"for _ in 1 2 3; do python3 -c '{program}' & done; wait")
    assert (result.exit_code, result.stopped) == (137, None)
    await workspace.end_processes()  # the killed ones may still be ending
    assert await is_whole(workspace)


async def test_tars_of_what_a_model_leaves(workspace: Workspace) -> None:
    await workspace.run(
        "rm file; mkdir d && echo x > d/a && ln d/a hard && ln -s /etc/passwd soft && mkfifo pipe && touch $'a\\nb' "
        "$'\\xff' && truncate -s 16M sparse && chmod +x hard && python3 -c 'import os\n"
        'for _ in range(300): os.mkdir("deep"); os.chdir("deep")\n'
        'open("bottom", "w")\''
    )
    with pytest.raises(WorkspaceError, match="too large: more than 1000000 bytes"):
        await workspace.get(max_bytes=1_000_000)
    found = read_tar(await workspace.get("d", "hard", "soft", "pipe", ".", max_bytes=20_000_000))
    sparse = found.files.pop("sparse")
    assert sparse == bytes(16 << 20)
    assert (found.files, found.executable, found.problem) == ({"d/a": b"x\n", "hard": b"x\n"}, {"d/a", "hard"}, None)
    reasons = {"'soft'": "a symbolic link", "'pipe'": "a pipe", "'\\\\xff'": "no UTF-8"}
    reasons |= {"'a\\nb'": "a control character in its name"}
    assert {name: why for name, why in found.left_out.items() if "deep" not in name} == reasons
    assert list(found.left_out.values()).count("an empty or a very long path") == 1


async def test_who_ends_the_driver_ends_the_workspace(workspace: Workspace) -> None:
    reason = "the process that starts the commands was killed by signal SIGKILL"
    assert await workspace.run("kill -9 -1; sleep 1000") == CommandResult("", stopped=f"the workspace ended: {reason}")
    with pytest.raises(WorkspaceError, match=reason):
        await workspace.put(write_tar({"a": b""}))


async def test_the_driver_survives_other_signals(workspace: Workspace) -> None:
    kept = "4|7|8|9|11|17|18|19|24|32|33"  # faults of the processor, stops and kills, and two of the C library
    command = f"for each in $(seq 1 64); do case $each in {kept}) ;; *) kill -$each $PPID;; esac; done; true"
    result = await workspace.run(command)
    assert (result.exit_code, result.stopped) == (0, None)
    await workspace.run("pkill python; trap '' TERM; kill -TERM -1; sleep 0.1")
    assert await is_whole(workspace)


async def test_a_driver_that_speaks_for_a_command_harms_its_own_workspace_alone(workspace: Workspace) -> None:
    """A command writes into the driver's memory; whatever comes back is a result, or the end of this workspace."""
    program = (
        "import os, re\n"
        "driver = os.getppid()\n"
        "with open(f'/proc/{driver}/maps') as maps, open(f'/proc/{driver}/mem', 'r+b', 0) as memory:\n"
        "    for line in maps:\n"
        "        low, high = (int(each, 16) for each in re.match(r'(\\w+)-(\\w+) rw', line).groups()) if ' rw' in line "
        "and re.match(r'\\w+-\\w+ rw', line) else (0, 0)\n"
        "        try:\n"
        "            memory.seek(low)\n"
        "            memory.write(b'\\0' * (high - low))\n"
        "        except (OSError, OverflowError): pass\n"
    )
    await workspace.run("cat > spoil.py <<'EOF'\n" + program + "EOF")
    result = await workspace.run("exec python3 spoil.py")
    later = await workspace.run("echo later")
    assert result.stopped is not None or result.exit_code is not None
    assert later == CommandResult("later\n", 0) or later.stopped is not None


async def test_a_lost_zygote_is_an_outage_and_the_next_one_works(pool: WorkspacePool) -> None:
    workspace = await pool.open()
    running = asyncio.create_task(workspace.run("sleep 1000"))
    await until(lambda: "sleep" in names_of_children())
    zygotes = [child for child in psutil.Process().children() if child.name() == "bwrap"]
    for zygote in zygotes:
        for below in zygote.children():
            os.kill(below.pid, 9)
    for asked in (running, workspace.run("true"), workspace.get()):
        with pytest.raises(SandboxError, match="a workspace is lost: the zygote is lost"):
            await asked
    async with await pool.open() as other:
        assert (await other.run("echo again")).output == "again\n"


async def test_a_workspace_that_ends_before_its_first_command_is_an_outage(pool: WorkspacePool) -> None:
    workspace = await pool.open()
    for zygote in [child for child in psutil.Process().children() if child.name() == "bwrap"]:
        for below in zygote.children():
            for supervisor in below.children():
                os.kill(supervisor.pid, 9)
    await until(lambda: workspace.stopped is not None)
    with pytest.raises(SandboxError, match="a workspace is lost: the sandbox is lost"):
        await workspace.put(write_tar({"a": b""}))


async def test_a_pool_that_closes_ends_what_runs() -> None:
    pool = WorkspacePool(SETTINGS)
    workspace = await pool.open()
    running = asyncio.create_task(workspace.run("sleep 1000"))
    await until(lambda: "sleep" in names_of_children())
    await pool.aclose()
    with pytest.raises(SandboxError, match="the pool was closed"):
        await running
    assert not {"sleep", "workspace"} & set(names_of_children())

"""Control groups, on a made tree of files: not every machine has cgroup v2 with its controllers.

The kernel does not apply the limits here. The tests check the files that are written and read, and the groups that are
joined and removed.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from verl_multiturn.sandbox import control_groups as groups
from verl_multiturn.sandbox.control_groups import ControlGroup, find_parent, make_group
from verl_multiturn.sandbox.pool import SandboxPool
from verl_multiturn.sandbox.settings import SandboxSettings

SETTINGS = SandboxSettings(memory_mb=64, disk_mb=16, processes=8, cpu_s=5, timeout_s=60, pool=0)
EVENTS = "low 0\nhigh 0\nmax 0\noom 0\noom_kill {}\noom_group_kill 0\n"


def tree(root: Path, *delegated: str) -> Path:
    """Make the groups of a user in `/user/scope`, and return the file that names the process's group.

    Args:
        root: Folder of the groups.
        delegated: Groups that give memory and pids to the groups below them.
    """
    for name in (".", "user", "user/scope"):
        (root / name).mkdir(exist_ok=True)
        given = "cpu memory pids" if name in delegated else "cpu"
        (root / name / "cgroup.subtree_control").write_text(given)
    membership = root.parent / "membership"
    membership.write_text("4:memory:/elsewhere\n0::/user/scope\n")
    return membership


@pytest.fixture
def made_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let new groups have their files and be removed with them, as the kernel does."""
    make, remove = os.mkdir, os.rmdir

    def mkdir(folder: Path) -> None:
        make(folder)
        (folder / "cgroup.procs").touch()
        (folder / "cpu.stat").write_text("usage_usec 1000\nuser_usec 0\n")
        (folder / "memory.events").write_text(EVENTS.format(0))

    def rmdir(folder: Path) -> None:
        for file in Path(folder).iterdir():
            file.unlink()
        remove(folder)

    with monkeypatch.context() as patch:
        patch.setattr(groups.os, "mkdir", mkdir)
        patch.setattr(groups.os, "rmdir", rmdir)
        patch.setattr(groups, "find_parent", lambda: tmp_path)
        yield tmp_path


def only(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def is_empty(folder: Path) -> bool:
    return not list(folder.iterdir())


def rewrite(path: Path, text: str) -> None:
    """Write the file in one write, as its reader may come in between."""
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, text.encode())
    os.close(fd)


@pytest.mark.parametrize(
    ("delegated", "found"),
    [((), None), ((".",), "."), (("user", "."), "user"), (("user/scope", "user"), "user/scope")],
)
def test_the_nearest_group_that_gives_limits(tmp_path: Path, delegated: tuple[str, ...], found: str | None) -> None:
    root = tmp_path / "root"
    root.mkdir()
    assert find_parent(root, tree(root, *delegated)) == (None if found is None else root / found)


def test_without_cgroup_v2(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    assert find_parent(tmp_path, membership) is None
    membership.write_text("4:memory:/elsewhere\n")
    assert find_parent(tmp_path, membership) is None


def test_a_group_that_cannot_be_joined_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    root.mkdir()
    membership = tree(root, "user")
    real = os.mkdir
    # Its `cgroup.procs` is a folder here, which not even root can write to.
    monkeypatch.setattr(groups.os, "mkdir", lambda folder: (real(folder), real(folder / "cgroup.procs")))
    assert find_parent(root, membership) is None


def test_what_the_dead_left_is_removed(made_tree: Path) -> None:
    ended = psutil.Popen(["true"])
    ended.wait()
    for owner in (ended.pid, os.getpid()):
        groups.os.mkdir(made_tree / f"verl-multiturn-{owner}-0")
    groups._remove_left_over(made_tree)
    assert [folder.name for folder in made_tree.iterdir()] == [f"verl-multiturn-{os.getpid()}-0"]


def test_the_limits_of_a_group(made_tree: Path) -> None:
    group = make_group(SETTINGS)
    assert group is not None
    (folder,) = made_tree.iterdir()
    written = {name: (folder / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max")}
    assert written == {"memory.max": str(96 << 20), "memory.swap.max": "0", "pids.max": "8"}
    assert (folder / "memory.oom.group").read_text() == "1"
    group.remove()
    assert (group.fds, list(made_tree.iterdir())) == ([], [])
    assert make_group(SETTINGS.model_copy(update={"isolation": "subprocess"})) is None


def test_a_group_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "find_parent", lambda: tmp_path / "gone")
    assert make_group(SETTINGS) is None
    with pytest.raises(FileNotFoundError):
        ControlGroup(tmp_path / "gone", SETTINGS)


async def test_a_sandbox_joins_its_group_and_obeys_its_figures(made_tree: Path) -> None:
    async with SandboxPool(SETTINGS) as pool:
        sandbox = await pool.acquire()
        folder = only(made_tree)
        assert (folder / "cgroup.procs").read_text() == "0"
        assert (await sandbox.run("import os; os.listdir('/proc/self/fd')")).output == "['0', '1', '2', '3', '4']\n"
        running = asyncio.create_task(sandbox.run("import time; time.sleep(1000)"))
        used_s = 0
        while not running.done():  # the cell's time counts from its begin, which has no event
            used_s += 6
            rewrite(folder / "cpu.stat", f"usage_usec {used_s}000000\nuser_usec 0\n")
            await asyncio.wait({running}, timeout=0.05)
        assert (await running).stopped == "the code was stopped after 5 s of CPU time"
        assert is_empty(made_tree)


async def test_what_the_kernel_killed_for_memory_is_said_so(made_tree: Path) -> None:
    async with SandboxPool(SETTINGS) as pool:
        sandbox = await pool.acquire()
        folder = only(made_tree)
        rewrite(folder / "memory.events", EVENTS.format(1))
        result = await sandbox.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        assert result.stopped == "the code was stopped: it used more than 64 MB of memory"
    assert is_empty(made_tree)

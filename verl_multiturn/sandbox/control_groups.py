"""Control groups (cgroup v2) for sandboxes, where this process may make some.

With a group the kernel itself counts and limits:
- `memory.max` limits all memory: of processes, files, pipes, sockets, and of the kernel's own records about them;
- `pids.max` limits processes and threads;
- `cpu.stat` counts processor time, also that of children that were not waited for.

Without a group the supervisor counts as well as it can (`usage.py`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import re
import subprocess
from pathlib import Path

from verl_multiturn.sandbox.settings import SandboxSettings

_LOG = logging.getLogger(__name__)
_NEEDED = {"memory", "pids"}
_PREFIX = "verl-multiturn"
_KERNEL_BYTES = 16 * 2**20
"""Bytes allowed beside memory and disk, for the kernel's own records: page tables, names, open files."""
_numbers = itertools.count()


class ControlGroup:
    """The control group of one sandbox.

    Args:
        parent: The folder of the group in which the new group is made.
        settings: The settings of the sandbox, with its limits.
        spares_worker: As in `SandboxPool`: short of memory, the kernel ends one process and not all of them.

    Attributes:
        fds: Descriptors for the supervisor: of `cgroup.procs` (to join the group), of `cpu.stat` (processor time), of
            `memory.events` (whether the memory limit was hit). Empty once they are closed.

    Raises:
        OSError: The group cannot be made; nothing of it remains.
    """

    def __init__(self, parent: Path, settings: SandboxSettings, spares_worker: bool = False) -> None:
        self._folder = parent / f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self.fds: list[int] = []
        os.mkdir(self._folder)
        try:
            most = (settings.memory_mb + settings.disk_mb) * 2**20 + _KERNEL_BYTES
            of_all = int(not spares_worker)
            for name, value in (("memory.max", most), ("memory.oom.group", of_all), ("pids.max", settings.processes)):
                (self._folder / name).write_text(str(value), encoding="utf-8")
            with contextlib.suppress(OSError):  # a kernel without swap has no such file
                (self._folder / "memory.swap.max").write_text("0", encoding="utf-8")
            for name, mode in (
                ("cgroup.procs", os.O_WRONLY),
                ("cpu.stat", os.O_RDONLY),
                ("memory.events", os.O_RDONLY),
            ):
                self.fds.append(os.open(self._folder / name, mode | os.O_CLOEXEC))
        except OSError:
            self.remove()
            raise

    def close_fds(self) -> None:
        """Close our descriptors: the supervisor has its own copies, or will never get any."""
        while self.fds:
            os.close(self.fds.pop())

    def remove(self) -> None:
        """Remove the group, whose processes have all ended."""
        self.close_fds()
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)


def make_group(settings: SandboxSettings, spares_worker: bool = False) -> ControlGroup | None:
    """Return a new group for a sandbox; None where no group can be made (then the supervisor counts alone)."""
    parent = find_parent() if settings.isolation == "bwrap" else None
    if parent is None:
        return None
    try:
        return ControlGroup(parent, settings, spares_worker)
    except OSError as error:
        _LOG.warning("no control group for a sandbox: %s; its supervisor counts alone", error)
        return None


@functools.cache
def find_parent(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> Path | None:
    """Return the folder of the nearest group in which we may make groups that limit memory and processes.

    The search begins at this process's own group and goes up. Groups of our killed processes in the folder are removed.

    Args:
        root: Where the cgroup v2 hierarchy is mounted.
        membership: The file that names this process's own group.

    Returns:
        The folder; None where there is none.
    """
    try:
        own = re.search(r"^0::/(.*)$", membership.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    if own is None:
        return None
    folder = root / own[1]
    for candidate in [folder, *folder.parents]:
        if not candidate.is_relative_to(root):
            break
        if _gives_limits(candidate) and _can_be_joined(candidate):
            _remove_left_over(candidate)
            _LOG.info("sandboxes get control groups below %s", candidate)
            return candidate
    return None


def _gives_limits(folder: Path) -> bool:
    try:
        given = set((folder / "cgroup.subtree_control").read_text(encoding="utf-8").split())
    except OSError:
        return False
    return given >= _NEEDED and os.access(folder, os.W_OK)


def _can_be_joined(parent: Path) -> bool:
    """Return whether a process of ours may join a group made in a folder, by trying it."""
    folder = parent / f"{_PREFIX}-{os.getpid()}-probe"
    try:
        os.mkdir(folder)
        command = ["sh", "-c", 'echo 0 > "$1"', "sh", str(folder / "cgroup.procs")]
        return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _remove_left_over(parent: Path) -> None:
    """Remove the groups of our processes that were killed before they could remove them."""
    for folder in parent.glob(f"{_PREFIX}-*-*"):
        owner = folder.name.split("-")[2]
        if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            with contextlib.suppress(OSError):
                os.rmdir(folder)

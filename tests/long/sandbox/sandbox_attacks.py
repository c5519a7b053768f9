"""Attacks on the sandbox: programs run by the real `PythonTool`, each with a check that the host is unharmed.

    python -m benchmarks.sandbox_attacks [--only NAME] [--packages] [--without-root]

The host offers real prey: a secret in files, in our environment, in a victim process and in another conversation's
sandbox; listeners on TCP, UDP, a UNIX path and an abstract name; folders that anybody may write to.

An attack is blocked when all of these hold:
- the program got nothing (no secret in its answer, no `WON`);
- the conversation's later cells are answered correctly;
- `Host.harm` finds nothing: it looks at marker files, listeners, the victim, signals, mounts and processes;
- the other conversation's sandbox, the number of processes and the memory are as they should be.

Without `--only`, no other program should run: then the peak memory of each attack but `IN_MANY`, and the memory and
disk that the machine lost, have limits, too.

The benchmark prints each attack that was not blocked, and the peak memory of each attack on memory. The peak is that of
the control group that this program runs in, including the kernel's memory for our sockets and pipes. Where the group's
memory cannot be read, the peak is the whole machine's loss.

`--packages` shows the programs the installed packages. `--without-root` runs everything as a user without rights. When
root starts it, it first enters a mount namespace in which that user can reach Python and this checkout.

The last line is `{"attacks": n, "blocked": n, "peak_mb": n}`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.long.sandbox.sandbox_hogs import MEMORY, SCARCE, TIME
from tests.long.sandbox.sandbox_host import Host
from tests.long.sandbox.sandbox_programs import ONE_CELL, PRELUDE
from tests.long.sandbox.sandbox_sequences import MANY_CELLS, MANY_CONVERSATIONS
from verl_multiturn.sandbox.guest import syscalls
from verl_multiturn.tools.python import PythonTool

CONFIG = {
    "stateful": True, "timeout_s": 6, "cpu_s": 3, "memory_mb": 256, "disk_mb": 64, "processes": 32,
    "output_characters": 200_000, "pool": 1,
}  # fmt: skip
MAX_DESCENDANTS = 80
"""The most descendants: the attack's 32 processes, two for each sandbox that runs or starts, the zygote, the victim."""
MAX_RESIDENT_BYTES = 2 << 30
"""The most resident memory of all descendants.

It is far below the memory bombs' target, and above the memory of that many idle processes (shared pages count in each
process).
"""
MAX_PEAK_BYTES = 640 << 20
"""The most bytes for an attack that may use 256 MB and 64 MB of files, plus the bytes it gets between two looks."""
IN_MANY = frozenset({"memory_bomb_in_many", "socket_buffers_in_many"})
"""Attacks whose processes all take memory: a limit must stop them.

They have no bound in bytes, since the time between two looks depends on the machine. Each process has `memory_mb`.
"""
MAX_LOSS_BYTES = 4 << 30
"""The most memory and disk that a run of all attacks may cost the machine."""
_TOO_MUCH = "MB were used"
_NOBODY = 61_001
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


@dataclass(frozen=True)
class Attack:
    """An attack's cells: of one conversation, or with `apart`, each of a conversation of its own, all open at once."""

    name: str
    cells: tuple[str, ...]
    apart: bool = False


ATTACKS = [
    *(
        Attack(name, cells)
        for programs in (ONE_CELL, MANY_CELLS, MEMORY, TIME, SCARCE)
        for name, cells in programs.items()
    ),
    *(Attack(name, cells, apart=True) for name, cells in MANY_CONVERSATIONS.items()),
]


PAUSE_S = 2.5
"""Seconds that the cell `'pause'` waits, as a conversation waits while the model writes."""


def memory_in_use() -> tuple[int, bool]:
    """Return the bytes of memory in use, and whether they are those of our control group.

    Where the group's memory cannot be read, the bytes are those that the machine has not available.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for file in (f"memory{path}/memory.usage_in_bytes", f"{path[1:]}/memory.current"):
                if controllers in ("", "memory") and (found := Path("/sys/fs/cgroup", file)).exists():
                    return int(found.read_text()), True
    memory = psutil.virtual_memory()
    return memory.total - memory.available, False


class Watch:
    """The most processes and memory that our descendants had while an attack ran."""

    def __init__(self) -> None:
        self.descendants = 0
        self.resident = 0
        self.peak = 0
        """Bytes above those in use at the start."""
        self._before, self.is_ours = memory_in_use()

    async def run(self) -> None:
        """Look at the memory every 5 ms and at the processes every 50 ms, until cancelled."""
        ourselves = psutil.Process()
        for look in itertools.count():
            self.peak = max(self.peak, memory_in_use()[0] - self._before)
            if look % 10 == 0:
                self._count(ourselves.children(recursive=True))
            await asyncio.sleep(0.005)

    def _count(self, found: list[psutil.Process]) -> None:
        self.descendants = max(self.descendants, len(found))
        resident = 0
        for process in found:
            with contextlib.suppress(psutil.Error):
                resident += process.memory_info().rss
        self.resident = max(self.resident, resident)


async def run_attack(
    tool: PythonTool, host: Host, attack: Attack, bystander: str, alone: bool = False
) -> tuple[list[str], int]:
    """Run an attack, then check the host and the other conversation.

    Args:
        tool: The Python tool.
        host: The prey.
        attack: The attack.
        bystander: Id of the other conversation, whose variable and file must keep their content.
        alone: Whether no other program runs in our control group, so that its peak memory is the attack's.

    Returns:
        The reasons why the attack was not blocked, empty when it was; and its peak memory in bytes.
    """
    head = PRELUDE + host.known()
    conversations = [f"{attack.name}-{i if attack.apart else 0}" for i in range(len(attack.cells))]
    watch = Watch()
    watching = asyncio.create_task(watch.run())
    answers = []
    try:
        for conversation in dict.fromkeys(conversations):
            await tool.create(conversation)
        for conversation, cell in zip(conversations, attack.cells, strict=True):
            if cell.startswith("'pause"):
                await asyncio.sleep(PAUSE_S)
            code = cell if cell.startswith(("'honest", "'pause")) else head + cell
            answers.append(await ask(tool, conversation, code))
    finally:
        for conversation in dict.fromkeys(conversations):
            await tool.release(conversation)
        watching.cancel()
    problems = [f"it won: {line}" for answer in answers for line in answer.splitlines() if line.startswith("WON")]
    problems += ["it read the secret" for answer in answers if host.secret in answer]
    for cell, answer in zip(attack.cells, answers, strict=True):
        if cell.startswith("'honest") and cell.strip() not in answer:
            problems.append(f"{cell.strip()} was answered with {answer[:200]!r}")
    if await ask(tool, bystander, "kept, open('kept').read()") != f"{(host.secret, host.secret)!r}\n":
        problems.append("the other conversation was harmed")
    in_many = attack.name in IN_MANY
    if in_many and not any("the code was stopped" in answer for answer in answers):
        problems.append("no limit stopped it")
    if watch.descendants > MAX_DESCENDANTS or (watch.resident > MAX_RESIDENT_BYTES and not in_many):
        problems.append(f"there were {watch.descendants} processes with {watch.resident >> 20} MB")
    if (
        alone and watch.is_ours and watch.peak > MAX_PEAK_BYTES and not in_many
    ):  # else another program may have taken it
        problems.append(f"{watch.peak >> 20} {_TOO_MUCH}")
    return problems + host.harm(), watch.peak


async def ask(tool: PythonTool, conversation: str, code: str) -> str:
    """Run code with the tool, and return the text for the model."""
    try:
        return (await tool.execute(conversation, {"code": code})).text
    except ValueError as error:
        return f"Error: {error}"


async def run_attacks(
    attacks: list[Attack],
    isolation: str,
    packages: bool = False,
    peaks: dict[str, int] | None = None,
    alone: bool = False,
) -> dict[str, list[str]]:
    """Run attacks one after another, each against a new host.

    Args:
        attacks: The attacks.
        isolation: The tool's setting `isolation`. Only with "bwrap" are the system's folders attacked, too.
        packages: Whether the programs see the installed packages.
        peaks: Filled with the peak memory in bytes of each attack, by name.
        alone: Whether no other program runs in our control group, so that its peak memory is checked.

    Returns:
        The reasons why an attack was not blocked, by the attack's name.
    """
    tool = PythonTool({**CONFIG, "isolation": isolation, "packages": packages})
    failures = {}
    try:
        for attack in attacks:
            with Host(everywhere=isolation == "bwrap") as host:
                await tool.create("bystander")
                keep = f"kept = {host.secret!r}\nwith open('kept', 'w') as file: _ = file.write(kept)"
                await ask(tool, "bystander", keep)
                failures[attack.name], peak = await run_attack(tool, host, attack, "bystander", alone)
                if any(problem.endswith(_TOO_MUCH) for problem in failures[attack.name]):
                    # Another program of the same control group may have taken it at that moment, so the attack runs a
                    # second time.
                    failures[attack.name], peak = await run_attack(tool, host, attack, "bystander", alone)
                if peaks is not None:
                    peaks[attack.name] = peak
                await tool.release("bystander")
    finally:
        await tool.aclose()
    return failures


def become_nobody(needed: list[Path]) -> None:
    """Become a user without rights, who can still reach `needed`; there is no way back.

    The process enters its own mount namespace. There, an empty folder covers each folder that other users may not enter
    (root's own, for example), and the needed paths are bound into it.

    Args:
        needed: Files and folders that the user has to reach.
    """
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", "", _MS_REC | _MS_PRIVATE, "")
    closed: dict[Path, list[tuple[Path, int]]] = {}
    for path in sorted({path.resolve() for path in needed}):
        for parent in reversed(path.parents):
            if not parent.stat().st_mode & 0o001:
                closed.setdefault(parent, []).append((path, os.open(path, os.O_PATH)))
                break
    for parent, paths in closed.items():
        syscalls.mount("tmpfs", str(parent), "tmpfs", 0, "mode=755")
        for path, fd in paths:
            path.mkdir(parents=True, exist_ok=True)
            syscalls.mount(f"/proc/self/fd/{fd}", str(path), "", syscalls.MS_BIND, "")
            os.close(fd)
    home = tempfile.mkdtemp(prefix="home-of-nobody-")
    os.chown(home, _NOBODY, _NOBODY)
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # otherwise our files in /proc belong to root
    os.environ["HOME"] = home
    atexit.register(shutil.rmtree, home)


def run(only: str = "", packages: bool = False) -> tuple[dict[str, int], bool]:
    """Run attacks, then look at the machine, and print those that were not blocked.

    Args:
        only: Beginning of the names of the attacks; with it, tests may run beside this.
        packages: Whether the sandbox has the installed packages.

    Returns:
        The figures, and whether the machine is as it was before.
    """
    attacks = [attack for attack in ATTACKS if attack.name.startswith(only)]
    alone = not only
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(tempfile.gettempdir()).free
    descriptors = len(os.listdir("/proc/self/fd"))
    peaks: dict[str, int] = {}
    failures = asyncio.run(run_attacks(attacks, "bwrap", packages, peaks, alone))
    for name, problems in failures.items():
        if problems:
            print(f"{name}: NOT BLOCKED: {'; '.join(dict.fromkeys(problems))}")
    for name in MEMORY:
        if name in peaks:
            print(f"{name}: peak memory {peaks[name] >> 20} MB")
    left = psutil.Process().children(recursive=True)
    lost = memory - psutil.virtual_memory().available, disk - shutil.disk_usage(tempfile.gettempdir()).free
    print(
        f"afterwards: processes left {len(left)}, descriptors {len(os.listdir('/proc/self/fd')) - descriptors:+}, ",
        end="",
    )
    print(f"memory {-lost[0] >> 20:+} MB, disk {-lost[1] >> 20:+} MB")
    blocked = sum(not problems for problems in failures.values())
    peak_mb = max(peaks.values(), default=0) >> 20
    is_as_before = not left and (not alone or max(lost) <= MAX_LOSS_BYTES)
    return {"attacks": len(attacks), "blocked": blocked, "peak_mb": peak_mb}, is_as_before

"""What the processes of one sandbox use, measured from /proc by its supervisor.

Memory is what the processes have mapped, a page that several share counted once, and beside it the most that their
sockets and pipes can hold: the kernel counts every socket of a network namespace, those too that nobody has accepted,
that are on their way to another process, or whose owner closed them before they were read.

Processor time is counted exactly for whoever is alive or was waited for. A child that nobody waits for, because its
parent ignores SIGCHLD, takes its time with it. So the time is measured a second time, by looking at random moments who
is running, which finds such children too; that second figure counts only where it is far above the first.

Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time

FILE_BYTES = 64 * 1024
"""The most that an open pipe holds. (`F_SETPIPE_SZ` is refused.)"""
_SAMPLED_FACTOR, _SAMPLED_SLACK_S = 1.25, 1.0
_ENDED = (FileNotFoundError, ProcessLookupError)
"""What reading a process's files raises when it has ended. Any other error ends the sandbox: who cannot see it all
cannot watch over it."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Usage:
    """What some processes, and the children that we waited for, use.

    Attributes:
        cpu_s: processor seconds, of the children that they waited for too.
        tasks: threads.
        resident: bytes in memory; a page that two share counts twice.
        virtual: bytes of address space.
        states: for each process its state, `T` when it is stopped.
        own_ticks: for each process its own processor time.
        may_run: the processes that could be running.
    """

    def __init__(self) -> None:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu_s = children.ru_utime + children.ru_stime
        self.tasks = 0
        self.resident = 0
        self.virtual = 0
        self.states: dict[str, bytes] = {}
        self.own_ticks: dict[str, int] = {}
        self.may_run: set[str] = set()

    @classmethod
    def of(cls, processes: list[str]) -> Usage:
        usage = cls()
        for process in processes:
            try:
                fields = _stat(process)
            except _ENDED:
                continue
            usage.states[process] = fields[0]
            usage.own_ticks[process] = int(fields[11]) + int(fields[12])
            usage.cpu_s += sum(map(int, fields[11:15])) / _TICKS_PER_S
            tasks = int(fields[17])
            usage.tasks += tasks
            if tasks > 1 or fields[0] == b"R":
                usage.may_run.add(process)
            usage.virtual += int(fields[20])
            usage.resident += int(fields[21]) * resource.getpagesize()
        return usage


class SampledTime:
    """Processor seconds by sampling: what those seen twice used in between, and for a new one the time since the last
    look if it is just running. Its births and deaths fall anywhere between two looks, so that over many looks what is
    counted too much at the first and too little after the last comes to nothing."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._before: dict[str, int] = {}
        self._looked = time.monotonic()

    def look(self, usage: Usage) -> None:
        now = time.monotonic()
        for process, ticks in usage.own_ticks.items():
            if process in self._before:
                self.seconds += max(0, ticks - self._before[process]) / _TICKS_PER_S
            elif process in usage.may_run:
                with contextlib.suppress(*_ENDED):
                    self.seconds += (now - self._looked) * _running(process)
        self._before, self._looked = usage.own_ticks, now

    @staticmethod
    def limit_s(cpu_s: float) -> float:
        """When so much was sampled, more than `cpu_s` were used beyond doubt."""
        return _SAMPLED_FACTOR * cpu_s + _SAMPLED_SLACK_S


def _stat(path: str) -> list[bytes]:
    """The fields of proc(5) from the third one, the state, on; the second, a name, may hold anything."""
    with open(f"/proc/{path}/stat", "rb") as file:
        content = file.read()
    return content[content.rindex(b")") + 2 :].split()


def _running(process: str) -> float:
    """How many of its threads have a processor now: those that could run, by the share of such time that they had."""
    count = 0.0
    for task in os.listdir(f"/proc/{process}/task"):
        path = f"{process}/task/{task}"
        if _stat(path)[0] == b"R":
            ran, waited = 1, 0
            with contextlib.suppress(*_ENDED), open(f"/proc/{path}/schedstat", "rb") as file:  # not every kernel has it
                ran, waited = map(int, file.read().split()[:2])
            count += ran / max(1, ran + waited)
    return count


def field(fd: int, name: bytes) -> int:
    """Return the number after a name in an open file of a control group."""
    words = os.pread(fd, 4096, 0).split()
    return int(words[words.index(name) + 1])


def open_files(processes: list[str]) -> int:
    count = 0
    for process in processes:
        with contextlib.suppress(*_ENDED):
            count += len(os.listdir(f"/proc/{process}/fd"))
    return count


def sockets() -> int:
    """All of our own network namespace."""
    with open("/proc/self/net/sockstat", "rb") as file:
        return int(file.readline().split()[2])


def proportional_bytes(processes: list[str]) -> int:
    """The memory of some processes, a page that several share counted once; what was swapped out, too."""
    total = 0
    for process in processes:
        with contextlib.suppress(*_ENDED), open(f"/proc/{process}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith((b"Pss:", b"SwapPss:")):
                    total += int(line.split()[1]) * 1024
    return total

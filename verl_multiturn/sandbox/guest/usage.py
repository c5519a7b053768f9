"""Memory and processor time of the processes of one sandbox, measured from /proc by its supervisor.

Memory is the sum of three parts. The first is the mapped memory of the processes; a page that several share counts
once. The second is the kernel's data for that: page tables and records of mappings. The third is the most that their
sockets and pipes can hold. The kernel counts every socket of a network namespace, also one that was not accepted, that
is on its way to another process, or that its owner closed before it was read.

A process whose main thread has ended lives on while another thread does. Then its own files in /proc show no memory
and no open files, and those of the other threads do. All threads of a process share its memory and its open files: the
system call filter refuses calls that would give a thread files of its own.

Processor time is measured twice. The first figure is exact for every process that is alive or was waited for. It misses
a child that is never waited for, because its parent ignores SIGCHLD. The second figure is sampled: at random moments
the supervisor looks which processes are running, and so finds such children, too. The second figure counts only where
it is far above the first (`SampledTime.limit_s`).

Runs inside the sandbox. Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import time
from collections.abc import Iterator

from . import syscalls

FILE_BYTES = 16 * os.sysconf("SC_PAGE_SIZE")
"""Largest number of bytes that an open pipe holds: 16 pages. (`F_SETPIPE_SZ`, which would raise it, is refused.)"""
_SAMPLED_FACTOR, _SAMPLED_SLACK_S = 1.25, 1.0
_ENDED = (FileNotFoundError, ProcessLookupError)
"""Errors of reading the /proc files of a process that has ended.

Any other error ends the sandbox: a supervisor that cannot see every process cannot enforce a limit.
"""
_RETRIES = 8
"""Times to look for a living thread: one may end while we look, after it has started the next one."""
_MAPPING_BYTES = 256
"""Bytes that the kernel keeps for each mapping of a process: a `vm_area_struct`, and its place in a tree."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Usage:
    """Resources that some processes use, with the processor time of children that this process has waited for.

    Attributes:
        cpu_s: Processor seconds of the processes, and of the children that they or this process waited for.
        tasks: Number of threads.
        resident: Bytes in memory. A page that two processes share counts twice.
        virtual: Bytes of address space.
        states: State of each process, by process id; `T` means stopped.
        paths: For each process that has memory and open files, the folder below /proc that shows them: `PID`, or
            `PID/task/TID` where the main thread has ended.
        own_ticks: Processor time of each process without its children, by process id, in clock ticks (`SC_CLK_TCK`).
        may_run: Ids of the processes that could be running now.
    """

    def __init__(self) -> None:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu_s = children.ru_utime + children.ru_stime
        self.tasks = 0
        self.resident = 0
        self.virtual = 0
        self.states: dict[str, bytes] = {}
        self.paths: list[str] = []
        self.own_ticks: dict[str, int] = {}
        self.may_run: set[str] = set()

    @classmethod
    def of(cls, processes: list[str]) -> Usage:
        """Return the usage of processes; one that has ended is omitted.

        Args:
            processes: Process ids as text, or `self`.
        """
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
            path: str | None = process
            if fields[20] == b"0":
                path, fields = _living_thread(process, fields) if tasks > 1 else (None, fields)
            if path is not None:
                usage.paths.append(path)
                usage.virtual += int(fields[20])
                usage.resident += int(fields[21]) * resource.getpagesize()
        return usage


class SampledTime:
    """Processor seconds of a sandbox, estimated from repeated looks.

    A process that was seen before counts with the time that it used since the last look. A new process counts with the
    whole time since the last look, if it is running now. Processes start and end anywhere between two looks, so over
    many looks the time counted too much at the first look and the time missed after the last one balance each other.

    Attributes:
        seconds: The estimate so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._before: dict[str, int] = {}
        self._looked = time.monotonic()

    def look(self, usage: Usage) -> None:
        """Add the time since the last look to the estimate.

        Args:
            usage: The usage of all processes of the sandbox, measured now.
        """
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
        """Return the sampled seconds beyond which more than `cpu_s` were used without doubt."""
        return _SAMPLED_FACTOR * cpu_s + _SAMPLED_SLACK_S


def _stat(path: str) -> list[bytes]:
    """Return the fields of a `stat` file (see proc(5)) from the third one, the state, on.

    The second field, a name in parentheses, may hold any character.
    """
    with open(f"/proc/{path}/stat", "rb") as file:
        content = file.read()
    return content[content.rindex(b")") + 2 :].split()


def _living_thread(process: str, fields: list[bytes]) -> tuple[str | None, list[bytes]]:
    """Return the path below /proc, and the `stat` fields, of a thread that has an address space.

    Args:
        process: Id of a process whose main thread has none.
        fields: The fields of the main thread; returned with None where every other thread has ended, too.
    """
    for _ in range(_RETRIES):
        with contextlib.suppress(*_ENDED):
            for task in os.listdir(f"/proc/{process}/task"):
                with contextlib.suppress(*_ENDED):
                    path = f"{process}/task/{task}"
                    found = _stat(path)
                    if found[20] != b"0":
                        return path, found
    return None, fields


@contextlib.contextmanager
def _unless_ended(path: str) -> Iterator[None]:
    """Leave the block at an error that means that a process or thread has ended; its files in /proc then are root's."""
    try:
        yield
    except _ENDED:
        return
    except PermissionError:
        with contextlib.suppress(*_ENDED):
            if _stat(path)[20] != b"0":
                raise


def _running(process: str) -> float:
    """Return the expected number of threads of a process that have a processor now.

    A thread that could run counts with its share: the time that it ran, divided by the time that it ran or waited.
    """
    count = 0.0
    for task in os.listdir(f"/proc/{process}/task"):
        path = f"{process}/task/{task}"
        if _stat(path)[0] == b"R":
            ran, waited = 1, 0
            with contextlib.suppress(*_ENDED), open(f"/proc/{path}/schedstat", "rb") as file:  # not in every kernel
                ran, waited = map(int, file.read().split()[:2])
            count += ran / max(1, ran + waited)
    return count


def field(fd: int, name: bytes) -> int:
    """Return the number after a name in an open file of a control group.

    Args:
        fd: Descriptor of the file, for example of `cpu.stat`.
        name: The name, for example `b"usage_usec"`.

    Raises:
        ValueError: The file does not hold the name.
    """
    words = os.pread(fd, 4096, 0).split()
    return int(words[words.index(name) + 1])


def open_files(paths: list[str]) -> tuple[int, int]:
    """Return the number of open descriptors of processes, and of files that their epoll descriptors watch.

    A file counts once for each descriptor by which it is watched, also if that one was closed: the kernel keeps those.

    Args:
        paths: `Usage.paths` of the processes.
    """
    count = watches = 0
    for path in paths:
        with _unless_ended(path):
            descriptors = os.listdir(f"/proc/{path}/fd")
            count += len(descriptors)
            for fd in descriptors:
                with contextlib.suppress(*_ENDED):  # it may have been closed
                    if os.readlink(f"/proc/{path}/fd/{fd}") == "anon_inode:[eventpoll]":
                        with open(f"/proc/{path}/fdinfo/{fd}", "rb") as file:
                            watches += file.read().count(b"tfd:")
    return count, watches


def sockets() -> int:
    """Return the number of sockets in this process's network namespace."""
    with open("/proc/self/net/sockstat", "rb") as file:
        return int(file.readline().split()[2])


def page_tables(paths: list[str]) -> int:
    """Return the bytes of the page tables of processes, given by `Usage.paths`."""
    total = 0
    for path in paths:
        with _unless_ended(path), open(f"/proc/{path}/status", "rb") as file:
            _, found, rest = file.read().partition(b"VmPTE:")
            total += int(rest.split(maxsplit=1)[0]) * 1024 if found else 0
    return total


def hold_more(usage: Usage, allowed: int) -> bool:
    """Return whether the memory of processes, with its swapped part, is more than allowed.

    A page that several processes share counts once, and so does an address space: a child of `vfork` has its parent's.
    The kernel's records of mappings count, too, where they may be over a quarter of the limit: there is at most
    one for each page.

    Args:
        usage: The usage of the processes.
        allowed: A number of bytes.
    """
    many_records = usage.virtual // resource.getpagesize() * _MAPPING_BYTES > allowed // 4
    # Take the records first: where there are so many of them, to sum up the pages takes long.
    for used in itertools.chain(_records(usage.paths) if many_records else (), _mapped(usage.paths)):
        allowed -= used
        if allowed < 0:
            return True
    return False


def _mapped(paths: list[str]) -> Iterator[int]:
    counted: list[int] = []
    for path in paths:
        task = int(path.rpartition("/")[2])
        if any(syscalls.have_one_memory(task, other) for other in counted):
            continue
        with _unless_ended(path), open(f"/proc/{path}/smaps_rollup", "rb") as file:
            yield sum(int(line.split()[1]) * 1024 for line in file if line.startswith((b"Pss:", b"SwapPss:")))
            counted.append(task)


def _records(paths: list[str]) -> Iterator[int]:
    for path in paths:
        with _unless_ended(path), open(f"/proc/{path}/maps", "rb") as file:
            while chunk := file.read(1 << 16):
                yield chunk.count(b"\n") * _MAPPING_BYTES

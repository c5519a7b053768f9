"""Supervisor: the first process of a sandbox. It makes the namespaces, starts the worker and enforces the limits.

    parent  ⇄  supervisor  ⇄  worker (runs the untrusted code)

The supervisor sends the parent two kinds of packets: `done`, with a cell's nonce and value behind it, and `end REASON`.
Once the worker runs code, the supervisor passes on no other message of the worker.

With namespaces the supervisor is pid 1 of the sandbox's pid namespace: when it ends, for whatever reason, the kernel
ends every process in that namespace. The worker cannot signal the supervisor (the kernel protects a namespace's first
process from the others), cannot trace it, and cannot see it in /proc (another user namespace, hidepid).

Runs inside the sandbox. Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from . import cell, confine, syscalls
from .usage import FILE_BYTES, SampledTime, Usage, field, hold_more, open_files, page_tables, sockets

DONE = b"done"
"""Packet to the parent: the sandbox is ready, or a cell is over; the nonce of the cell and its value follow."""
MAX_OPEN_FILES = 512
"""Largest number of open descriptors, of all processes of a sandbox together."""
MAX_WATCHES = 2048
"""Largest number of files that the epoll descriptors of a sandbox watch, counted at each of these descriptors."""
_TICK_S = 0.02
_SPARED = 25
"""Number of looks that find a limit exceeded, although the other processes were killed and are gone, before the end.

After as many looks at processes that are still ending, those that have begun since are killed, too.
"""
_MOST_WAITS = 1500
"""Number of looks in a row at killed processes that are still ending, before the end."""
_IDLE_TICK_S = 0.1
_FAILED = b"!"
_STARTED = b"started".ljust(cell.NONCE_BYTES)
_PRIORITY = -15
"""Nice value of the supervisor, where it may have one below 0: on a busy machine the code gains by each late look."""
_OWN_NAMESPACES = (
    syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWNET
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWCGROUP
)
_INODES_PER_MB = 64
_OUR_SOCKETS = 2
"""Sockets of ours in a sandbox's network namespace: both ends of the channel between supervisor and worker."""


def run(
    control: socket.socket,
    output_fd: int,
    spec: dict[str, Any],
    filters: bytes,
    number: int,
    foreign: list[int],
    group_fds: tuple[int, ...] = (),
) -> NoReturn:
    """Be the supervisor of one sandbox until the sandbox ends; never returns.

    Args:
        control: The socket to the parent.
        output_fd: The pipe that becomes the code's standard output and error.
        spec: The mapping of `launch.guest_spec`. The zygote adds `zygote_memory`, the bytes of its own address space.
        filters: The system call filter of `seccomp.program`.
        number: Number of the sandbox.
        foreign: Descriptors of the zygote that this fork of it closes.
        group_fds: The descriptors of `groups.Group`; empty where there is no control group.
    """
    try:
        os.setsid()
        for fd in foreign:
            os.close(fd)
        root = None
        if spec["namespaces"]:
            root = _isolate(spec)
        else:
            os.mkdir(f"{spec['home']}/{number}", 0o700)
        task, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker = os.fork()
        if worker == 0:
            _work(theirs, output_fd, spec, filters, number, group_fds, root)
        theirs.close()
        os.close(output_fd)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, min(_PRIORITY, os.getpriority(os.PRIO_PROCESS, 0)))
        _Supervisor(control, task, worker, spec, group_fds).watch()
    except OSError as error:
        _tell(control, f"end setup {error}".encode())
    finally:
        os._exit(1)


def _isolate(spec: dict[str, Any]) -> int:
    """Enter namespaces of our own; return a descriptor of the worker's root.

    The root is a copy of our mounts that belongs to no mount namespace. So the list of mounts that the code finds in
    /proc is empty: it lists the mounts of our namespace that can be reached from the code's root. Otherwise it would
    name the host's folders that Python and the system's files are bound from.
    """
    syscalls.unshare(_OWN_NAMESPACES)
    secure = syscalls.MS_NOSUID | syscalls.MS_NODEV
    # Show processes only: no /proc/sys, no kernel state, and no process that the reader may not trace.
    syscalls.mount("proc", "/proc", "proc", secure | syscalls.MS_NOEXEC, "hidepid=2,subset=pid")
    inodes = max(1024, spec["disk"] // 2**20 * _INODES_PER_MB)
    syscalls.mount("tmpfs", spec["home"], "tmpfs", secure, f"size={spec['disk']},nr_inodes={inodes},mode=1777")
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    # In the copy /proc is read-only: the code cannot set `oom_score_adj`. In ours the worker writes its identity.
    again = syscalls.MS_REMOUNT | syscalls.MS_BIND | secure | syscalls.MS_NOEXEC
    syscalls.mount("proc", "/proc", "", again | syscalls.MS_RDONLY, "")
    root = syscalls.copy_mounts()
    syscalls.mount("proc", "/proc", "", again, "")
    return root


def _work(
    task: socket.socket,
    output_fd: int,
    spec: dict[str, Any],
    filters: bytes,
    number: int,
    group_fds: tuple[int, ...],
    root: int | None,
) -> NoReturn:
    for fd in group_fds[:1]:
        os.write(fd, b"0")  # join the control group
    if root is not None:
        os.fchdir(root)  # `confine` makes this folder the root
    confine.keep_open(task.detach(), output_fd)
    channel = socket.socket(fileno=confine.TASK_FD)
    try:
        home = spec["home"] if spec["namespaces"] else f"{spec['home']}/{number}"
        os.environ.update(HOME=home, TMPDIR=home)
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()  # otherwise all sandboxes draw the same numbers
        confine.confine(spec, filters, number)
        os.chdir(home)
    except BaseException as error:  # the code has not run yet, so inform the parent
        channel.send(_FAILED + f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    try:
        channel.send(_STARTED)
        cell.serve(channel)
    finally:
        os._exit(1)


def _tell(control: socket.socket, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # the parent has gone
        control.send(packet)


class _Supervisor:
    """Loop of the supervisor: hands cells to the worker, reports their end, ends a sandbox that exceeds a limit."""

    def __init__(
        self,
        control: socket.socket,
        task: socket.socket,
        worker: int,
        spec: dict[str, Any],
        group_fds: tuple[int, ...],
    ) -> None:
        self._control = control
        self._task = task
        self._worker = worker
        self._spec = spec
        self._group_fds = group_fds
        self._poll = select.poll()
        self._nonce: bytes | None = _STARTED
        self._closed = False
        """True once the worker's socket is closed: the worker has ended, or is about to."""
        self._cpu_before_s = 0.0
        self._sampled = SampledTime()
        self._sampled_before_s = 0.0
        self._next_check = 0.0
        self._alone = False
        """True while the worker is the only process, and is stopped or has run no code yet.

        Then there is nothing to watch until the next cell, or until the worker goes on by itself. Without namespaces
        the worker is not stopped, only not watched between two cells.
        """
        self._told_to_stop = False
        self._times_over = 0
        self._waits = 0
        self._killed: set[str] = set()
        """Processes that were killed to spare the worker, at the last look that found a limit exceeded."""
        self._free_bytes = Usage.of(["self"]).resident
        """Bytes that the zygote's pages count for, allowed beside the code's own."""
        self._free_table_bytes = page_tables(["self"])
        """Bytes of page tables that each fork of the zygote has."""
        # Bytes for which each socket counts: a full buffer, and one last message beyond it. The code cannot
        # enlarge the buffer, since `SO_SNDBUF` is refused.
        self._socket_bytes = 2 * task.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self._woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def watch(self) -> NoReturn:
        self._task.setblocking(False)
        for file in (self._control, self._task, self._woken):
            self._poll.register(file, select.POLLIN)
        while True:
            # Look at random moments, so that code cannot hide by knowing when we look.
            tick_s = (_IDLE_TICK_S if self._nonce is None else _TICK_S) * (0.5 + os.urandom(1)[0] / 256)
            for fd, _ in self._poll.poll(None if self._alone else tick_s * 1000):
                if fd == self._control.fileno():
                    self._on_control()
                elif fd == self._woken:
                    os.read(fd, 4096)
                    self._be_watchful()
                else:
                    self._on_task()
            if not self._alone and (now := time.monotonic()) >= self._next_check:
                self._next_check = now + tick_s
                self._check()

    def _on_control(self) -> None:
        packet = self._control.recv(cell.PACKET_BYTES)
        if not packet:
            self._end("closed")
        self._nonce = packet[: cell.NONCE_BYTES]
        self._be_watchful()
        self._next_check = time.monotonic() + _TICK_S
        usage = self._usage()
        self._cpu_before_s, self._sampled_before_s = usage.cpu_s, self._sampled.seconds
        limit_s = int(Usage.of([str(self._worker)]).cpu_s) + 1 + self._spec["cpu_s"]
        try:
            # Set the soft limit: a hard one could not be raised for the next cell. If the code raises the soft limit,
            # `_check` still holds.
            resource.prlimit(self._worker, resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))
            if self._told_to_stop:
                self._told_to_stop = False
                os.kill(self._worker, signal.SIGCONT)  # also if it has not stopped yet
            self._task.send(packet)
        except OSError:  # the worker died, or reads no cells any more
            self._check()
            self._end("deaf")

    def _on_task(self) -> None:
        try:
            packet = self._task.recv(cell.PACKET_BYTES)
        except OSError:
            packet = b""
        if not packet:  # closed, most likely because the worker ended: `_check` will find out
            self._poll.unregister(self._task)
            self._closed, self._next_check = True, 0.0
            self._be_watchful()
        elif self._nonce == _STARTED and packet.startswith(_FAILED):
            self._end(f"setup {packet[1:].decode(errors='replace')}")
        elif self._nonce is not None and packet.startswith(self._nonce):
            if self._nonce == _STARTED:
                self._usage()  # the first measurement takes longer: make it while no call waits
                self._alone = True  # the worker has run nothing yet
            self._nonce = None
            _tell(self._control, DONE + packet)

    def _check(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._end("lost")
            if pid == 0:
                break
            if pid == self._worker:
                if self._group_fds and field(self._group_fds[2], b"oom_kill"):
                    self._end("memory")
                code = os.waitstatus_to_exitcode(status)
                self._end("cpu" if code == -signal.SIGXCPU else f"signal {-code}" if code < 0 else f"exit {code}")
        usage = self._usage()
        limit_s = self._spec["cpu_s"]
        if usage.cpu_s - self._cpu_before_s > limit_s:
            self._end("cpu")
        sampled_s = self._sampled.seconds - self._sampled_before_s
        if not self._group_fds and sampled_s > SampledTime.limit_s(limit_s):
            self._end("cpu")
        reason = self._exceeded(usage)
        if reason:
            self._on_exceeded(reason, usage)
            return
        self._times_over = self._waits = 0
        if self._nonce is None and not self._closed and usage.tasks <= 1:
            self._rest(usage)

    def _exceeded(self, usage: Usage) -> str:
        """Return the limit that the processes exceed now, apart from that of time; empty where there is none."""
        if usage.tasks > self._spec["processes"]:
            return "processes"
        files, watches = open_files(usage.paths)
        if files > MAX_OPEN_FILES:
            return "files"
        if watches > MAX_WATCHES:
            return "watches"
        return "memory" if self._holds_too_much(usage, files) else ""

    def _on_exceeded(self, reason: str, usage: Usage) -> None:
        """End the sandbox; where the worker shall be spared, end all others first, and it if that does not help."""
        if not self._spec["spares_worker"]:
            self._end(reason)
        if any(usage.states.get(process, b"Z") != b"Z" for process in self._killed):  # a zombie holds nothing
            self._waits += 1
            if self._waits % _SPARED:  # they need time to end; those that have begun since are not to blame
                return
        else:
            self._times_over, self._waits = self._times_over + 1, 0
        if self._times_over > _SPARED or self._waits >= _MOST_WAITS:
            self._end(reason)
        self._killed = usage.states.keys() - {str(self._worker)}
        # All are stopped before the first one dies: a shell would go on as if its commands had ended by themselves.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in self._killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), number)

    def _holds_too_much(self, usage: Usage, files: int) -> bool:
        allowed: int = self._spec["memory"] + self._free_bytes - files * FILE_BYTES
        if self._spec["namespaces"] and not self._group_fds:  # a control group counts sockets itself
            allowed -= max(0, sockets() - _OUR_SOCKETS) * self._socket_bytes
        # A mapped page takes at most three pages of page tables, one a level, beside itself.
        if 4 * usage.virtual > allowed:
            allowed -= max(0, page_tables(usage.paths) - self._free_table_bytes * len(usage.paths))
        # Swapped-out memory is not resident, but it is mapped.
        mapped = usage.virtual - self._spec["zygote_memory"] * max(1, len(usage.states))
        if usage.resident <= allowed and mapped <= allowed:
            return False
        return hold_more(usage, allowed)

    def _rest(self, usage: Usage) -> None:
        """Stop the worker, the last process, so that no signal handler runs while the supervisor does not watch."""
        if not self._spec["namespaces"]:
            self._alone = True
            return
        if set(usage.states.values()) != {b"T"}:
            self._told_to_stop = True
            os.kill(self._worker, signal.SIGSTOP)
            return
        # SIGCHLD comes when the worker goes on by itself: a timer of the code can send it SIGCONT.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._alone = set(self._usage().states.values()) == {b"T"}
        if not self._alone:
            self._be_watchful()

    def _be_watchful(self) -> None:
        self._alone = False
        if self._told_to_stop:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _usage(self) -> Usage:
        if not self._spec["namespaces"]:
            return Usage.of([str(self._worker)])
        usage = Usage.of([name for name in os.listdir("/proc") if name.isdigit() and name != "1"])
        if self._group_fds:
            usage.cpu_s = field(self._group_fds[1], b"usage_usec") / 1e6
        else:
            self._sampled.look(usage)
        return usage

    def _end(self, reason: str) -> NoReturn:
        _tell(self._control, f"end {reason}".encode())
        if not self._spec["namespaces"]:
            os.killpg(0, signal.SIGKILL)
        os._exit(0)

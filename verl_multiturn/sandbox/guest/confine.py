"""Confinement of a process before it runs untrusted code: user, limits, capabilities and system calls.

Runs inside the sandbox. Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from typing import Any

from . import syscalls

USER_ID = 1000
"""User id and group id that untrusted code sees as its own."""
TASK_FD = 3
"""Descriptor of the worker's socket to the supervisor."""
_OPEN_FILES = 256


def confine(spec: dict[str, Any], filters: bytes, number: int) -> None:
    """Confine this process, a fork of the supervisor, for the rest of its life.

    With namespaces the process also becomes another user, makes its current folder its root, and loses every
    capability. Limits and the system call filter hold in both kinds of isolation.

    Args:
        spec: The mapping of `launch.guest_spec`, with the `zygote_memory` that the zygote adds.
        filters: The system call filter of `seccomp.program`.
        number: Number of the sandbox. Sandboxes get different users where the machine lends us more than one.

    Raises:
        OSError: The kernel refused one of the steps.
    """
    if spec["namespaces"]:
        os.setsid()  # a signal to its own process group then reaches neither the supervisor nor the zygote
        _become_nobody(spec["users"], number)
        os.chroot(".")  # in the new user namespace we may, and from now on no further one can be made
    _limit(spec)
    if spec["namespaces"]:
        syscalls.drop_capabilities()
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.load_filter(filters)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(0o077)
    sys.path.insert(0, "")


def keep_open(task_fd: int, output_fd: int) -> None:
    """Move two descriptors to fixed numbers, and close all others.

    Afterwards standard input is /dev/null, standard output and error are `output_fd`, and `TASK_FD` is `task_fd`.
    Programs that the code starts inherit all but `TASK_FD`.

    Args:
        task_fd: The worker's end of the socket to the supervisor.
        output_fd: The pipe for the code's standard output and error.
    """
    # Open /dev/null anew: through an open file that they share, sandboxes could lock and signal each other.
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd, wanted in ((nothing, 0), (output_fd, 1), (output_fd, 2), (task_fd, TASK_FD)):
        os.dup2(fd, wanted, inheritable=wanted != TASK_FD)
    os.fchmod(1, 0o666)  # so that the code can open /dev/stdout, although it runs as another user
    for name in os.listdir("/proc/self/fd"):
        if int(name) > TASK_FD:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed already
                os.close(int(name))


def _become_nobody(users: int, number: int) -> None:
    """Enter a new user namespace: no rights over the supervisor, and a count of processes of its own."""
    identity = 0
    if users:
        identity = 1 + number % users
        os.setgroups([])
        os.setresgid(identity, identity, identity)
        os.setresuid(identity, identity, identity)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # otherwise the files of /proc/self belong to root
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{USER_ID} {identity} 1")
    _write("/proc/self/gid_map", f"{USER_ID} {identity} 1")


def _limit(spec: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_AS: spec["zygote_memory"] + spec["memory"],
        resource.RLIMIT_FSIZE: spec["disk"],
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 1,  # no dump, also where the host's core_pattern starts a program (core(5))
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 1024,
        resource.RLIMIT_MEMLOCK: 1 << 16,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_RTPRIO: 0,
    }
    if spec["namespaces"]:  # without namespaces the kernel counts all processes of the user
        limits[resource.RLIMIT_NPROC] = spec["processes"]
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, text.encode())
    os.close(fd)

"""Linux calls that the standard library of Python 3.11 lacks: namespaces, mounts, capabilities, seccomp.

Each function raises OSError when the kernel refuses its call.

Runs inside the sandbox, before any untrusted code. Imports the standard library only.
"""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096

_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_OPEN_TREE, _OPEN_TREE_CLONE = 428, 1  # the number is the same on every architecture

_KCMP, _KCMP_VM = 312 if os.uname().machine == "x86_64" else 272, 1

PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_LINUX_CAPABILITY_VERSION_3 = 0x20080522

# The package is not in the sandbox, so `processes/system.py` cannot be used here.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]


def _check(result: int, call: str) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces.

    Args:
        flags: The kinds of namespaces, `CLONE_NEW*` joined with `|`.

    Raises:
        OSError: The kernel refused.
    """
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    """Move this process into an existing namespace.

    Args:
        fd: An open file of /proc/PID/ns.
        kind: The kind of the namespace, one of `CLONE_NEW*`.

    Raises:
        OSError: The kernel refused.
    """
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), f"setns({kind:#x})")


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    """Attach a file system to a folder, as the system call `mount` does.

    Args:
        source: The mounted path; a name only, for `proc` and `tmpfs`.
        target: The folder to mount it on.
        kind: The type of the file system; empty when it is only mounted again with other flags.
        flags: `MS_*` joined with `|`.
        options: The options of the file system, separated by commas.

    Raises:
        OSError: The kernel refused.
    """
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode())
    _check(result, f"mount {kind} on {target}")


def copy_mounts() -> int:
    """Return a descriptor of a copy of this process's root with all mounts below it.

    No mount namespace lists the copy. It lasts while somebody has the descriptor.

    Raises:
        OSError: The kernel refused.
    """
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    fd: int = _libc.syscall(_OPEN_TREE, _AT_FDCWD, b"/", flags)
    _check(fd, "open_tree")
    return fd


def have_one_memory(first: int, second: int) -> bool:
    """Return whether two tasks have the same address space, as a child of `vfork` has its parent's.

    Args:
        first: Id of a process or thread that we may trace.
        second: Id of another one.

    Returns:
        False also where one of them has ended, and where the kernel cannot compare.
    """
    return bool(_libc.syscall(_KCMP, first, second, _KCMP_VM, 0, 0) == 0)


def prctl(option: int, argument: int, pointer: int = 0) -> None:
    """Set an attribute of this process with the system call `prctl`; raise OSError when the kernel refuses."""
    _check(_libc.prctl(option, argument, pointer, 0, 0), f"prctl({option})")


def drop_capabilities() -> None:
    """Give up every capability for good: the process cannot get one back."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # the kernel's last capability has a smaller number
            break
    prctl(PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def load_filter(program: bytes) -> None:
    """Put a seccomp filter on this thread, and on every thread and process that it will start.

    Args:
        program: The filter, an array of `struct sock_filter` (`seccomp.program`).

    Raises:
        OSError: The kernel refused.
    """
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the length in instructions, padding, a pointer.
    head = (ctypes.c_uint64 * 2)(len(program) // 8, ctypes.addressof(code))
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(head))

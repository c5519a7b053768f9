"""The system call filter, run by an interpreter of its own: refused calls on both architectures."""

import errno
import struct

import pytest

from verl_multiturn.sandbox.guest.seccomp import program

ALLOW, KILL = "allow", "kill"
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> str | int:
    """Return `allow`, `kill`, or the errno of a call under the filter of `machine`."""
    code = list(struct.iter_unpack("HBBI", program(machine)))
    data = struct.pack(
        "IIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *arguments, *[0] * (6 - len(arguments))
    )
    accumulator = position = 0
    while True:
        operation, when_true, when_false, value = code[position]
        position += 1
        if operation == 0x20:  # load a word
            (accumulator,) = struct.unpack_from("I", data, value)
        elif operation == 0x06:  # return
            return {0x7FFF0000: ALLOW, 0x80000000: KILL}.get(value, value & 0xFFFF)
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[operation]
            position += when_true if holds else when_false


# Name, number on x86_64, number on aarch64.
REFUSED = [
    ("ptrace", 101, 117), ("process_vm_readv", 310, 270), ("mount", 165, 40), ("umount2", 166, 39),
    ("unshare", 272, 97), ("setns", 308, 268), ("pivot_root", 155, 41), ("chroot", 161, 51), ("bpf", 321, 280),
    ("keyctl", 250, 219), ("userfaultfd", 323, 282), ("perf_event_open", 298, 241), ("kexec_load", 246, 104),
    ("io_uring_setup", 425, 425), ("reboot", 169, 142), ("init_module", 175, 105), ("memfd_create", 319, 279),
    ("open_by_handle_at", 304, 265), ("shmget", 29, 194), ("pidfd_getfd", 438, 438), ("settimeofday", 164, 170),
    ("inotify_init1", 294, 26), ("io_setup", 206, 0), ("landlock_create_ruleset", 444, 444), ("splice", 275, 76),
    ("tee", 276, 77), ("sendfile", 40, 71), ("mq_open", 240, 180), ("add_key", 248, 217),
    ("statmount", 457, 457), ("listmount", 458, 458),
]  # fmt: skip
ALLOWED = [
    ("read", 0, 63), ("write", 1, 64), ("openat", 257, 56), ("mmap", 9, 222), ("execve", 59, 221), ("exit", 60, 93),
    ("futex", 202, 98), ("socketpair", 53, 199), ("kill", 62, 129), ("prctl", 157, 167), ("getrandom", 318, 278),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 1), ("aarch64", 2)])
def test_calls_by_number(machine: str, column: int) -> None:
    for call in REFUSED:
        assert verdict(machine, call[column]) == errno.EPERM, call
    for call in ALLOWED:
        assert verdict(machine, call[column]) == ALLOW, call


@pytest.mark.parametrize(
    ("numbers", "arguments", "expected"),
    [
        ((56, 220), (0x11,), ALLOW),  # clone as fork does it
        ((56, 220), (0x3D0F00,), ALLOW),  # clone as a thread starts
        ((56, 220), (0x10000011,), errno.EPERM),  # a user namespace
        ((56, 220), (0x00020011,), errno.EPERM),  # a mount namespace
        ((56, 220), (0x40000011,), errno.EPERM),  # a network namespace
        ((56, 220), (0x10900,), errno.EPERM),  # a thread with a table of open files of its own
        ((56, 220), (0x10D00,), ALLOW),  # a thread that shares them
        ((435, 435), (), errno.ENOSYS),  # clone3
        ((436, 436), (3, 0xFFFFFFFF, 0), ALLOW),  # close_range
        ((436, 436), (3, 0xFFFFFFFF, 4), ALLOW),  # CLOSE_RANGE_CLOEXEC
        ((436, 436), (3, 0xFFFFFFFF, 2), errno.EPERM),  # CLOSE_RANGE_UNSHARE
        ((436, 436), (3, 0xFFFFFFFF, 6), errno.EPERM),
        ((16, 29), (1, 0x5401), ALLOW),  # ioctl TCGETS
        ((16, 29), (0, 0x5412), errno.EPERM),  # TIOCSTI
        ((16, 29), (0, 0xFFFFFFFF00005412), errno.EPERM),  # the kernel looks at the low half only
        ((16, 29), (0, 0x541C), errno.EPERM),  # TIOCLINUX
        ((16, 29), (3, 0x80811501), errno.EPERM),  # FS_IOC_GETFSSYSFSPATH
        ((16, 29), (3, 0x81009431), errno.EPERM),  # FS_IOC_GETFSLABEL
        ((16, 29), (3, 0xD000941E), errno.EPERM),  # BTRFS_IOC_DEV_INFO
        ((41, 198), (1,), ALLOW),  # socket AF_UNIX
        ((41, 198), (2,), ALLOW),  # AF_INET
        ((41, 198), (16,), errno.EAFNOSUPPORT),  # AF_NETLINK
        ((41, 198), (17,), errno.EAFNOSUPPORT),  # AF_PACKET
        ((41, 198), (40,), errno.EAFNOSUPPORT),  # AF_VSOCK
        ((135, 92), (0,), ALLOW),  # personality PER_LINUX
        ((135, 92), (0xFFFFFFFF,), ALLOW),  # which one is it?
        ((135, 92), (0x0040000,), errno.EPERM),  # ADDR_NO_RANDOMIZE
        ((302, 261), (0, 3), ALLOW),  # prlimit64 on itself
        ((302, 261), (1, 3), errno.EPERM),  # on the supervisor
        ((302, 261), (0, 4, 0, 1 << 40), ALLOW),  # what is the core limit?
        ((302, 261), (0, 4, 0x1000), 0),  # another core limit has no effect
        ((302, 261), (0, 4, 1 << 32), 0),  # its low half alone looks like null
        ((302, 261), (0, 4, 0x1000, 0x2000), errno.EPERM),  # and reports no old one
        ((302, 261), (1, 4, 0), errno.EPERM),
        ((160, 164), (4, 0x1000), 0),  # setrlimit of the core limit
        ((160, 164), (7, 0x1000), ALLOW),
        ((203, 122), (1,), errno.EPERM),  # sched_setaffinity of it
        ((141, 140), (0, 0, 5), ALLOW),  # setpriority, oneself
        ((141, 140), (0, 1, 5), errno.EPERM),  # the supervisor
        ((141, 140), (2, 1000, 5), errno.EPERM),  # everything of the user
        ((251, 30), (1, 0), ALLOW),  # ioprio_set
        ((251, 30), (1, 1), errno.EPERM),
        ((251, 30), (3, 1000), errno.EPERM),
        ((162, 81), (), 0),  # sync succeeds, and does nothing
        ((306, 267), (3,), 0),  # syncfs
        ((9, 222), (0, 4096, 3, 0x22), ALLOW),  # mmap, private and anonymous
        ((9, 222), (0, 4096, 3, 0x01), ALLOW),  # of a file, shared
        ((9, 222), (0, 4096, 3, 0x21), errno.EPERM),  # shared and anonymous
        ((9, 222), (0, 4096, 3, 0x23), errno.EPERM),  # MAP_SHARED_VALIDATE
        ((9, 222), (0, 4096, 3, 0x40022), errno.EPERM),  # a huge page
        ((72, 25), (3, 1030), ALLOW),  # fcntl F_DUPFD_CLOEXEC
        ((72, 25), (3, 1024), errno.EPERM),  # F_SETLEASE
        ((72, 25), (3, 1026), errno.EPERM),  # F_NOTIFY
        ((72, 25), (3, 1031), errno.EPERM),  # F_SETPIPE_SZ
        ((54, 208), (3, 1, 2), ALLOW),  # setsockopt SO_REUSEADDR
        ((54, 208), (3, 6, 7), ALLOW),  # another level
        ((54, 208), (3, 1, 7), errno.EPERM),  # SO_SNDBUF
        ((54, 208), (3, 1, 32), errno.EPERM),  # SO_SNDBUFFORCE
        ((157, 167), (38, 1), ALLOW),  # prctl PR_SET_NO_NEW_PRIVS
        ((157, 167), (62, 1), errno.EPERM),  # PR_SCHED_CORE
    ],
)
def test_calls_by_argument(numbers: tuple[int, int], arguments: tuple[int, ...], expected: str | int) -> None:
    for machine, number in zip(ARCHITECTURES, numbers, strict=True):
        assert verdict(machine, number, *arguments) == expected, machine


def test_a_foreign_architecture_ends_the_process() -> None:
    assert verdict("x86_64", 20, architecture=0x40000003) == KILL  # i386, by int 0x80
    assert verdict("x86_64", 0x40000000 + 39) == KILL  # x32
    assert verdict("aarch64", 20, architecture=0x40000028) == KILL  # arm


@pytest.mark.parametrize("machine", list(ARCHITECTURES))
def test_every_number_gets_a_verdict(machine: str) -> None:
    verdicts = {number: verdict(machine, number) for number in range(512)}
    assert set(verdicts.values()) == {ALLOW, 0, errno.EPERM, errno.ENOSYS, errno.EAFNOSUPPORT}
    assert sum(found == ALLOW for found in verdicts.values()) > 400


def test_an_unknown_machine_has_no_filter() -> None:
    with pytest.raises(OSError, match="no system call filter for 'riscv64'"):
        program("riscv64")

"""System call filter for untrusted code: a BPF program for seccomp.

The namespaces already take the privileges away. The filter does four more things:
- it makes the kernel's surface smaller (bugs in io_uring, bpf, nested user namespaces);
- it closes holes that namespaces do not cover (vsock reaches a hypervisor from any network namespace; a user's keyrings
  are shared; the list of mounts names the host's folders; a core dump starts a program of the host);
- it stops memory and files that no limit counts (memfd, System V, shared anonymous mappings; a thread with a table of
  open files of its own, where the supervisor sees the table of the main thread only);
- it protects scarce resources of a user or the host (inotify instances, AIO events, huge pages, leases on files).

Every other call is allowed, since Python's packages need many. A refused call fails with EPERM, and its caller can go
on without: `shutil` copies without `sendfile`, `tail -f` polls without inotify. `sync` succeeds and does nothing, since
no file of the sandbox is on a disk. A call of a foreign architecture ends the process.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

# Numbers on (x86_64, aarch64). None: the architecture has no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # mounts and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467), "statmount": (457, 457), "listmount": (458, 458),
    "sethostname": (170, 161), "setdomainname": (171, 162),
    # files by handle, watches of whole mounts, quotas
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "acct": (163, 89), "nfsservctl": (180, 42),
    # resources that the user or the host has few of
    "inotify_init": (253, None), "inotify_init1": (294, 26), "io_setup": (206, 0),
    # the kernel itself
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "syslog": (103, 116), "uselib": (134, None),
    "lookup_dcookie": (212, 18), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    "vhangup": (153, 58), "vmsplice": (278, 75),
    # the clock
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    # keyrings, and memory that no limit counts
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "landlock_create_ruleset": (444, 444),
    # calls that pass on references to whole pages, which count as one byte in a socket's buffer
    "splice": (275, 76), "tee": (276, 77), "sendfile": (40, 71),
}  # fmt: skip
_DOES_NOTHING = ((162, 81), (306, 267))  # sync, syncfs: they would write out all disks of the host
_CLONE, _CLONE3, _IOCTL, _SOCKET, _PERSONALITY = (56, 220), (435, 435), (16, 29), (41, 198), (135, 92)
_MMAP, _FCNTL, _SETSOCKOPT, _PRCTL = (9, 222), (72, 25), (54, 208), (157, 167)
_CLOSE_RANGE, _SETRLIMIT, _PRLIMIT = (436, 436), (160, 164), (302, 261)
# Calls whose first argument is a process. They are refused for the supervisor, pid 1, which may have the same user:
# sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr
_ON_A_PROCESS = ((142, 118), (144, 119), (203, 122), (314, 274))
# Calls whose first argument is a kind of target, and the kind that means "a process": setpriority, ioprio_set
_ON_A_TARGET = (((141, 140), 0), ((251, 30), 1))
_SUPERVISOR = 1

_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag that clone(2) takes
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000
_CLOSE_RANGE_UNSHARE = 2
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
# They name the disk that an open file lies on: FS_IOC_GETFSSYSFSPATH, FS_IOC_GETFSLABEL, BTRFS_IOC_DEV_INFO
_NAMES_OF_A_DISK = (0x80811501, 0x81009431, 0xD000941E)
_SOCKET_FAMILIES = (1, 2, 10)  # UNIX, INET, INET6: the families that a network namespace confines
_PERSONALITIES = (0, 0xFFFFFFFF)  # PER_LINUX, and the value that only asks for the current one
# A shared anonymous mapping stays in memory as a whole while one page of it is mapped, and counts as that page only.
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x01, 0x20, 0x40000
# F_SETLEASE delays each process that opens the file for writing. F_NOTIFY is inotify's predecessor. Without
# F_SETPIPE_SZ pipes keep the size that the supervisor counts (`usage.FILE_BYTES`).
_FILE_COMMANDS = (1024, 1026, 1031)  # F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ
_SOL_SOCKET, _BUFFER_SIZES = 1, (7, 32)  # SO_SNDBUF, SO_SNDBUFFORCE: sockets, too, keep the size that is counted
# A core limit of 1 means no core dump at all. With any other limit, also 0, the kernel starts the program that the
# host's core_pattern names, if it names one (core(5)). So it must not be changed.
_RLIMIT_CORE = 4
_CORE_SCHEDULING = 62  # PR_SCHED_CORE: it lets the other hardware thread of a core stay idle

_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS = 0x7FFF0000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

Instruction = tuple[int, int, int, int]


def _refuse(number: int) -> int:
    return 0x00050000 | number


def program(machine: str) -> bytes:
    """Return the filter for an architecture.

    Args:
        machine: The architecture, as `os.uname().machine` names it.

    Returns:
        An array of `struct sock_filter`, for `syscalls.load_filter`.

    Raises:
        OSError: There is no filter for this architecture.
    """
    if machine not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine!r}; there is one for {sorted(_AUDIT_ARCH)}")
    column = 0 if machine == "x86_64" else 1
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        code += [(_GREATER_EQUAL, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL_PROCESS)]
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _refuse(errno.EPERM))]
    for call in _DOES_NOTHING:
        code += [(_EQUAL, 0, 1, call[column]), (_RETURN, 0, 0, _refuse(0))]
    code += [step for block in _argument_checks(column) for step in block]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _argument_checks(column: int) -> Iterator[list[Instruction]]:
    """Yield the parts of the filter for calls that are refused with some arguments only; column 0 is x86_64."""
    # A filter cannot see the flags of clone3. If it seems not to exist, the C library falls back to clone.
    yield [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _refuse(errno.ENOSYS))]
    yield _by_argument(_CLONE[column], 0, [
        (_ANY_BIT, 0, 1, _NAMESPACES), (_RETURN, 0, 0, _refuse(errno.EPERM)),
        (_ANY_BIT, 0, 2, _CLONE_THREAD), (_ANY_BIT, 1, 0, _CLONE_FILES), (_RETURN, 0, 0, _refuse(errno.EPERM)),
    ])  # fmt: skip
    unshares = [(_ANY_BIT, 0, 1, _CLOSE_RANGE_UNSHARE), (_RETURN, 0, 0, _refuse(errno.EPERM))]
    yield _by_argument(_CLOSE_RANGE[column], 2, unshares)
    yield _by_argument(_IOCTL[column], 1, _when_equal((*_TERMINAL_INPUT, *_NAMES_OF_A_DISK), _refuse(errno.EPERM)))
    families = [*_when_equal(_SOCKET_FAMILIES, _ALLOW), (_RETURN, 0, 0, _refuse(errno.EAFNOSUPPORT))]
    yield _by_argument(_SOCKET[column], 0, families)
    personalities = [*_when_equal(_PERSONALITIES, _ALLOW), (_RETURN, 0, 0, _refuse(errno.EPERM))]
    yield _by_argument(_PERSONALITY[column], 0, personalities)
    yield _by_argument(_MMAP[column], 3, [
        (_ANY_BIT, 0, 1, _MAP_HUGETLB), (_RETURN, 0, 0, _refuse(errno.EPERM)),
        (_ANY_BIT, 0, 2, _MAP_ANONYMOUS), (_ANY_BIT, 0, 1, _MAP_SHARED), (_RETURN, 0, 0, _refuse(errno.EPERM)),
    ])  # fmt: skip
    yield _by_argument(_FCNTL[column], 1, _when_equal(_FILE_COMMANDS, _refuse(errno.EPERM)))
    yield _by_argument(_PRCTL[column], 0, _when_equal((_CORE_SCHEDULING,), _refuse(errno.EPERM)))
    sizes = [(_EQUAL, 1, 0, _SOL_SOCKET), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, _ARGUMENTS + 16)]
    sizes += _when_equal(_BUFFER_SIZES, _refuse(errno.EPERM))
    yield _by_argument(_SETSOCKOPT[column], 1, sizes)
    yield _by_argument(_SETRLIMIT[column], 0, _when_equal((_RLIMIT_CORE,), _refuse(0)))
    yield _by_argument(_PRLIMIT[column], 0, [
        *_when_equal((_SUPERVISOR,), _refuse(errno.EPERM)),
        (_LOAD, 0, 0, _ARGUMENTS + 8), (_EQUAL, 1, 0, _RLIMIT_CORE), (_RETURN, 0, 0, _ALLOW),
        # Where the third argument, the new limit, is null in both halves, the caller only asks for the limit. A new
        # limit is as good as set, since none allows a dump. We cannot report the old one beside it.
        (_LOAD, 0, 0, _ARGUMENTS + 16), (_EQUAL, 0, 2, 0), (_LOAD, 0, 0, _ARGUMENTS + 20), (_EQUAL, 4, 0, 0),
        (_LOAD, 0, 0, _ARGUMENTS + 24), *_when_equal((0,), _refuse(0)), (_RETURN, 0, 0, _refuse(errno.EPERM)),
    ])  # fmt: skip
    for process_call in _ON_A_PROCESS:
        yield _by_argument(process_call[column], 0, _when_equal((_SUPERVISOR,), _refuse(errno.EPERM)))
    for target_call, a_process in _ON_A_TARGET:
        checks = [
            (_EQUAL, 1, 0, a_process),
            (_RETURN, 0, 0, _refuse(errno.EPERM)),
            (_LOAD, 0, 0, _ARGUMENTS + 8),
            *_when_equal((_SUPERVISOR,), _refuse(errno.EPERM)),
        ]
        yield _by_argument(target_call[column], 0, checks)


def _when_equal(values: tuple[int, ...], verdict: int) -> list[Instruction]:
    return [step for value in values for step in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, verdict))]


def _by_argument(number: int, argument: int, checks: list[Instruction]) -> list[Instruction]:
    """Return `checks` on the low 32 bits of one argument of a call; the call is allowed where no check decides."""
    load = (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)
    return [(_EQUAL, 0, len(checks) + 2, number), load, *checks, (_RETURN, 0, 0, _ALLOW)]

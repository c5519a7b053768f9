"""Start of the zygote: in bubblewrap, or as a plain process where the user wants it (`isolation: subprocess`).

`view.py` has the sandboxes' view of the host. The zygote keeps a few capabilities, which count inside its own
user namespace only. With them it makes the namespaces of each sandbox (`supervisor.py`); the process that runs the code
loses them (`confine.py`).

Where this process is root, root of the zygote's user namespace would be root on the host, whose number of processes the
kernel does not limit. So the namespace gets a range of users that no other process has (`_FIRST_USER`), and each
sandbox runs as one of them. Elsewhere the code runs as our own user. Since Linux 5.14 the kernel counts its processes
apart from ours; on an older kernel the code may start none.

Linux 5.8 is the oldest that works.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError, OutageError
from verl_multiturn.sandbox.guest.removal import remove_tree
from verl_multiturn.sandbox.packages import script
from verl_multiturn.sandbox.settings import SandboxSettings
from verl_multiturn.sandbox.view import (
    GUEST_ROOT,
    HOME,
    PROGRAMS,
    bwrap_arguments,
    environment,
    find_bwrap,
    package_paths,
)

_FIRST_USER, _USERS = 2_130_706_432, 65_535  # beyond the ranges that distributions and container engines hand out
_BOOTSTRAP = (
    "import sys; sys.path.insert(0, sys.argv[1]); from guest.zygote import main; del sys.path[0]; "
    "main(int(sys.argv[2]), sys.argv[3])"
)
_PROBE_S = 120.0


class SandboxError(OutageError):
    """A failure of the sandbox itself, not of the code in it."""


class Launch:
    """A zygote that is starting: its process, and our end of the channel to it.

    Args:
        settings: The settings of the sandboxes.
        spares_worker: As in `SandboxPool`.

    Attributes:
        process: The process of bubblewrap, which waits for the zygote; without bubblewrap, the zygote itself.
        channel: A SOCK_SEQPACKET socket to the zygote; `zygote.py` lists the packets.
        info_fd: A pipe on which bubblewrap names the zygote's process. Once it is readable, `let_go` does not block.
            None without bubblewrap.

    Raises:
        ConfigError: There is no bubblewrap, a package is not there, or Python lies where the sandbox puts a folder of
            its own.
        OSError: The process could not be started.
    """

    def __init__(self, settings: SandboxSettings, spares_worker: bool = False) -> None:
        self._directory = None if settings.isolation == "bwrap" else tempfile.mkdtemp(prefix="verl-multiturn-sandbox-")
        self._fds: list[int] = []
        self.info_fd: int | None = None
        self._zygote_fd: int | None = None
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._errors_fd, errors = self._pipe()
            passed = [theirs.fileno(), errors]
            wrapper: list[str] = []
            self._own_users = settings.isolation == "bwrap" and has_all_users()
            if settings.isolation == "bwrap":
                self.info_fd, said = self._pipe()
                go, self._go_fd = self._pipe()
                passed += [said, go]
                block = "--userns-block-fd" if self._own_users else "--block-fd"
                programs, text = script(settings.packages, f"{PROGRAMS}/python3")
                if programs:
                    passed.append(self._file(text))
                arguments = bwrap_arguments(settings, programs, passed[-1])
                wrapper = [find_bwrap(), *arguments, "--info-fd", str(said), block, str(go)]
            spec = guest_spec(settings, self._directory or HOME, self._own_users, spares_worker)
            root = GUEST_ROOT if wrapper else str(Path(__file__).parent)
            python = [os.path.realpath(sys.executable), "-I", "-S", "-c", _BOOTSTRAP]
            self.process = subprocess.Popen(
                [*wrapper, *python, root, str(theirs.fileno()), json.dumps(spec)],
                stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, pass_fds=passed, cwd="/",
                env={} if wrapper else environment(settings), start_new_session=not wrapper,
            )  # fmt: skip
            for fd in passed[1:]:
                self._close_fd(fd)
        except BaseException:  # whatever the reason: leave nothing behind
            self._close_files()
            self._remove_directory()
            raise
        finally:
            theirs.close()

    def let_go(self) -> None:
        """Let bubblewrap start the zygote, after giving the namespace its users; block until `info_fd` is readable.

        Only with bubblewrap, which waits for this call.

        Raises:
            SandboxError: Bubblewrap has ended, or we may not map users.
        """
        process_id = self._find_zygote()
        if self._own_users:
            try:
                for kind in ("uid", "gid"):
                    Path(f"/proc/{process_id}/{kind}_map").write_text(
                        f"0 0 1\n1 {_FIRST_USER} {_USERS}\n", encoding="utf-8"
                    )
            except OSError as error:
                raise SandboxError(f"mapping users: {error}") from None
        os.write(self._go_fd, b"!")

    def _find_zygote(self) -> int:
        """Return the id of the zygote's process, which is alive, since it waits for us."""
        assert self.info_fd is not None
        os.set_blocking(self.info_fd, True)  # the event loop that watched it may have made it non-blocking
        said = b""
        while not (found := re.search(rb'"child-pid":\s*(\d+)\D', said)):
            chunk = os.read(self.info_fd, 4096)
            if not chunk:
                raise SandboxError(self.problem())
            said += chunk
        process_id = int(found[1])
        self._zygote_fd = os.pidfd_open(process_id)
        self._fds.append(self._zygote_fd)
        return process_id

    def problem(self) -> str:
        """Return the text of bubblewrap or the zygote on standard output and error, its last 1,000 characters."""
        with contextlib.suppress(OSError):
            os.set_blocking(self._errors_fd, False)
            return os.read(self._errors_fd, 65536).decode("utf-8", "replace").strip()[-1000:]
        return "it ended without a word"

    def close(self) -> None:
        """Kill the zygote and all that it forked; close the descriptors and remove the temporary folder."""
        self.channel.close()
        if self.process.poll() is None:
            # bubblewrap itself must live until it has named its child, which otherwise waits for it without end.
            with contextlib.suppress(SandboxError, OSError):
                if self.info_fd is not None and self._zygote_fd is None:
                    self._find_zygote()
            if self._zygote_fd is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._zygote_fd, signal.SIGKILL)
            else:
                self.process.kill()
        self._close_files()  # bubblewrap may wait for one of them
        self.process.wait()
        self._remove_directory()

    def _close_files(self) -> None:
        self.channel.close()
        while self._fds:
            os.close(self._fds.pop())

    def _remove_directory(self) -> None:
        if self._directory is not None:
            remove_tree(self._directory)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._fds += ends
        return ends

    def _file(self, text: str) -> int:
        """Return a descriptor of a file in memory with a text, to be read from its beginning."""
        fd = os.memfd_create("script", os.MFD_CLOEXEC)
        self._fds.append(fd)
        os.write(fd, text.encode())
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def _close_fd(self, fd: int) -> None:
        self._fds.remove(fd)
        os.close(fd)


def guest_spec(settings: SandboxSettings, home: str, own_users: bool, spares_worker: bool) -> dict[str, Any]:
    """Return the settings for the modules inside the sandbox.

    Args:
        settings: The settings of the sandboxes.
        home: The folder for the code's files. Without namespaces each sandbox gets a folder of its own in it.
        own_users: Whether the namespace gets a range of users of its own.
        spares_worker: As in `SandboxPool`.

    Returns:
        `namespaces`: whether to make any. `home`: as given. `users`: how many users there are beside root. `memory` and
        `disk`: limits in bytes. `processes`: a limit. `cpu_s`: a limit in seconds for each cell. `path`: folders of
        installed packages, for `sys.path`. `preimport`: names of modules. `spares_worker`: as given.
    """
    return {
        "namespaces": settings.isolation == "bwrap",
        "home": home,
        "users": _USERS if own_users else 0,
        "memory": settings.memory_mb * 2**20,
        "disk": settings.disk_mb * 2**20,
        "processes": settings.processes,
        "cpu_s": settings.cpu_s,
        "path": package_paths(settings),
        "preimport": list(settings.preimport),
        "spares_worker": spares_worker,
    }


def has_all_users() -> bool:
    """Return whether this process is root and may map every user of the host into a namespace."""
    return os.geteuid() == 0 and all(
        Path(f"/proc/self/{kind}_map").read_text(encoding="utf-8").split() == ["0", "0", "4294967295"]
        for kind in ("uid", "gid")
    )


@functools.cache
def check(settings: SandboxSettings) -> None:
    """Check that sandboxes work on this machine, by running a program in one; once per process and settings.

    Args:
        settings: The settings of the sandboxes.

    Raises:
        ConfigError: Sandboxes do not work here; the text has the cause and the remedy.
        SandboxError: They may work, but this machine has no descriptor, process, memory or time for one now.
    """
    try:
        launch = Launch(settings)
        try:
            _try(launch)
        finally:
            launch.close()
    except (SandboxError, OSError) as error:
        # By its text: a failure inside, or in bubblewrap, comes as one.
        if isinstance(error, TimeoutError) or any(each in str(error) for each in _PASSING):
            raise SandboxError(
                f"no sandbox could be started: {error}; try again when the machine has less to do, or raise its limits "
                "of open files, processes and memory"
            ) from None
        if "preimport" in str(error):
            raise ConfigError(f"{error}; install it, set packages: true, or take it out") from None
        raise ConfigError(f"isolation {settings.isolation!r} does not work here: {error}; {_HINT}") from None


_PASSING = tuple(map(os.strerror, (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)))
_HINT = (
    "allow user namespaces (for a container: no seccomp profile that forbids unshare and mount, no masked /proc; for "
    "the host: sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0), "
    "or set isolation: subprocess to run the code unprotected, with your own rights"
)


def _try(launch: Launch) -> None:
    if launch.info_fd is not None:
        launch.let_go()
    launch.channel.settimeout(_PROBE_S)
    packet = launch.channel.recv(4096).decode(errors="replace")
    if packet != "ready":
        raise SandboxError(packet or launch.problem())
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read_end, write_end = os.pipe()
    try:
        with control:
            control.settimeout(_PROBE_S)
            with theirs:
                socket.send_fds(launch.channel, [b"spawn 0"], [theirs.fileno(), write_end])
            # The supervisor sends `done` when it is ready, and again after the cell. The cell imports a module, which
            # shows that imports still work.
            for cell in (b"", os.urandom(16) + b"pimport bisect; print(bisect.bisect([6], 7) * 42)"):
                if cell:
                    control.send(cell)
                packet = control.recv(4096).decode(errors="replace")
                if not packet.startswith("done"):
                    raise SandboxError(packet.removeprefix("end "))
        if (output := os.read(read_end, 100)) != b"42\n":
            raise SandboxError(f"a program printed {output!r} instead of 42")
    finally:
        os.close(read_end)
        os.close(write_end)

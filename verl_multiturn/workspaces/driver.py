"""Code that runs in a workspace's sandbox, sent there as text: it starts the commands, and reads and writes the files.

It uses the standard library only. Its reports are not trusted: a command of the model has the same user, and can stop
this process, end it, or speak in its place. All of that concerns its own workspace alone.

Each function that the host calls takes a request, JSON in base64, and returns an answer: a line of JSON, and bytes
behind it. An answer that is too long for one value is fetched with `piece`.
"""

import base64
import contextlib
import ctypes
import io
import json
import os
import select
import signal
import stat
import subprocess
import tarfile
import time
from collections.abc import Iterator
from typing import Any

FLOOD_BYTES = 64 * 2**20
"""Bytes of output after which a command is stopped."""
PIECE_BYTES = 60_000
"""Length of the longest piece of an answer."""
_PIPE_BYTES = 16 * os.sysconf("SC_PAGE_SIZE")
"""Bytes that a full pipe holds."""
_END_S = 10.0
"""Seconds for processes that were killed to be gone: one that waits in the kernel, for a disk, ends only later."""
_MOST_NAMED = 20
_SET_NAME = 15  # PR_SET_NAME
_TASK_FD = 3
"""The worker's socket. It becomes readable when the host gives up the command that runs."""
_ALWAYS_DEFAULT = {"SIGKILL", "SIGSTOP", "SIGCONT", "SIGCHLD", "SIGXCPU", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"}
_GIT_SETTINGS = """[user]
\tname = agent
\temail = agent@workspace
[init]
\tdefaultBranch = main
[safe]
\tdirectory = *
[advice]
\tdetachedHead = false
"""
_answer = b""
_uploaded = bytearray()
_folder = ""
_environment: dict[str, str] = {}


def set_up(request: str) -> bytes:
    """Make the folder, and get ready for commands.

    Args:
        request: `folder`: its path. `environment`: variables of the commands, beside those that are there.
    """
    global _folder
    asked = _read(request)
    _folder = asked["folder"]
    _environment.update(os.environ | asked["environment"])
    # `kill -TERM -1` of a command shall not end this process. A handler does that, and unlike SIG_IGN is not inherited.
    for number in signal.valid_signals():
        name = signal.Signals(number).name if number in iter(signal.Signals) else ""
        if name not in _ALWAYS_DEFAULT:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, lambda *_: None)
    ctypes.CDLL(None).prctl(_SET_NAME, b"workspace", 0, 0, 0)  # so that `pkill python` does not mean it
    os.makedirs(_folder, mode=0o755, exist_ok=True)
    os.chmod(_folder, 0o755)
    with open(os.path.join(os.environ["HOME"], ".gitconfig"), "w", encoding="utf-8") as settings:
        settings.write(_GIT_SETTINGS)
    return _answered({})


def run(request: str) -> bytes:
    """Run a command in a shell of its own, and answer when the shell has ended or its time is up.

    Answers with `exit_code` (None where the shell did not end by itself), `timed_out`, `flooded`, `made_room` (the
    processes of earlier commands were ended first), `total` (bytes of output), `unended` (processes that were killed
    and are still there), and the first and last bytes of the output.

    Args:
        request: `command`, `cwd`, `environment`, `timeout_s`; `kept`: how many bytes of each end of the output to keep.
    """
    asked = _read(request)
    deadline = time.monotonic() + asked["timeout_s"]
    output = _Excerpt(asked["kept"])
    reading, writing = os.pipe()
    made_room = False
    unended: list[str] = []
    try:
        try:
            shell = _start(asked, writing)
        except BlockingIOError:  # earlier commands started so many processes that no command could even end them
            made_room = True
            unended = _end_all()
            shell = _start(asked, writing)
    except OSError as error:  # no such folder; no process left; too many words
        os.close(reading)
        os.close(writing)
        return _answered(
            {"exit_code": 126, "total": 0, "unended": unended},
            f"bash: {error.strerror}: {error.filename or ''}\n".encode(),
        )
    os.close(writing)
    os.set_blocking(reading, False)
    late = _wait(shell, reading, output, deadline)
    flooded = output.total > FLOOD_BYTES
    if late or flooded:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        shell.wait()
        unended = _end_all()
    is_open = output.read(reading, _PIPE_BYTES + 1)  # one more than it holds: a full pipe may have no writer left
    if is_open:
        _keep_draining(reading)
    os.close(reading)
    output.shorten()
    code = shell.wait()
    header = {
        "exit_code": None if late or flooded else code if code >= 0 else 128 - code,
        "timed_out": late,
        "flooded": flooded,
        "made_room": made_room,
        "total": output.total,
        "unended": unended,
    }
    return _answered(header, bytes(output.head + output.tail))


def _start(asked: dict[str, Any], writing: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        ["/bin/bash", "-c", asked["command"]],
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=writing,
        cwd=os.path.join(_folder, asked["cwd"]),
        env=_environment | asked["environment"],
        start_new_session=True,
        umask=0o022,
    )


def end_processes(request: str) -> bytes:
    """End every process of the workspace but this one; answers with `unended`, those that are still there.

    Args:
        request: Nothing.
    """
    return _answered({"unended": _end_all()})


def begin_upload() -> bytes:
    """Forget an upload that was not unpacked."""
    _uploaded.clear()
    return _answered({})


def upload(data: str) -> bytes:
    """Take the next piece of a tar, in base64."""
    _uploaded.extend(base64.b64decode(data))
    return _answered({"bytes": len(_uploaded)})


def unpack(request: str) -> bytes:
    """Unpack the tar that was uploaded; answers with `error` where that fails, files unpacked until then stay.

    Args:
        request: `path`: the folder for it, made if it is not there.
    """
    data = bytes(_uploaded)
    _uploaded.clear()
    folder = os.path.join(_folder, _read(request)["path"])
    previous = os.umask(0o022)
    try:
        os.makedirs(folder, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:*") as tar:
            tar.extractall(folder, filter="tar")
    except Exception as error:  # whatever a broken tar makes of the readers of compressed files
        return _answered({"error": f"{type(error).__name__}: {error}"})
    finally:
        os.umask(previous)
    return _answered({})


def pack(request: str) -> bytes:
    """Answer with a tar of files; with `error` where it would be too long.

    Args:
        request: `path`: the folder that the names begin in. `names`: files and folders. `most`: bytes of the tar.
    """
    asked = _read(request)
    folder = os.path.join(_folder, asked["path"])
    packed = _Bounded(asked["most"])
    try:
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name in _below(folder, asked["names"]):
                _pack_one(tar, os.path.join(folder, name), name, packed.room())
    except _TarTooLargeError:
        return _answered({"error": "too large"})
    return _answered({}, packed.getvalue())


def piece(start: int) -> bytes:
    """Return a piece of the last answer."""
    return _answer[start : start + PIECE_BYTES]


class _TarTooLargeError(Exception):
    pass


class _Bounded(io.BytesIO):
    """Bytes in memory, of a largest length."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def room(self) -> int:
        return self._most - self.tell()

    def write(self, data: Any) -> int:
        if len(data) > self.room():
            raise _TarTooLargeError
        return super().write(data)


class _Excerpt:
    """The first and the last bytes of a stream."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def read(self, fd: int, most: int) -> bool:
        """Read available output, at most some bytes; return whether more may come."""
        while most > 0:
            try:
                chunk = os.read(fd, _PIPE_BYTES)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            most -= len(chunk)
            self.total += len(chunk)
            room = self._most - len(self.head)
            self.head += chunk[:room]
            self.tail += chunk[room:]
            if len(self.tail) > 2 * self._most + _PIPE_BYTES:  # cut seldom: each cut moves all that is kept
                del self.tail[: -self._most]
        return True

    def shorten(self) -> None:
        """Forget output beyond the limits."""
        del self.tail[: max(0, len(self.tail) - self._most)]


def _wait(shell: "subprocess.Popen[bytes]", reading: int, output: _Excerpt, deadline: float) -> bool:
    """Read the output until the shell has ended, printed too much, or is out of time; return whether it is out of time.

    The pipe may stay open when the shell has ended: a process of it that still runs has it, too.
    """
    ended = os.pidfd_open(shell.pid)
    poll = select.poll()
    for fd in (reading, ended, _TASK_FD):
        poll.register(fd, select.POLLIN)
    try:
        while output.total <= FLOOD_BYTES:
            left_s = deadline - time.monotonic()
            ready = {fd for fd, _ in poll.poll(max(0.0, left_s) * 1000)}
            if reading in ready and not output.read(reading, _PIPE_BYTES):
                poll.unregister(reading)
            if ended in ready:
                return False
            if left_s <= 0 or _TASK_FD in ready:
                return True
        return False
    finally:
        os.close(ended)


def _end_all() -> list[str]:
    """Kill all other processes, and return when none remains, or after 10 s with the names of those that do.

    A fork cannot escape: the kernel kills them as one.
    """
    until = time.monotonic() + _END_S
    while time.monotonic() < until:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return []
        time.sleep(0.001)  # the first process of the sandbox collects those that have ended
    return _others()


def _others() -> list[str]:
    """Return the other processes, each as its number, name and state: "12 (sleep) D" waits in the kernel."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for number in filter(str.isdigit, os.listdir("/proc")):
            if int(number) not in (1, os.getpid()):
                with (
                    contextlib.suppress(OSError, ValueError),
                    open(f"/proc/{number}/stat", errors="replace", encoding="utf-8") as file,
                ):
                    text = file.read()
                    found.append(text[: text.rindex(")") + 3])
    return found[:_MOST_NAMED]


def _keep_draining(reading: int) -> None:
    """Leave a process that reads a pipe to its end, so that who still writes to it is neither killed nor held up."""
    with contextlib.suppress(OSError):  # no process is left: the writer gets SIGPIPE
        child = os.fork()
        if child == 0:
            try:
                if os.fork() == 0:
                    os.setsid()
                    os.dup2(reading, 0)
                    os.set_blocking(0, True)
                    nothing = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nothing, 1)
                    os.dup2(nothing, 2)
                    os.closerange(3, 256)
                    os.execv("/bin/cat", ["cat"])
            finally:
                os._exit(0)
        os.waitpid(child, 0)


def _below(folder: str, names: list[str]) -> Iterator[str]:
    """Yield the names, and those of all files below them, each once; names that cannot be listed are omitted."""
    waiting, seen = list(reversed(names)), set()
    while waiting:
        name = os.path.normpath(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            is_folder = stat.S_ISDIR(os.lstat(os.path.join(folder, name)).st_mode)
            below = sorted(os.listdir(os.path.join(folder, name)), reverse=True) if is_folder else []
        except OSError:
            continue
        if name != ".":
            yield name
        waiting += [each if name == "." else f"{name}/{each}" for each in below]


def _pack_one(tar: tarfile.TarFile, path: str, name: str, room: int) -> None:
    try:
        found = os.lstat(path)
        member = tarfile.TarInfo(name)
        member.mode, member.mtime = stat.S_IMODE(found.st_mode), int(found.st_mtime)
        if stat.S_ISREG(found.st_mode):
            if found.st_size > room:
                raise _TarTooLargeError
            with open(path, "rb") as file:
                content = file.read(found.st_size)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
            return
        if stat.S_ISLNK(found.st_mode):
            member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
        elif stat.S_ISDIR(found.st_mode):
            member.type = tarfile.DIRTYPE
        else:
            member.type = tarfile.FIFOTYPE
        tar.addfile(member)
    except OSError:  # it is gone, or may not be read
        return


def _read(request: str) -> Any:
    return json.loads(base64.b64decode(request))


def _answered(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Keep an answer, and return its first piece."""
    global _answer
    _answer = json.dumps({**header, "bytes": len(body)}).encode() + b"\n" + body
    return piece(0)

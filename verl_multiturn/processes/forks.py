"""The worker's side of processes that are forked from a zygote; `zygote.py` is the other side.

    forks = Forks("my_package.program", spec, "environment")
    fork = await forks.fork()
    await fork.ended(2.0)
    fork.close()
    await forks.aclose()

Invariants:
- every await can be cancelled, and leaves no process behind;
- when the worker dies, the zygote and all its forks end;
- a zygote that is stopped (SIGSTOP) goes on when a fork is requested, or is replaced (`resumption.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.calls.tasks import ended_before, keep, wake
from verl_multiturn.errors import ConfigError
from verl_multiturn.processes.interpreters import interpreter_environment
from verl_multiturn.processes.lines import read_line
from verl_multiturn.processes.resumption import kept_running

_BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2])['path']; "
    "from verl_multiturn.processes.zygote import run; run()"
)
# Another interpreter has neither this package nor its requirements. So it gets the modules in this folder without
# `__init__.py`. Of the public names the errors are there.
_ELSEWHERE = (
    "import sys, types; package = sys.modules['verl_multiturn'] = types.ModuleType('verl_multiturn'); "
    "package.__path__ = [sys.argv[3]]; from verl_multiturn import errors; "
    "vars(package).update({name: each for name, each in vars(errors).items() if isinstance(each, type)}); "
    "from verl_multiturn.processes.zygote import run; run()"
)
_FOLDER = str(Path(__file__).parent.parent)
_IMPORT_S = 120.0
"""Seconds after which `check_import` waits no longer: the import may load a model."""
LATE = "its code was not imported when the session's time was up; look whether an import hangs, or allow more time"
"""The problem of a session whose process was not there in time."""
_FORKING = 16
"""Most forks under way at once, so that the packets that ask for them always fit into the socket."""
_POLITE_S = 1.0
"""Seconds that a zygote has to end itself and the remains of its forks."""
_ENVIRONMENT = {
    # One thread each: there are many processes, and threads do not survive a fork.
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")},
    # The order of a set of texts is the same in every worker, and so is a world that is built from one.
    "PYTHONHASHSEED": "0",
}


class ForkError(RuntimeError):
    """No process can be forked: the zygote does not start, or has no memory."""


class Fork:
    """A process that was forked from a zygote.

    Args:
        connection: Our end of its socket.
        process: Its process id.

    Attributes:
        connection: As given.
        process: As given.
    """

    def __init__(self, connection: socket.socket, process: int) -> None:
        self.connection = connection
        self.process = process
        self._fd = os.pidfd_open(process)

    def kill(self) -> None:
        """Kill the process, if it is still there."""
        if self._fd != -1:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    async def ended(self, within_s: float) -> bool:
        """Wait for the end of the process, and return whether it has ended in time."""
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._fd, wake, gone)
        try:
            await asyncio.wait({gone}, timeout=within_s)
        finally:
            loop.remove_reader(self._fd)
        return gone.done()

    def close(self) -> None:
        """Close the socket, at which a process that still runs ends, and forget the process."""
        self.connection.close()
        if self._fd != -1:
            fd, self._fd = self._fd, -1
            os.close(fd)


class Forks:
    """A zygote and the processes that are forked from it, for one event loop.

    The first `fork` starts the zygote; a later one starts it again if it has died. One that was stopped is continued.

    Args:
        program: Module of the program that the forks run, as in `zygote.py`.
        spec: The input of the program's `load`.
        what: Name of the thing that the program runs, in errors: "environment".
        python: Another Python interpreter that runs the program, whose imports must then all be of the standard
            library; None: this one.
    """

    def __init__(self, program: str, spec: Mapping[str, Any], what: str, python: str | None = None) -> None:
        self._spec = {**spec, "program": program}
        self._what = what
        self._python = python
        self._starting: asyncio.Task[_ZygoteHandle] | None = None
        self._forking = asyncio.Semaphore(_FORKING)

    async def fork(self) -> Fork:
        """Return a new process, which has imported the author's code and nothing else.

        Raises:
            ConfigError: The author's code cannot be imported.
            ForkError: No process can be had.
        """
        async with self._forking:
            for last in (False, True):
                zygote = await self._zygote()
                connection, theirs = socket.socketpair()
                connection.setblocking(False)
                try:
                    with theirs:
                        socket.send_fds(zygote.channel, [b"fork"], [theirs.fileno()])
                    with kept_running(zygote.process):
                        hello = await read_line(connection)
                    if problem := hello.get("failed"):
                        raise ForkError(f"no process for the {self._what}: {problem}")
                    return Fork(connection, hello["process"])
                except (OSError, EOFError) as error:  # the zygote was killed, or its fork was
                    connection.close()
                    if not zygote.is_alive():
                        zygote.close()
                    if last:
                        raise ForkError(f"no process for the {self._what}: {error!r}") from None
                except BaseException:  # whatever it was, the socket must not stay open
                    connection.close()  # the process ends by itself
                    raise
        raise AssertionError("unreachable")

    async def fork_before(self, time_up: asyncio.Event) -> Fork:
        """Return a new process as `fork` does, unless a time is up before: the author's code may hang at its import.

        Args:
            time_up: Is set when the time is up.

        Raises:
            ConfigError: As in `fork`.
            ForkError: As in `fork`; or the time was up.
        """
        forking = asyncio.ensure_future(self.fork())
        try:
            await ended_before(forking, time_up)
        except BaseException:  # cancelled, too: a process that was forked meanwhile has no owner
            if not forking.cancelled() and forking.exception() is None:
                forking.result().close()
            raise
        if forking.cancelled():
            raise ForkError(f"no process for the {self._what}: {LATE}")
        return forking.result()

    async def aclose(self) -> None:
        """End the zygote, and with it all processes that remain."""
        starting, self._starting = self._starting, None
        if starting is None:
            return
        starting.cancel()
        await asyncio.wait({starting})
        if not starting.cancelled() and starting.exception() is None:
            await asyncio.to_thread(starting.result().close)

    async def _zygote(self) -> _ZygoteHandle:
        if self._starting is None or _has_ended(self._starting):
            self._starting = asyncio.ensure_future(_ZygoteHandle.start(self._spec, self._what, self._python))
            keep(self._starting)
        # A caller that gives up leaves the zygote to the next one.
        return await asyncio.shield(self._starting)


def _has_ended(starting: asyncio.Task[_ZygoteHandle]) -> bool:
    """Return whether a new zygote is needed. Code that cannot be imported stays so."""
    if not starting.done():
        return False
    if starting.cancelled():
        return True
    error = starting.exception()
    return not isinstance(error, ConfigError) if error is not None else not starting.result().is_alive()


class _ZygoteHandle:
    """A running zygote.

    Args:
        process: Its process.
        channel: Our end of the channel to it.
    """

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.channel = channel
        self.process = process
        self._finalizer = weakref.finalize(self, _end, process, channel)

    @classmethod
    async def start(cls, spec: Mapping[str, Any], what: str, python: str | None) -> _ZygoteHandle:
        """Start a zygote, and wait until it has imported the author's code."""
        process, channel = _launch(spec, what, python)
        channel.setblocking(False)
        zygote = cls(process, channel)
        try:
            with kept_running(process):
                said = await asyncio.get_running_loop().sock_recv(channel, 2**16)
            _read_first_word(said, what)
        except BaseException:  # cancelled, or not imported: it would not be closed later
            zygote.close()
            raise
        return zygote

    def is_alive(self) -> bool:
        """Return whether the process is still running, and has not begun to end."""
        if self.channel.fileno() == -1:  # closed by the call before, which found it dead
            return False
        poll = select.poll()
        poll.register(self.channel, select.POLLRDHUP | select.POLLHUP)
        return self.process.poll() is None and not poll.poll(0)

    def close(self) -> None:
        """End the process, and with it its forks."""
        self._finalizer()


def _launch(spec: Mapping[str, Any], what: str, python: str | None) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a zygote; return its process, and our end of the channel to it."""
    channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**_ENVIRONMENT, **os.environ}
    if python is None:
        started = [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), json.dumps({**spec, "path": sys.path})]
    else:
        started = [python, "-c", _ELSEWHERE, str(theirs.fileno()), json.dumps(spec), _FOLDER]
        environment = interpreter_environment(python, environment)
    with theirs:
        try:
            process = subprocess.Popen(
                started,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the worker only, which then ends it
                env=environment,
            )
        except OSError as error:
            channel.close()
            if python is not None and isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError):
                raise ConfigError(f"the {what} needs {python!r}: {error}; install it on every node") from None
            raise ForkError(f"no process for the {what}: {error}") from None
    return process, channel


def _read_first_word(said: bytes, what: str) -> None:
    """Read a zygote's first message.

    Raises:
        ConfigError: The author's code cannot be imported.
        ForkError: The process has failed.
    """
    kind, _, problem = said.decode().partition(" ")
    if kind == "config":
        raise ConfigError(problem)
    if kind != "ready":
        raise ForkError(f"the {what} cannot be imported: {problem or 'its process ended'}")


def check_import(program: str, spec: Mapping[str, Any], what: str, python: str) -> None:
    """Check that another interpreter can import an author's code, in a process that ends then.

    Code whose import takes longer than two minutes is not refused.

    Args:
        program: As in `Forks`.
        spec: As in `Forks`.
        what: As in `Forks`.
        python: As in `Forks`.

    Raises:
        ConfigError: The code cannot be imported.
        ForkError: Its process has ended, or the program itself has failed.
    """
    process, channel = _launch({**spec, "program": program}, what, python)
    channel.settimeout(_IMPORT_S)
    try:
        _read_first_word(channel.recv(2**16), what)
    except TimeoutError:
        return
    finally:
        _end(process, channel)


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    process.send_signal(signal.SIGCONT)  # somebody may have stopped it: it ends the processes that its forks started
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_POLITE_S)
    process.kill()  # the kernel then kills its forks
    process.wait()

"""Processes of tool sets, forked from one that has imported verifiers. Runs in verifiers' Python.

verifiers starts each tool set's process as a program, which imports verifiers again: 5 to 10 s of a processor, for each
session where the tool set is a task's. Here a `Launcher` is forked from the environment's process before that has a
thread or an event loop, and each tool set is a fork of the launcher.

Invariants:
- a tool set's process is its program: the module is run as `__main__`, with the environment, the folder and the log
  that it would have had, in a session of its own;
- it ends with the launcher, which ends with the environment's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from verifiers.v1.runtimes import SubprocessRuntime

from verl_multiturn.calls.tasks import wake
from verl_multiturn.processes.system import end_with_parent
from verl_multiturn.processes.zygote import seed_process

_PACKET = 2**20
_start_program = SubprocessRuntime.run_background


class LaunchedProcess:
    """A tool set's process, as asyncio has its own: with `pid`, `returncode` and `wait`.

    Args:
        pid: Its process id.
        fd: A descriptor of it, which is closed with this object.
    """

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self._fd = fd

    def __del__(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)

    @property
    def returncode(self) -> int | None:
        """0 when it has ended, however; None while it runs."""
        return 0 if select.select([self._fd], [], [], 0)[0] else None

    async def wait(self) -> int:
        """Wait for its end."""
        loop = asyncio.get_running_loop()
        gone = loop.create_future()
        loop.add_reader(self._fd, wake, gone)
        try:
            await gone
        finally:
            loop.remove_reader(self._fd)
        return 0


class Launcher:
    """Forks itself; then forks tool sets, until the process that made it has ended.

    Args:
        served: The socket of that process, which no tool set may hold open.
    """

    def __init__(self, served: socket.socket) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PACKET)
        maker = os.getpid()
        if os.fork() == 0:
            try:
                self._channel.close()
                served.close()
                if end_with_parent(maker):
                    _launch(theirs)
            finally:
                os._exit(0)
        theirs.close()

    def start(self, module: str, environment: dict[str, str], folder: str, log: str) -> LaunchedProcess:
        """Start a tool set's process.

        Args:
            module: The module that is its program.
            environment: Its environment variables.
            folder: The folder in which it runs.
            log: The file to which it writes.

        Raises:
            OSError: No process can be had.
        """
        said = {"module": module, "environment": environment, "folder": folder, "log": log}
        self._channel.send(json.dumps(said).encode())
        packet, fds, _, _ = socket.recv_fds(self._channel, 64, 1)
        if not fds:
            raise OSError("no process for a tool set can be forked")
        return LaunchedProcess(int(packet), fds[0])

    def install(self) -> None:
        """Have local runtimes start tool sets here."""

        async def run_background(self_: SubprocessRuntime, argv: list[str], env: dict[str, str], log: str) -> None:
            if argv[:2] != [sys.executable, "-m"] or len(argv) != 3:
                await _start_program(self_, argv, env, log)
                return
            kept = {name: value for name, value in os.environ.items() if "API_KEY" not in name.upper()}
            kept.update(self_.process_env(env))
            folder = str(self_.workdir)
            self_._background.append(self.start(argv[2], kept, folder, os.path.join(folder, log)))

        SubprocessRuntime.run_background = run_background


def _launch(channel: socket.socket) -> None:
    """Fork a tool set for each packet until the channel is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # their ends are read from the descriptors
    launcher = os.getpid()
    while packet := channel.recv(_PACKET):
        try:
            process = os.fork()
        except OSError:
            channel.send(b"failed")
            continue
        if process == 0:
            channel.close()
            if not end_with_parent(launcher):
                os._exit(1)
            _become(json.loads(packet))
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(process)
            socket.send_fds(channel, [str(process).encode()], [fd])
            os.close(fd)
            continue
        channel.send(b"failed")


def _become(said: dict[str, Any]) -> NoReturn:
    """Be a tool set's process."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        log = os.open(said["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for standard in (1, 2):
            os.dup2(log, standard)
        os.chdir(said["folder"])
        os.environ.clear()
        os.environ.update(said["environment"])
        seed_process(None)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.argv = [said["module"]]
        runpy.run_module(said["module"], run_name="__main__", alter_sys=True)
        status = 0
    except BaseException as error:  # its words are in the log
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(status)

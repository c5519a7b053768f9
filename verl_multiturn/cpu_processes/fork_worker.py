"""The program that is started in place of Python: it asks `forkserver.py` for a process, and ends with that.

    python -I -S fork_worker.py SOCKET FILE [ARGUMENT …]                         started by Ray
    python -I -S fork_worker.py SOCKET -m MODULE [ARGUMENT …]                    started by `run`
    python -I -S fork_worker.py --spawned SOCKET … -c CODE [ARGUMENT …]          started by `multiprocessing`
    python fork_worker.py FILE [ARGUMENT …] --language=PYTHON
        --serialized-runtime-env-context=JSON                                    started by Ray's raylet

The last form is in the place of Ray's own `setup_worker.py`, which would import Ray to read a worker's environment: it
sets the variables, and goes on as the first form. Where the environment needs something else, Ray's program runs.

It passes the signals on to a module or code that it runs for somebody, since that one knows this process alone. It
imports only the standard library, and little of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import shlex
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1
_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="
_LONGEST_S = 300.0
"""Seconds after which a fork is no longer waited for: the server may be stopped, or hang in an import."""
_GRACE_S = 0.5
"""Seconds in which a server that lives has to answer a process that is to end."""
# Faults of this process itself, signals that end no process, and those that no handler can catch.
_OWN = {
    getattr(signal, name)
    for name in (
        "SIGILL", "SIGTRAP", "SIGABRT", "SIGBUS", "SIGFPE", "SIGSEGV", "SIGSYS", "SIGCHLD", "SIGCONT", "SIGTSTP",
        "SIGTTIN", "SIGTTOU", "SIGURG", "SIGWINCH", "SIGKILL", "SIGSTOP",
    )
}  # fmt: skip


def main() -> None:
    """Run a program in a fork, and end with its exit status.

    Where no fork can be had, start Python with the program in this process instead.
    """
    words = sys.argv[1:]
    if context := _value_of(_CONTEXT, words):
        words = set_up(json.loads(context), words)
    spawned = words[0] == "--spawned"
    address, *arguments = words[spawned:]
    spawner, started, starter = None, arguments, os.getppid()
    if spawned:
        # Before the code are the options of warnings, which the server has from its environment, too.
        started = arguments[arguments.index("-c") :]
        if "spawn_main(" not in started[1]:  # `multiprocessing` has helpers of its own
            os.execv(sys.executable, [sys.executable, *arguments])
        spawner = os.getppid()
        end_with(spawner)
    # Ray's worker inherits nothing but the standard descriptors.
    inherited = inheritable() if started[0].startswith("-") else []
    is_driver = started[0].startswith("-") and not spawned
    with open("/proc/self/oom_score_adj", encoding="utf-8") as score:
        request = {
            "address": address,
            "arguments": started,
            "spawner": spawner,
            "is_driver": is_driver,
            "inherited": inherited,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "oom_score_adj": score.read(),
            "blocked_signals": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }
    signals = Signals()
    if is_driver:
        signals.take()
    verdict, said = "elsewhere", address
    try:
        while verdict == "elsewhere":  # a second server forks the workers of Ray
            server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            server.settimeout(_LONGEST_S)
            server.connect(said)
            socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2, *inherited])
            signals.wait_for(server)
            verdict, _, said = server.recv(4096).decode().partition(" ")
    except OSError as error:
        verdict, said = "", str(error)
    if verdict != "forked" and signals.kept:
        end(-signals.kept[0])
    if verdict != "forked":
        reason = (
            f"the forkserver has started {said}" if verdict == "refused" else f"no forkserver ({said or 'it is busy'})"
        )
        print(f"verl-multiturn: {reason}: this process imports everything itself", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, *arguments])
    for descriptor in inherited:
        os.close(descriptor)
    server.settimeout(None)
    if is_driver:
        with contextlib.suppress(OSError), open(f"{address}.{os.getpid()}", "w", encoding="ascii") as note:
            note.write(said)
    status = wait(server, int(said), signals)
    if status is None and is_driver and os.getppid() != starter:  # the run was killed, and its server with it
        remove(address)
    end(1 if status is None else status)


def set_up(context: dict[str, object], words: list[str]) -> list[str]:
    """Set up a worker of Ray, and return the words with which this program starts it.

    Args:
        context: Ray's runtime environment of the worker.
        words: Words that the raylet has given this program.
    """
    _, *command = shlex.split(str(context.get("py_executable") or "")) or [""]
    is_ours = len(command) == 4 and command[:3] == ["-I", "-S", os.path.abspath(__file__)]
    is_plain = not context.get("command_prefix") and not context.get("override_worker_entrypoint")
    if not is_ours or not is_plain or _value_of(_LANGUAGE, words) != "PYTHON":
        theirs = os.path.join(os.path.dirname(words[0]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, theirs, *words])
    variables: dict[str, str] = context.get("env_vars") or {}  # type: ignore[assignment]
    for name, value in variables.items():  # `${NAME}` is another variable's value, and nothing if that is unset
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    return [command[3], *(word for word in words if not word.startswith((_CONTEXT, _LANGUAGE)))]


def _value_of(option: str, words: list[str]) -> str:
    return next((word.removeprefix(option) for word in words if word.startswith(option)), "")


def inheritable() -> list[int]:
    """Return the descriptors, beyond the standard ones, that a program started here would inherit."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder is closed by now
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


def end_with(parent: int) -> None:
    """End when the process ends that started this one, as SGLang's processes do."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def wait(server: socket.socket, pid: int, signals: Signals) -> int | None:
    """Wait for a fork to end, and return its exit status; None when the server has ended and the status is unknown.

    Args:
        server: The connection to the server, which sends `ended STATUS`.
        pid: Process id of the fork.
        signals: Those that the fork gets, in place of being killed with this process.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        process = -1
    if process != -1:
        signals.pass_to(process)
    try:
        _, _, status = server.recv(64).decode().partition(" ")
    except OSError:
        status = ""
    if not status and process != -1:
        select.select([process], [], [])
    return int(status) if status else None


class Signals:
    """The signals that would end this process: kept until its fork is known, and passed on to that from then on.

    A fork whose server has been killed would outlive the run, if this process ended before it passes them on.
    """

    def __init__(self) -> None:
        self.kept: list[int] = []
        self._process = -1
        self._waits = False

    def take(self) -> None:
        """Begin to keep signals; those that are ignored stay so."""
        for signum in signal.valid_signals() - _OWN:
            if signal.getsignal(signum) is signal.SIG_DFL:
                signal.signal(signum, self._handle)

    def wait_for(self, server: socket.socket) -> None:
        """Wait until the server's answer can be read. Once there is a signal to keep, it has `_GRACE_S` seconds."""
        try:
            self._waits = True
            if not self.kept:
                server.recv(1, socket.MSG_PEEK)
        except InterruptedError:
            pass
        finally:
            self._waits = False
        if self.kept:
            server.settimeout(_GRACE_S)

    def pass_to(self, process: int) -> None:
        """Send those that were kept, and all that will come, to a process that is given by its pidfd."""
        self._process = process
        for signum in self.kept:
            self._send(signum)

    def _handle(self, signum: int, frame: object) -> None:
        if self._process != -1:
            self._send(signum)
            return
        self.kept.append(signum)
        if self._waits:
            raise InterruptedError

    def _send(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signum)


def remove(address: str) -> None:
    """Remove the folder of a server that has been killed, with the files of `ForkServer` and this process there."""
    for path in (
        address,
        f"{address}--ray",
        f"{address}.{os.getpid()}",
        os.path.join(os.path.dirname(address), "spawned"),
    ):
        with contextlib.suppress(OSError):
            os.unlink(path)
    with contextlib.suppress(OSError):  # a second try of the run wrote a note there, or another program a file
        os.rmdir(os.path.dirname(address))


def end(status: int) -> None:
    """End this process with an exit status; a negative status is the signal that ended the fork."""
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()

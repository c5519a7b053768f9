"""Starting the trainer's process, and ending it together with every process that it started.

On a CPU the trainer is the first fork of the run's forkserver, whose imports begin before the rows are made.

Invariants:
- every signal that would end the launcher, and can be handled, raises KeyboardInterrupt, so that the processes of the
  run are ended first. SIGUSR1 asks a run that can stop by itself to do so, once;
- a launcher that is killed at once takes the trainer's process with it (Linux).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import psutil

from verl_multiturn.cpu_processes.environment import run_variables
from verl_multiturn.cpu_processes.handle import RUNS_MODULES, ForkServer, fork_command
from verl_multiturn.processes.system import end_with_parent
from verl_multiturn.runs.progress import say

_MARK = "VERL_MULTITURN_RUN"
STOP = signal.SIGUSR1
"""Signal that asks a run to stop when the step that runs has ended."""
_FAULTS = {"SIGILL", "SIGTRAP", "SIGABRT", "SIGBUS", "SIGFPE", "SIGSEGV", "SIGSYS"}
_LOOK_S = 1.0
"""Seconds after which a wait for a command looks whether a signal has come."""
# Signals that end no process, and those that cannot be handled.
_OTHERS = {"SIGCHLD", "SIGCONT", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGWINCH", "SIGINFO", "SIGKILL", "SIGSTOP"}


def _deadly() -> set[int]:
    """Return the signals that end a process and come from outside: a fault of the process itself is none of them."""
    left_out = {getattr(signal, name) for name in _FAULTS | _OTHERS if hasattr(signal, name)}
    return {int(signum) for signum in signal.valid_signals()} - left_out


class Interruption:
    """Handler of the signals that end this process: it raises KeyboardInterrupt once, so that nothing cuts the cleanup.

    Signals that arrive together are handled one after the other, the second within the cleanup of the first.

    Args:
        stop: Function that is called, in place of it, at the first SIGUSR1; None: SIGUSR1 is as the others.
    """

    def __init__(self, stop: Callable[[], None] | None = None) -> None:
        self._stop = stop
        self._is_armed = True
        self._is_interrupted = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if not self._is_armed:
            return
        if signum == STOP and self._stop is not None:
            stop, self._stop = self._stop, None
            stop()
            return
        self.disarm()
        self._is_interrupted = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt again where a signal has: Python drops one that is raised within a destructor."""
        if self._is_interrupted:
            raise KeyboardInterrupt

    def disarm(self) -> None:
        """Ignore all further signals."""
        self._is_armed = False


@contextmanager
def interruptible(stop: Callable[[], None] | None = None) -> Iterator[Interruption]:
    """Raise KeyboardInterrupt at each signal that would end this process, as long as the context lasts.

    A signal that the caller ignores stays ignored: with nohup, a run continues when its terminal closes. One that other
    code handles stays that code's.

    Args:
        stop: As for `Interruption`.

    Yields:
        The handler.
    """
    interruption = Interruption(stop)
    before = {}
    for signum in sorted(_deadly()):
        handler = signal.getsignal(signum)
        if handler in (signal.SIG_DFL, signal.default_int_handler) or isinstance(handler, Interruption):
            before[signum] = signal.signal(signum, interruption)
    try:
        yield interruption
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def fork_server(environment: Mapping[str, str], wanted: bool) -> Iterator[ForkServer | None]:
    """Start the server that the processes of a run on a CPU are forked from, and end it when the context does.

    Args:
        environment: Environment variables of the run's processes.
        wanted: Whether there is to be one.

    Yields:
        The server, which is still importing; None where none is wanted, or where it cannot be started, which is
        reported.
    """
    if not wanted:
        yield None
        return
    try:
        server = ForkServer(RUNS_MODULES, {**run_variables(environment), _MARK: uuid.uuid4().hex}, own_session=True)
    except OSError as error:
        say(f"no forkserver ({error}): each process of the run imports everything itself")
        yield None
        return
    try:
        yield server
    finally:
        server.close()


def run_watched(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path | None = None,
    watch: Callable[[Callable[[], bool]], None] | None = None,
    lock: int | None = None,
    stop: Callable[[], None] | None = None,
    begun: Callable[[int], None] | None = None,
    server: ForkServer | None = None,
) -> int:
    """Run a command in a new session until it ends, and return its exit status.

    Afterwards every process that the command started is ended, also after Ctrl-C, a closed terminal, or another signal
    that ends this process.

    Args:
        command: Program and its arguments.
        environment: All environment variables of the command.
        log: File that the output of the command is appended to; None: the output is that of this process.
        watch: Function that is called once, with a function that returns whether the command still runs. It has to
            return when the command has ended. None: nothing is done meanwhile.
        lock: Descriptor that the command inherits, of a file that stays locked as long as the command runs.
        stop: Function that asks the command to end by itself, called at the first SIGUSR1; None: SIGUSR1 ends it at
            once, as other signals do.
        begun: Function that is called with the command's process id when it has begun.
        server: Server that the command, one of this Python, is forked from; None: it is started as it is. Nothing else
            of the server's may run meanwhile, since it ends with the command.

    Returns:
        The exit status; negative for a command that a signal ended.

    Raises:
        KeyboardInterrupt: A signal arrived that ends this process.
    """
    mark = uuid.uuid4().hex
    if server is not None:
        mark = server.environment[_MARK]  # which its forks have
        command, environment = [*fork_command(server.address), *command[1:]], run_variables(environment)
    process: subprocess.Popen[bytes] | None = None
    with interruptible(stop) as interruption:
        try:
            try:
                with log.open("ab") if log is not None else contextlib.nullcontext() as output:
                    process = subprocess.Popen(
                        command,
                        stdout=output,
                        stderr=subprocess.STDOUT if output is not None else None,
                        env={**environment, _MARK: mark},
                        start_new_session=True,
                        pass_fds=() if lock is None else (lock,),
                        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
                    )
                started = process
                if begun is not None:
                    begun(process.pid)

                def is_running() -> bool:
                    interruption.check()
                    return started.poll() is None

                if watch is not None:
                    watch(is_running)
                while is_running():
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        started.wait(_LOOK_S)
            finally:
                interruption.disarm()
        finally:  # of its own: a signal may come before the line above
            if left := stop_everything(mark, process, server):
                numbers = ", ".join(map(str, left))
                print(f"these processes of the run could not be ended: {numbers}", file=sys.stderr)
    return process.returncode


def stop_everything(mark: str, trainer: subprocess.Popen[bytes] | None, server: ForkServer | None = None) -> list[int]:
    """End every process of a run, and return the process ids of those that did not end.

    The first of at most six rounds asks the processes to end (SIGTERM); the others kill them. After each round the
    function waits up to 5 seconds for them, and it returns when none remains. A trainer that is a fork gets SIGTERM
    once: the process that it was started by would pass the signal on, and a second one may cut its cleanup.

    These processes belong to the run: those with its mark in their environment, those in the session of the trainer or
    of the server, which itself stays, and all descendants of both. The mark alone is not enough, since a process that
    renames itself overwrites its environment. A process that gave up the mark, the session and its parent is not found.

    Args:
        mark: Value of the environment variable that marks the run's processes.
        trainer: The trainer's process; None: it was not started.
        server: Server that it was forked from; None: it is not a fork.
    """
    sessions = {each.pid for each in (trainer, server) if each is not None}
    spared = {os.getpid(), server.pid if server is not None else -1}
    passes_on = -1 if trainer is None or server is None or server.fork_of(trainer.pid) == trainer.pid else trainer.pid
    known: set[psutil.Process] = set()

    def belongs(process: psutil.Process) -> bool:
        try:
            return process.environ().get(_MARK) == mark or os.getsid(process.pid) in sessions
        except (psutil.Error, ProcessLookupError):
            return False

    for attempt in range(6):
        found = {process for process in psutil.process_iter() if process.pid not in spared and belongs(process)}
        for process in list(found | known):
            with contextlib.suppress(psutil.Error):
                found |= set(process.children(recursive=True))
        known = {process for process in known | found if _is_alive(process)}
        if not known:
            break
        for process in known:
            with contextlib.suppress(psutil.Error):
                if attempt > 0:
                    process.kill()
                elif process.pid != passes_on:
                    process.terminate()
        psutil.wait_procs(list(known), timeout=5)
    return sorted(process.pid for process in known if _is_alive(process))


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie counts as ended, because its new parent may never remove it."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False

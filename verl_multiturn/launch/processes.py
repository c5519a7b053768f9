"""The trainer's process, and the end of everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

_MARK = "VERL_MULTITURN_RUN"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_watched(
    command: Sequence[str], environment: Mapping[str, str], log: Path, watch: Callable[[Callable[[], bool]], None]
) -> int:
    """Run a command in a session of its own until it ends; return its exit status.

    Whatever it started is gone afterwards, also after Ctrl-C, SIGTERM or a closed terminal.

    Args:
        command: the program with its arguments.
        environment: its variables.
        log: the file that its output is added to.
        watch: called with a function that tells whether the command still runs; returns when it does not.

    Raises:
        KeyboardInterrupt: a signal asked for the end.
    """
    mark = uuid.uuid4().hex

    def interrupted(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # What the caller ignores stays ignored: nohup's run outlives its terminal.
    heard = [signum for signum in _SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, interrupted) for signum in heard}
    process: subprocess.Popen[bytes] | None = None
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, _MARK: mark},
                start_new_session=True,
            )
        started = process
        watch(lambda: started.poll() is None)
    finally:
        # A second Ctrl-C must not cut the cleaning short.
        for signum in heard:
            signal.signal(signum, signal.SIG_IGN)
        stop_everything(mark, process)
        for signum, handler in before.items():
            signal.signal(signum, handler)
    return process.returncode


def stop_everything(mark: str, trainer: subprocess.Popen[bytes] | None) -> None:
    """End every process of a run: asked first, then killed, until none is left.

    To the run belong the processes that bear its mark in their environment, those of the trainer's session, and all
    descendants of either (a process that renames itself overwrites its environment).
    """
    session = trainer.pid if trainer is not None else -1
    known: set[psutil.Process] = set()

    def belongs(process: psutil.Process) -> bool:
        try:
            return process.environ().get(_MARK) == mark or os.getsid(process.pid) == session
        except (psutil.Error, ProcessLookupError):
            return False

    for attempt in range(6):
        found = {process for process in psutil.process_iter() if process.pid != os.getpid() and belongs(process)}
        for process in list(found | known):
            with contextlib.suppress(psutil.Error):
                found |= set(process.children(recursive=True))
        known = {process for process in known | found if _is_alive(process)}
        if not known:
            return
        for process in known:
            with contextlib.suppress(psutil.Error):
                process.terminate() if attempt == 0 else process.kill()
        psutil.wait_procs(list(known), timeout=5)


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie does not: who adopted it may leave it for ever."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False

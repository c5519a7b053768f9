"""Signals that reach the launcher: nothing of the run remains, whichever it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from verl_multiturn.runs.processes import _deadly, interruptible, run_watched

pytestmark = pytest.mark.slow

LAUNCHER = """
import signal, sys
from pathlib import Path
from verl_multiturn.runs.processes import run_watched

for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):  # a shell's background ignores some
    signal.signal(signum, signal.SIG_DFL)
for signum in {ignored}:
    signal.signal(signum, signal.SIG_IGN)
program = "import os, time; print(os.getpid(), flush=True)\\nwhile not os.path.exists({end!r}): time.sleep(0.02)"
stop = (lambda: Path({asked!r}).touch()) if {stops} else None
raise SystemExit(run_watched([sys.executable, "-c", program], {{}}, Path({log!r}), stop=stop))
"""


class Launcher:
    """A launcher in a process of its own, whose command lasts until a file is there."""

    def __init__(self, folder: Path, stops: bool = False, ignored: tuple[int, ...] = ()) -> None:
        self.end, self.asked, log = folder / "end", folder / "asked", folder / "log"
        program = LAUNCHER.format(
            ignored=[*map(int, ignored)], end=str(self.end), asked=str(self.asked), log=str(log), stops=stops
        )
        self.process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
        while not (log.is_file() and log.read_text().endswith("\n")):
            assert self.process.poll() is None
            time.sleep(0.02)
        self.trainer = psutil.Process(int(log.read_text()))

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def left(self) -> bool:
        """Wait for the launcher, and return whether its command is still there."""
        self.process.wait(120)
        if self.process.returncode == -signal.SIGKILL:  # the kernel ends the command, a moment later
            psutil.wait_procs([self.trainer], timeout=60)
        try:
            return self.trainer.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def names() -> list[str]:
    text = "HUP INT QUIT USR1 USR2 ALRM TERM STKFLT XCPU VTALRM PROF IO PWR RTMIN"
    return [f"SIG{name}" for name in text.split()]


def test_every_signal_that_ends_a_process_is_handled_but_for_its_own_faults() -> None:
    assert {getattr(signal, name) for name in names()} <= _deadly()
    for name in ("KILL", "STOP", "SEGV", "ABRT", "CHLD", "WINCH", "CONT", "TSTP"):
        assert getattr(signal, f"SIG{name}") not in _deadly()


DROPPED = """
import gc, os, signal, sys, time
from pathlib import Path
from verl_multiturn.runs.processes import run_watched

class Dropping:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)  # here the handler raises, and Python drops what it raises

def begun(pid):
    while not Path({log!r}).read_text():
        time.sleep(0.02)
    del globals()["dropping"]

dropping = Dropping()
program = "import time; print('begun', flush=True)\\nwhile True: time.sleep(0.02)"
try:
    run_watched([sys.executable, "-c", program], {{}}, Path({log!r}), begun=begun)
except KeyboardInterrupt:
    raise SystemExit(9)
"""


def test_a_signal_whose_exception_python_drops_ends_the_run_too(tmp_path: Path) -> None:
    program = DROPPED.format(log=str(tmp_path / "log"))
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert "Exception ignored in" in ran.stderr
    assert ran.returncode == 9


@pytest.mark.parametrize("name", [*names(), "SIGKILL"])
def test_no_process_of_the_run_is_left(name: str, tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    launcher.send(getattr(signal, name))
    assert not launcher.left()
    assert launcher.process.returncode != 0


def test_the_first_usr1_asks_and_the_command_ends_by_itself(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, stops=True)
    launcher.send(signal.SIGUSR1)
    while not launcher.asked.exists():
        time.sleep(0.02)
    assert launcher.process.poll() is None
    launcher.end.touch()
    assert not launcher.left()
    assert launcher.process.returncode == 0


@pytest.mark.parametrize("second", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_the_second_signal_ends_at_once(second: int, tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, stops=True)
    launcher.send(signal.SIGUSR1)
    while not launcher.asked.exists():
        time.sleep(0.02)
    launcher.send(second)
    assert not launcher.left()
    assert launcher.process.returncode != 0


def test_many_signals_at_once_leave_nothing(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, stops=True)
    for name in ("SIGXCPU", "SIGUSR2", "SIGUSR1", "SIGTERM", "SIGQUIT", "SIGUSR1"):
        launcher.send(getattr(signal, name))
    assert not launcher.left()


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT])
def test_what_the_caller_ignores_stays_ignored(signum: int, tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, ignored=(signum,))
    launcher.send(signum)
    launcher.end.touch()  # else nothing but the signal ends it
    assert not launcher.left()
    assert launcher.process.returncode == 0


def test_handlers_are_put_back_and_those_of_others_stay() -> None:
    def theirs(*_: object) -> None:
        return

    before = signal.signal(signal.SIGUSR2, theirs)
    try:
        was = signal.getsignal(signal.SIGXCPU)
        with interruptible():
            assert signal.getsignal(signal.SIGUSR2) is theirs
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGXCPU)
        assert signal.getsignal(signal.SIGXCPU) is was
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_the_second_signal_does_not_cut_the_cleanup_of_the_first() -> None:
    cleaned = []

    def end() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGUSR2)
            cleaned.append("all")

    with interruptible(), pytest.raises(KeyboardInterrupt):
        end()
    assert cleaned == ["all"]
    with interruptible(), pytest.raises(KeyboardInterrupt):  # another context hears again
        signal.raise_signal(signal.SIGUSR2)


def test_the_process_id_is_told(tmp_path: Path) -> None:
    log, told = tmp_path / "log", list[int]()
    program = [sys.executable, "-c", "import os; print(os.getpid())"]
    assert run_watched(program, dict(os.environ), log, begun=told.append) == 0
    assert told == [int(log.read_text())]

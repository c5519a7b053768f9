"""Runs of the quickstart on the CPU, in a trainer mode, for the benchmarks that start and watch them."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
MODES = ("sync", "colocate_async", "separate_async")

_MARK = ":actor_name:"
"""How the line in the log of a Ray worker begins that names its actor's class."""


def arguments(description: str, modes: Sequence[str] = MODES) -> argparse.ArgumentParser:
    """Return a parser with the options that all these benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the runs; a temporary one by default")
    return parser


def folder(given: Path | None, name: str) -> Path:
    """Return the absolute path of the folder of the runs; make a temporary one where none is given."""
    return (given or Path(tempfile.mkdtemp(prefix=f"{name}-"))).absolute()


def start(
    mode: str,
    steps: int,
    seed: int,
    out: Path,
    *words: str,
    log: IO[bytes] | None = None,
    platform: str = "cpu",
) -> Any:
    """Start a run, and return its `Popen`. Used as a context, it waits for the run's clean end when interrupted.

    Args:
        mode: The trainer mode.
        steps: Number of steps.
        seed: The run's seed.
        out: The run's folder.
        words: Further words of the command.
        log: Gets the output; None: the benchmark's own output has it.
        platform: verl's name of the platform.
    """
    given = [f"--mode={mode}", f"--steps={steps}", f"--seed={seed}", f"--out={out}", *words]
    command = [sys.executable, "-m", "verl_multiturn.cli", "run", "quickstart", *given]
    # The tools of a benchmark are imported from the repository.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "VERL_PLATFORM": platform, "PYTHONPATH": path}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


def processes_of(running: subprocess.Popen[bytes], titles: tuple[str, ...]) -> list[psutil.Process]:
    """Return the processes of a run's session that have one of the titles; none of one that has ended.

    Args:
        running: The run, as `start` returns it.
        titles: Parts of command lines, or `ray::CLASS` for the process of an actor. Ray's forked workers keep the
            command line of the fork server, so an actor is found by its log, too.
    """
    found: list[psutil.Process] = []
    if running.poll() is not None:
        return found
    sessions = {child.pid for child in psutil.Process(running.pid).children()}
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) not in sessions:
                continue
            line = " ".join(process.cmdline())
            is_actor = [line.startswith(each) or _actor(process) == each for each in titles if "::" in each]
            if any(is_actor) or any(title in line for title in titles if "::" not in title):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def _actor(process: psutil.Process) -> str:
    """Return `ray::CLASS` of an actor's process, from the mark that Ray writes into its log; "" for another one.

    The children of an actor write into its log, whose name has the actor's own pid.
    """
    log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
    if not (log.name.startswith("worker-") and log.stem.endswith(f"-{process.pid}")):
        return ""
    marks = (line for line in log.read_text(errors="replace").splitlines() if line.startswith(_MARK))
    return f"ray::{next(marks, _MARK).removeprefix(_MARK)}"

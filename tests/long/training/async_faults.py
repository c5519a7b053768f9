"""Workers, servers and trainers of real asynchronous runs are killed, and every prompt is still trained once.

    python -m benchmarks.async_faults [--modes separate_async colocate_async] [--kills 3] [--seed 0] [--out FOLDER]

Each mode is one run of `verl-multiturn run quickstart --smoke --mode MODE` on the CPU, with a checkpoint after every
second step. Processes are killed (SIGKILL) at random moments, drawn by the seed, while the run trains. A run that has
ended is started again by the same command. After the last kill the run trains for a few steps more, is interrupted, and
its files are read.

    worker    an agent-loop worker
    server    a generation server, or its scheduler
    trainer   the process with verl's trainer, a training rank, or the driver

The last line is a JSON object, with an object by mode in each field:

- `kills`: kills by kind;
- `hung`: how often a run made no progress for `--limit` seconds; it is then ended, and started again;
- `ended`: how often a run ended without need: after the death of a worker, of a server in `separate_async`, or of none;
- `lost`, `twice`: prompts that were drawn and neither trained nor evicted nor are still to be trained; and prompts that
  were trained more than once. Both along the steps that led to the last weights;
- `poisoned`: rows that the certificate refused or that it could not verify, and steps with a token beyond the bound;
- `drawn`, `trained`, `evicted`, `open`: numbers of prompts; `steps`, `starts`, `seconds`.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.quickstart_runs import processes_of, start
from tests.long.training.async_faults_count import count, read
from verl_multiturn.models.checkpoints import TRACKER
from verl_multiturn.observe.metric_files import read_metrics
from verl_multiturn.records.read.files import record_files
from verl_multiturn.runs.processes import interruptible

MODES = ("separate_async", "colocate_async")
TITLES = {
    "worker": ("ray::MultiTurnWorker",),
    "server": ("ray::AsyncSGLangServer", "sglang::scheduler"),
    "trainer": ("ray::TaskRunnerV1", "ray::WorkerDict", "-m verl.trainer.main_ppo"),
}
"""How the command lines of processes begin, or a part of them, by kind."""
_LONGEST_PAUSE_S = 30.0
_MORE_STEPS = 3
"""Steps that are trained after the last kill."""
_ENDLESS = 1000
_WORDS = (
    "--smoke", "trainer.save_freq=2", "trainer.resume_mode=auto", "trainer.val_before_train=False",
    "trainer.test_freq=-1", "actor_rollout_ref.rollout.agent.num_workers=2",
)  # fmt: skip
_BOUND = 1
"""`max_staleness` of the modes' files."""
_POLL_S = 0.5
LIMIT_S = 240.0
"""Seconds without progress after which a run hangs."""


def run(
    out: Path,
    modes: Sequence[str] = MODES,
    kinds: Sequence[str] = tuple(TITLES),
    kills: int = 3,
    seed: int = 0,
    limit_s: float = LIMIT_S,
) -> dict[str, dict[str, Any]]:
    """Run the modes one after another, and return the figures, each an object by mode.

    Args:
        out: Folder of the runs.
        modes: The modes.
        kinds: Keys of `TITLES`.
        kills: Kills of each kind, in each mode.
        seed: Seed of the runs and of the kills.
        limit_s: Seconds without progress after which a run hangs.
    """
    results = {}
    for mode in modes:
        results[mode] = Faults(mode, out / mode, seed, limit_s).run(plan(kinds, kills, f"{seed} {mode}"))
    fields = next(iter(results.values()))
    return {field: {mode: results[mode][field] for mode in results} for field in fields}


def plan(kinds: Sequence[str], often: int, seed: str) -> list[tuple[str, float]]:
    """Return the kinds of processes to kill, in a random order, each with the seconds before it."""
    rng = random.Random(seed)
    order = [kind for kind in kinds for _ in range(often)]
    rng.shuffle(order)
    return [(kind, rng.uniform(0, _LONGEST_PAUSE_S)) for kind in order]


class Faults:
    """A run of the quickstart in a mode, whose processes are killed.

    Args:
        mode: The mode.
        out: The run's folder.
        seed: Seed of the run, and of the choice among the processes of a kind.
        limit_s: Seconds without progress after which the run hangs.
    """

    def __init__(self, mode: str, out: Path, seed: int, limit_s: float) -> None:
        self._mode, self._out, self._limit_s = mode, out, limit_s
        self._seed = seed
        self._rng = random.Random(f"{seed} {mode} which")
        self._running: subprocess.Popen[bytes] | None = None
        self._began = self._trained_at = time.monotonic()
        self._trained: list[tuple[str, int]] = []
        self._kills: Counter[str] = Counter()
        self._hung = self._ended = self._starts = 0

    def run(self, kills: list[tuple[str, float]]) -> dict[str, Any]:
        """Kill one process after another, let the run go on for some steps, and return the results."""
        self._out.mkdir(parents=True, exist_ok=True)
        with interruptible():
            try:
                for kind, pause_s in kills:
                    self._train(pause_s)
                    self._kill(kind)
                wanted = self._checkpointed() + _MORE_STEPS
                while self._checkpointed() < wanted:
                    self._train(_POLL_S)
            finally:
                self._interrupt()
        return self._results()

    def _train(self, seconds: float) -> None:
        """Let the run train for so many seconds; start it first where it has ended, and wait until it trains."""
        if self._running is not None and self._running.poll() is not None:
            self._say("the run ended by itself")
            self._ended += 1
            self._running = None
        if self._running is None:
            self._start()
        until = time.monotonic() + seconds
        self._wait(lambda: time.monotonic() >= until)

    def _start(self) -> None:
        """Start the run, and wait for the end of its first conversation."""
        self._starts += 1
        self._say(f"start {self._starts}")
        there = {path.name for path in self._recorded()}  # each worker has a file of its own
        with (self._out / "launcher.log").open("ab") as log:
            self._running = start(self._mode, _ENDLESS, self._seed, self._out, *_WORDS, log=log)
        self._trained_at = time.monotonic()
        self._wait(lambda: any(path.stat().st_size and path.name not in there for path in self._recorded()))

    def _wait(self, happened: Callable[[], bool]) -> None:
        """Wait until something has happened, or the run has ended, or it hangs."""
        while self._running is not None and self._running.poll() is None and not happened():
            time.sleep(_POLL_S)
            if (trained := self._sizes("metrics*.jsonl")) != self._trained:
                self._trained, self._trained_at = trained, time.monotonic()
            elif time.monotonic() - self._trained_at > self._limit_s:
                self._say(f"no step for {self._limit_s:.0f} s")
                self._hung += 1
                self._interrupt()

    def _kill(self, kind: str) -> None:
        """Kill a process of a kind. Then wait until a run that must end has ended, or until another has trained."""
        while not (found := self._processes(TITLES[kind])):  # one that was killed before may not be there again
            self._train(_POLL_S)
        chosen = self._rng.choice(sorted(found, key=lambda process: process.pid))
        self._say(f"kill a {kind}: {' '.join(chosen.cmdline())[:60]}")
        chosen.kill()
        self._kills[kind] += 1
        ends = kind == "trainer" or (kind == "server" and self._mode == "colocate_async")
        trained = self._sizes("metrics*.jsonl")
        self._wait(lambda: not ends and self._sizes("metrics*.jsonl") != trained)
        if ends:
            self._running = None

    def _processes(self, titles: tuple[str, ...]) -> list[psutil.Process]:
        """Return the processes of the trainer's session whose command lines show one of the titles."""
        return [] if self._running is None else processes_of(self._running, titles)

    def _interrupt(self) -> None:
        """End the run and all its processes, as Ctrl-C does."""
        running, self._running = self._running, None
        if running is None or running.poll() is not None:
            return
        running.terminate()
        running.wait()

    def _recorded(self) -> list[Path]:
        folder = self._out / "records"
        return record_files(folder) if folder.is_dir() else []

    def _sizes(self, pattern: str) -> list[tuple[str, int]]:
        """Return the sizes of files that grow while a run trains."""
        return [(path.name, path.stat().st_size) for path in sorted(self._out.glob(pattern))]

    def _checkpointed(self) -> int:
        """Return the step of the last checkpoint; 0 without one."""
        tracker = self._out / "checkpoints" / TRACKER
        text = tracker.read_text().strip() if tracker.is_file() else ""
        return int(text) if text.isdecimal() else 0

    def _say(self, text: str) -> None:
        print(f"{self._mode} {time.monotonic() - self._began:6.0f} s  step {self._checkpointed()}: {text}", flush=True)

    def _results(self) -> dict[str, Any]:
        left = read(self._out)
        steps = [entry["data"] for entry in read_metrics(self._out)]
        return {
            "kills": dict(self._kills),
            "hung": self._hung,
            "ended": self._ended,
            **count(left),
            "poisoned": poisoned(steps, (self._out / "train.log").read_text(errors="replace")),
            "drawn": left.drawn,
            "trained": sum(map(len, left.trained.values())),
            "evicted": len(left.evicted),
            "open": len(left.open),
            "steps": left.steps,
            "starts": self._starts,
            "seconds": round(time.monotonic() - self._began),
        }


def poisoned(steps: list[dict[str, float]], log: str) -> int:
    """Return the faults of trained rows: see `poisoned` above.

    Args:
        steps: The metrics of the steps.
        log: The output of all starts.
    """
    certificate = "rollout/certificate/"
    faults = sum(int(step.get(certificate + name, 0)) for step in steps for name in ("violations", "unverified"))
    faults += sum(step.get("rollout/async/age/max", 0) > _BOUND for step in steps)
    return faults + log.count("CertificateError: step")

"""Evaluations of a run's checkpoints while it trains, in processes of their own.

    trainer ──▶ put()        hard links of the weights in evaluations/waiting/, and a worker, if none is there
    worker  ──▶ work()       the newest that waits: `verl-multiturn eval`, a point in evaluations/points.jsonl; again

    RUN/evaluations/wanted.json              how checkpoints are evaluated (`CheckpointOptions`)
                    waiting/global_step_N    weights that wait; an older one is skipped, by name, when a newer one waits
                    running/global_step_N    those that are evaluated
                    step_N, step_N.2, …      folders of evaluations
                    points.jsonl             the outcome of each
                    worker.log

Invariants:
- the trainer waits for neither, and reads nothing that they write;
- there is one worker at most, with one evaluation at most;
- weights that wait stay when the trainer removes their checkpoint, and go when they have been evaluated;
- an evaluation ends after `timeout_s`, with all that it started.

A run that has ended may have left weights that wait: `python -m verl_multiturn.runs.checkpoint_evaluations RUN`.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from verl_multiturn.config import PATH
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.evaluation.points import FOLDER, Point, add_point, point_of
from verl_multiturn.evaluation.results import read_results
from verl_multiturn.processes.system import end_with_parent
from verl_multiturn.records.write.run_file import write_whole
from verl_multiturn.runs.checkpoint_deployments import deploy_point

_STEP = "global_step_"
_WANTED, _LOG = "wanted.json", "worker.log"
_NOT_WEIGHTS = ("optim_", "extra_state_", "reference_")
"""Beginnings of the names of files that no evaluation reads."""
NOT_ASKED = (
    "recipe.root=", "recipe.out=", "recipe.outputs=", "trainer.", "hydra.", f"{PATH}.checkpoint_evaluation",
)  # fmt: skip
"""Beginnings of the run's words that an evaluation has otherwise."""
_OF_RAY = ("RAY_", "VERL_FILE_LOGGER_PATH")
_NICE = 19
_LOOK_S = 5.0
"""How often a worker looks whether newer weights wait than others do, which it then removes."""
_END_S = 10.0
_KILLED_S = 60.0
_TAIL_BYTES = 4_000


@dataclass(frozen=True)
class CheckpointOptions:
    """How the checkpoints of a run are evaluated."""

    recipe: str
    """Folder of the recipe."""
    words: list[str]
    """Hydra's overrides of the run, as it was started."""
    rows: list[str]
    """Files of rows."""
    samples: int | None
    """Conversations of each row; None: the recipe's own number."""
    devices: str | None
    """GPUs, as in CUDA_VISIBLE_DEVICES; None: it sees none."""
    timeout_s: float
    deploy_to: str | None = None
    """Address of a gateway that gets good ones; None: none does."""
    deploy_key_env: str | None = None
    deploy_if: str = "better"

    def command(self, checkpoint: Path, out: Path) -> list[str]:
        """Return the command that evaluates a checkpoint."""
        words = [word for word in self.words if not word.lstrip("+~").startswith(NOT_ASKED)]
        command = [sys.executable, "-m", "verl_multiturn.cli", "eval", str(checkpoint), "--recipe", self.recipe]
        command += ["--out", str(out), "--trust"]  # the run's own checkpoint, wherever --out put the run
        command += [part for path in self.rows for part in ("--rows", path)]
        command += [] if self.samples is None else ["--samples", str(self.samples)]
        return command + [part for word in words for part in ("--set", word)]


def started_as(run: Path) -> tuple[str, list[str]]:
    """Return the recipe's folder and Hydra's overrides of a run, as Hydra wrote them into its folder.

    Raises:
        ConfigError: They are not there.
    """
    folder = run / "hydra" / ".hydra"
    try:
        words = yaml.safe_load((folder / "overrides.yaml").read_text(encoding="utf-8"))
        sources = yaml.safe_load((folder / "hydra.yaml").read_text(encoding="utf-8"))
        sources = sources["hydra"]["runtime"]["config_sources"]
        recipe = next(each["path"] for each in sources if each["provider"] == "main")
    except (OSError, yaml.YAMLError, KeyError, TypeError, StopIteration) as error:
        raise ConfigError(
            f"{str(folder)!r} does not say how the run was started ({error!r}); start it with verl-multiturn run"
        ) from None
    return str(recipe), [str(word) for word in words or []]


def put(run: Path, step: int, checkpoint: Path, wanted: CheckpointOptions) -> subprocess.Popen[bytes]:
    """Let a checkpoint wait for its evaluation, start a worker, and return it.

    Where one is at work, that one takes the checkpoint, and the new one ends at once.

    Args:
        run: Folder of the run.
        step: Step of the checkpoint.
        checkpoint: Its folder, `global_step_N`, which is whole.
        wanted: How it is evaluated.

    Raises:
        OSError: The disk is full, or no process can be started.
    """
    folder = run / FOLDER
    (folder / "waiting").mkdir(parents=True, exist_ok=True)
    write_whole(folder / _WANTED, json.dumps(asdict(wanted), indent=2) + "\n")
    half, whole = folder / "waiting" / f".{step}", folder / "waiting" / f"{_STEP}{step}"
    shutil.rmtree(half, ignore_errors=True)
    try:
        _link(checkpoint / "actor", half / "actor")
        shutil.rmtree(whole, ignore_errors=True)
        half.rename(whole)
    except BaseException:  # nothing half made stays, also at an interrupt
        shutil.rmtree(half, ignore_errors=True)
        raise
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RAY)}
    with (folder / _LOG).open("ab") as log:
        return subprocess.Popen(
            worker_command(run), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
            start_new_session=True,
        )  # fmt: skip


def worker_command(run: Path) -> list[str]:
    """Return the command of a run's worker."""
    return [sys.executable, "-m", __name__, str(run)]


def has_left(run: Path) -> bool:
    """Return whether weights wait in a run's folder, or were being evaluated when their worker was ended."""
    return any((run / FOLDER).glob(f"*ing/{_STEP}*"))


def _link(source: Path, target: Path) -> None:
    """Make the files of a folder once more under another name, without their contents; links where that cannot be."""
    for path in source.rglob("*"):
        if path.is_dir() or path.name.startswith(_NOT_WEIGHTS):
            continue
        named = target / path.relative_to(source)
        named.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, named)
        except OSError:  # another file system, or one without hard links
            named.symlink_to(path.resolve())


def work(run: Path) -> int:
    """Evaluate the waiting weights in a run's folder until none wait, and return the number of checkpoints taken.

    Where another worker is at it, nothing is done: that one looks again when it has ended.
    """
    folder, taken = run / FOLDER, 0
    while has_left(run):
        with _alone(folder) as is_alone:
            if not is_alone:
                return taken
            for left in (folder / "running").glob(f"{_STEP}*"):  # of a worker that was killed
                _take_back(folder, left)
            while _waiting(folder):
                _evaluate(run, _skip_older(run))
                taken += 1
            if has_left(run) and not _waiting(folder):
                return taken  # its owner has to remove the rest
    return taken


def _waiting(folder: Path) -> list[int]:
    """Return the steps of the weights that wait, the newest last."""
    names = [path.name.removeprefix(_STEP) for path in (folder / "waiting").glob(f"{_STEP}*")]
    return sorted(int(name) for name in names if name.isdecimal())


def _skip_older(run: Path) -> int:
    """Remove weights that wait while newer ones do, report their names, and return the newest step; 0: none."""
    *older, newest = _waiting(run / FOLDER) or [0]
    for step in older:
        shutil.rmtree(run / FOLDER / "waiting" / f"{_STEP}{step}", ignore_errors=True)
        _note(run, Point(step=step, state="skipped", why=f"step {newest} was there before its turn came"))
    return newest


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def _take_back(folder: Path, left: Path) -> None:
    target = folder / "waiting" / left.name
    if target.exists():  # the step was trained again
        shutil.rmtree(left, ignore_errors=True)
    else:
        left.rename(target)


def _evaluate(run: Path, step: int) -> None:
    """Evaluate one checkpoint, and write its point, whatever happens."""
    folder, name, began = run / FOLDER, f"{_STEP}{step}", time.time()
    waiting, held = folder / "waiting" / name, folder / "running" / name
    out = _unused(folder, step)
    try:
        held.parent.mkdir(exist_ok=True)
        waiting.rename(held)
        out = _chosen(held, out)
        wanted = CheckpointOptions(**json.loads((folder / _WANTED).read_text(encoding="utf-8")))
        why = _run(wanted, held, out, partial(_skip_older, run))
        try:
            point = point_of(read_results(out), step)
        except MultiTurnError as error:
            point = Point(step=step, state="failed", why=str(error))
        if why and point.state == "failed":
            point = point.model_copy(update={"why": why})
        if wanted.deploy_to is not None and point.state == "evaluated":
            point = point.model_copy(update={"at": time.time()})
            to = wanted.deploy_to, wanted.deploy_key_env or "", wanted.deploy_if
            point = deploy_point(run, point, out / "model", *to, partial(_skip_older, run))
    except Exception as error:  # the disk is full, or somebody removed a file: of this checkpoint alone
        point = Point(step=step, state="failed", why=f"{type(error).__name__}: {error}")
    for path in (held, waiting, out / "model"):
        shutil.rmtree(path, ignore_errors=True)
    _note(run, point.model_copy(update={"folder": out.name, "at": time.time(), "seconds": time.time() - began}))
    if waiting.exists():
        raise ConfigError(f"{str(waiting)!r} cannot be removed; remove it")


def _unused(folder: Path, step: int) -> Path:
    """Return a folder for a step's evaluation; a step that is trained again has other weights, and so another one."""
    names = itertools.chain([f"step_{step}"], (f"step_{step}.{number}" for number in itertools.count(2)))
    return next(folder / name for name in names if not (folder / name).exists())


def _chosen(held: Path, unused: Path) -> Path:
    """Return the folder of the evaluation of held weights: the one that a worker began which was killed, or a new one.

    Its name lies beside the weights.
    """
    noted = held / "evaluation"
    if not noted.is_file():
        noted.write_text(unused.name, encoding="utf-8")
    return unused.with_name(noted.read_text(encoding="utf-8"))


def _run(wanted: CheckpointOptions, held: Path, out: Path, meanwhile: Callable[[], object]) -> str:
    """Run an evaluation to its end, and return the error; "" without one.

    Args:
        wanted: How it is evaluated.
        held: The weights.
        out: Folder of the evaluation.
        meanwhile: Called again and again while it runs.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / "eval.log").open("ab") as log:
        process = subprocess.Popen(
            wanted.command(held, out), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": wanted.devices or ""}, start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )  # fmt: skip
    until = time.monotonic() + wanted.timeout_s
    try:
        while (status := _status(process, min(_LOOK_S, until - time.monotonic()))) is None:
            if time.monotonic() >= until:
                return f"it was ended after timeout_s, {wanted.timeout_s:g} s"
            meanwhile()
    finally:
        _end(process)
    if status == 0:
        return ""
    lines = _tail(out / "eval.log")
    said = [line for line in lines if line.startswith("verl-multiturn: ")]
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    return f"it ended with {how}: {(said or lines or ['it printed nothing'])[-1].removeprefix('verl-multiturn: ')}"


def _status(process: subprocess.Popen[bytes], wait_s: float) -> int | None:
    """Return the exit status of a process; None: it has not ended in so many seconds."""
    try:
        return process.wait(max(0.0, wait_s))
    except subprocess.TimeoutExpired:
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End an evaluation and all that it started, first by SIGINT, so that it ends its engine."""
    for signum, wait_s in ((signal.SIGINT, _END_S), (signal.SIGKILL, _KILLED_S)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)


def _tail(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def _note(run: Path, point: Point) -> None:
    print(point.model_dump_json(), flush=True)
    try:
        add_point(run, point)
    except OSError as error:
        print(f"the point of step {point.step} could not be written: {error}", flush=True)


def wanted_of(settings: Mapping[str, Any], run: Path, rows: Sequence[str]) -> CheckpointOptions:
    """Return how a run's checkpoints are evaluated.

    Args:
        settings: `custom.multiturn.checkpoint_evaluation`.
        run: Folder of the run.
        rows: Files of its validation rows.

    Raises:
        ConfigError: The run's folder lacks the command of its start.
    """
    return CheckpointOptions(*started_as(run), list(rows), **settings)


def main(words: Sequence[str]) -> None:
    """Be the worker of the run whose folder is named."""
    with contextlib.suppress(OSError):
        os.nice(_NICE - os.nice(0))
    work(Path(words[0]))


if __name__ == "__main__":
    main(sys.argv[1:])

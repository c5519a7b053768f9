"""Deployment of a run's checkpoints at a gateway, by the worker that has evaluated them (`checkpoint_evaluations`).

    evaluation, its exported model ──▶ is_better ──▶ evaluations/deployed/step_N ──▶ `verl-multiturn deploy`

Invariants:
- the training waits for none of it;
- the folder of the model that serves stays, since a deployment that fails loads it again; of the others two at most.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from verl_multiturn.evaluation.points import FOLDER, Point, read_points
from verl_multiturn.processes.system import end_with_parent

DEPLOY_S = 7200.0
"""Seconds after which a deployment is given up; the server may load a large model for minutes."""
_KEPT = 2
"""Folders of deployed models: the one that serves, and the one before."""


def deploy_command(model: Path, to: str, key_env: str) -> list[str]:
    """Return the command that deploys a model."""
    command = [sys.executable, "-m", "verl_multiturn.cli", "deploy", str(model)]
    return [*command, "--to", to, "--admin-key-env", key_env]


def is_better(point: Point, former: Sequence[Point]) -> bool:
    """Return whether a checkpoint's mean reward is above that of the last one that was deployed, or it is the first.

    Args:
        point: Its evaluation.
        former: Points of the run's checkpoints, in the order in which they were evaluated.
    """
    last = next((each for each in reversed(former) if each.deployed and each.avg is not None), None)
    return point.avg is not None and (last is None or last.avg is None or point.avg > last.avg)


def deploy_point(run: Path, point: Point, model: Path, to: str, key_env: str, only: str) -> Point:
    """Deploy an evaluated checkpoint where it is due, and return its point with the outcome.

    Args:
        run: Folder of the run.
        point: The evaluation.
        model: Folder into which the evaluation has exported the model. It is moved where it is deployed.
        to: Address of the gateway.
        key_env: Environment variable with its admin key.
        only: `better`: only if its mean reward is above that of the last one deployed; `always`.
    """
    former = sorted(read_points(run), key=lambda each: each.at)
    if only == "better" and not is_better(point, former):
        return point.model_copy(update={"not_deployed": "its mean reward is not above that of the one that serves"})
    if not model.is_dir():
        return point.model_copy(update={"not_deployed": "the evaluation left no exported model"})
    folder = run / FOLDER / "deployed" / f"step_{point.step}"
    folder.parent.mkdir(exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    model.rename(folder)
    with (run / FOLDER / "deploy.log").open("ab") as log:
        process = subprocess.Popen(
            deploy_command(folder, to, key_env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            start_new_session=True, preexec_fn=partial(end_with_parent, os.getpid()),
        )  # fmt: skip
        try:
            out, _ = process.communicate(timeout=DEPLOY_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
        log.write(out)
    if process.returncode:
        why = f"verl-multiturn deploy ended with status {process.returncode}; see {run / FOLDER / 'deploy.log'}"
        shutil.rmtree(folder, ignore_errors=True)
        return point.model_copy(update={"not_deployed": why})
    _remove_old(folder.parent, folder)
    with contextlib.suppress(ValueError, IndexError):
        point = point.model_copy(update={"model": json.loads(out.splitlines()[-1])["model"]})
    return point.model_copy(update={"deployed": True})


def _remove_old(folder: Path, newest: Path) -> None:
    """Remove the folders of models that were deployed long ago."""
    held = sorted((each for each in folder.iterdir() if each != newest), key=lambda each: each.stat().st_mtime)
    for path in held[: max(0, len(held) - (_KEPT - 1))]:
        shutil.rmtree(path, ignore_errors=True)

"""Deployment of a run's checkpoints at a gateway, by the worker that has evaluated them (`checkpoint_evaluations`).

    evaluation, its exported model ──▶ is_better ──▶ evaluations/deployed/GATEWAY/step_N ──▶ `verl-multiturn deploy`

Invariants:
- the training waits for none of it, and weights that wait for their evaluation do not pile up meanwhile;
- a folder goes only if the gateway itself reports that it serves another one, and loads none; without its report all
  stay, and nothing more is deployed;
- whatever a gateway or the disk does, the evaluation's figures stay.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from verl_multiturn.clients.chat_endpoint import key_of
from verl_multiturn.describe import describe
from verl_multiturn.errors import MultiTurnError
from verl_multiturn.evaluation.points import FOLDER, Point, all_points
from verl_multiturn.gateway.deploy_client import deployment_at
from verl_multiturn.processes.system import end_with_parent

DEPLOY_S = 7200.0
"""Seconds after which a deployment is given up; the server may load a large model for minutes."""
_LOOK_S = 5.0
_KEPT = 1
"""Folders of models that a gateway served before, beside the one that serves."""
_NAME = re.compile(r"step_(\d+)(?:\.(\d+))?")
_OVER = ("idle", "done", "failed")


def deploy_command(model: Path, to: str, key_env: str) -> list[str]:
    """Return the command that deploys a model."""
    command = [sys.executable, "-m", "verl_multiturn.cli", "deploy", str(model)]
    return [*command, "--to", to, "--admin-key-env", key_env]


def is_better(point: Point, former: Sequence[Point], serves: object) -> bool:
    """Return whether a checkpoint's mean reward is above that of the one that serves, or none of the run does.

    Args:
        point: Its evaluation.
        former: All points of the run, in the order in which they were written.
        serves: Hash of the weights that the gateway serves. Where no point has it, the last one that was deployed
            counts.
    """
    known = [each for each in reversed(former) if each.avg is not None]
    own = (each for each in known if each.model and each.model == serves)
    last = next(own, None) or next((each for each in known if each.deployed), None)
    return point.avg is not None and (last is None or last.avg is None or point.avg > last.avg)


def deploy_point(
    run: Path, point: Point, model: Path, to: str, key_env: str, only: str, meanwhile: Callable[[], object]
) -> Point:
    """Deploy an evaluated checkpoint where it is due, and return its point with the outcome.

    Args:
        run: Folder of the run.
        point: The evaluation.
        model: Folder into which the evaluation has exported the model. It is moved where it is deployed.
        to: Address of the gateway.
        key_env: Environment variable with its admin key.
        only: `better`: only if its mean reward is above that of the one that serves; `always`.
        meanwhile: Called again and again while it is deployed.
    """
    try:
        return _deployed(run, point, model, to, key_env, only, meanwhile)
    except Exception as error:  # the evaluation is good, whatever a gateway or a disk does
        return point.model_copy(update={"not_deployed": describe(error)})


def _deployed(
    run: Path, point: Point, model: Path, to: str, key_env: str, only: str, meanwhile: Callable[[], object]
) -> Point:
    key = key_of(key_env, "deploy_key_env") or ""
    held = run / FOLDER / "deployed" / _name_of(to)
    held.mkdir(parents=True, exist_ok=True)
    # Without an answer nothing is moved: folders of a gateway that never reports would fill the disk of the training.
    now = deployment_at(to, key)
    _remove_old(held, now)
    if point.model and now.get("serves") == point.model:
        return point.model_copy(update={"deployed": True})
    if only == "better" and not is_better(point, all_points(run), now.get("serves")):
        return point.model_copy(update={"not_deployed": "its mean reward is not above that of the one that serves"})
    if not model.is_dir():
        return point.model_copy(update={"not_deployed": "the evaluation left no exported model"})
    folder = _unused(held, point.step)
    model.rename(folder)
    log = run / FOLDER / "deploy.log"
    status, out = _run(deploy_command(folder, to, key_env), log, meanwhile)
    with contextlib.suppress(ValueError, IndexError, KeyError, TypeError):
        point = point.model_copy(update={"model": str(json.loads(out.splitlines()[-1])["model"])})
    try:
        now = deployment_at(to, key)
    except MultiTurnError:
        is_served = status == 0
    else:
        is_served = now.get("serves_path") == os.path.realpath(folder)
        if not is_served and _is_free(folder, now):
            shutil.rmtree(folder, ignore_errors=True)
        _remove_old(held, now)
    if is_served:
        return point.model_copy(update={"deployed": True})
    return point.model_copy(
        update={"not_deployed": f"verl-multiturn deploy ended with status {status}, and it does not serve; see {log}"}
    )


def _run(command: Sequence[str], log: Path, meanwhile: Callable[[], object]) -> tuple[int, bytes]:
    """Run the command that deploys, and return its exit status and its output, which `log` gets as well."""
    with log.open("ab") as file, tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=printed, stderr=file,
            start_new_session=True, preexec_fn=partial(end_with_parent, os.getpid()),
        )  # fmt: skip
        until = time.monotonic() + DEPLOY_S
        try:
            while process.poll() is None and (left := until - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(_LOOK_S, left))
                meanwhile()
        finally:
            process.kill()  # of one that has ended it does nothing
        process.wait()
        printed.seek(0)
        out = printed.read()
        file.write(out)
    return process.returncode, out


def _name_of(gateway: str) -> str:
    """Return the name of a gateway's folder: two gateways may serve models of one run."""
    found = urlsplit(gateway)
    return re.sub(r"[^0-9A-Za-z.]+", "_", found.netloc.rpartition("@")[2] + found.path.rstrip("/"))


def _unused(held: Path, step: int) -> Path:
    """Return a folder for a step's model; a step that is trained again has other weights, and the first may serve."""
    names = itertools.chain([f"step_{step}"], (f"step_{step}.{number}" for number in itertools.count(2)))
    return next(held / name for name in names if not (held / name).exists())


def _is_free(folder: Path, now: Mapping[str, Any]) -> bool:
    """Return whether a gateway reports that it neither serves the model in a folder nor loads it."""
    serves, path = now.get("serves_path"), os.path.realpath(folder)
    is_loading = now.get("state") not in _OVER and now.get("path") == path
    return isinstance(serves, str) and serves != path and not is_loading


def _remove_old(held: Path, now: Mapping[str, Any]) -> None:
    """Remove the folders of models that a gateway does not serve, but for those of the newest steps."""
    found = [(match, path) for path in held.iterdir() if (match := _NAME.fullmatch(path.name)) and _is_free(path, now)]
    found.sort(key=lambda each: (int(each[0][1]), int(each[0][2] or 1)))
    for _, path in found[: max(0, len(found) - _KEPT)]:
        shutil.rmtree(path, ignore_errors=True)

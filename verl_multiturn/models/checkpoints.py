"""Checkpoints of verl's PPO trainers: which ones are whole, and the tracker file that names the newest.

A checkpoint is begun by `verl_bridge/trainer/checkpoint_writes.py`, and written in this order. A killed process leaves
the beginning of it:

    global_step_N/trained.json           ours, in the asynchronous modes and with a filter of groups without signal
                                         verl_bridge/trainer/groups/history.py
    global_step_N/reference.json         ours, with resets of the reference of a KL term
    global_step_N/actor/reference        ours, with a reference that was reset
                                         verl_bridge/trainer/reference_resets.py
    global_step_N/actor, critic          weights and optimizers
    global_step_N/data.pt                the data loader's position: a zip file, whose directory is written last
    global_step_N/transfer_queue         in the asynchronous modes; it gets this name when it is whole
    latest_checkpointed_iteration.txt    N

verl reads the tracker file alone. It ends when the file is empty, and begins from scratch when the folder is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TRACKER = "latest_checkpointed_iteration.txt"
TRAINED = "trained.json"
REFERENCE = "reference.json"
POSITION = "data.pt"
QUEUE = "transfer_queue"
_FOLDER = "global_step_"


def checkpoints_of(trainer: Mapping[str, Any], out: Path) -> Path:
    """Return the folder of a run's checkpoints.

    Args:
        trainer: The section `trainer` of the configuration.
        out: Folder of the run.
    """
    return Path(trainer.get("default_local_dir") or out / "checkpoints")


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return checkpoints / f"{_FOLDER}{step}"


def reference_folder(folder: Path) -> Path:
    """Return the folder in a checkpoint for the reference of a KL term, which verl removes with the actor's."""
    return folder / "actor" / "reference"


def is_complete(folder: Path) -> bool:
    """Return whether the folder of a checkpoint has what verl writes last, and weights.

    With `max_actor_ckpt_to_keep` verl removes only the weights of older checkpoints. Where verl saves in the background
    (`actor.checkpoint.async_save`), weights may be incomplete all the same.
    """
    queue = not _needs_queue(folder) or (folder / QUEUE / "metadata.json").is_file()
    return queue and (folder / "actor").is_dir() and zipfile.is_zipfile(folder / POSITION)


def _needs_queue(folder: Path) -> bool:
    """Return whether a checkpoint is one of an asynchronous mode; one whose file is torn may be."""
    try:
        return bool(json.loads((folder / TRAINED).read_text(encoding="utf-8")).get("queue", True))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError):
        return True


def mend_tracker(checkpoints: Path) -> str | None:
    """Let a torn tracker file name the newest complete checkpoint.

    A tracker file is torn that is empty or holds no number, or whose folder is missing or incomplete. Nothing is
    changed where there is no tracker file or no complete checkpoint.

    Args:
        checkpoints: The folder of all checkpoints.

    Returns:
        A sentence about what was mended; None when nothing was.
    """
    tracker = checkpoints / TRACKER
    if not tracker.is_file():
        return None
    named = tracker.read_text(errors="replace", encoding="utf-8").strip()
    if named.isdecimal() and is_complete(checkpoint_folder(checkpoints, int(named))):
        return None
    steps = [path.name.removeprefix(_FOLDER) for path in checkpoints.glob(f"{_FOLDER}*") if is_complete(path)]
    complete = [int(step) for step in steps if step.isdecimal()]
    if not complete:
        return None
    mended = checkpoints / f".{TRACKER}"
    mended.write_text(str(max(complete)), encoding="utf-8")
    os.replace(mended, tracker)
    return (
        f"{tracker} holds {named!r}, which names no complete checkpoint; it now names {max(complete)}, the newest "
        "complete one"
    )


def resumes(checkpoints: Path) -> bool:
    """Return whether the tracker file names a folder, from which verl would then resume."""
    with contextlib.suppress(OSError, ValueError):
        return checkpoint_folder(checkpoints, int((checkpoints / TRACKER).read_text(encoding="utf-8"))).is_dir()
    return False

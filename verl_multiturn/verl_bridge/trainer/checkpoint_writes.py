"""Checkpoints as the trainer writes them: the beginning of each, and the last one of a run that cannot go on.

Their reader at a start is in `models/checkpoints.py`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

from verl_multiturn.describe import describe
from verl_multiturn.errors import MultiTurnError
from verl_multiturn.models.checkpoints import (
    POSITION,
    QUEUE,
    REFERENCE,
    TRACKER,
    TRAINED,
    checkpoint_folder,
    is_complete,
    reference_folder,
)
from verl_multiturn.runs.stop_request import StopAnswer, StopRequest
from verl_multiturn.verl_bridge.compat.row_store import VALIDATION, clear_groups, list_prompts


class StopDue(MultiTurnError):
    """The run has a request to end (`StopRequest`), and no step runs."""


class LastCheckpoint(NamedTuple):
    """A sentence about the last checkpoint of a run that ends, and whether weights that should be in it are lost."""

    said: str
    is_lost: bool = False


def begin_checkpoint(folder: Path) -> None:
    """Make the folder of a checkpoint. One that is written over counts as incomplete until it is whole again."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (TRAINED, POSITION, REFERENCE):
        (folder / name).unlink(missing_ok=True)
    for stale in (folder / QUEUE, reference_folder(folder)):
        if stale.exists():
            shutil.rmtree(stale)


def save_last(trainer: Any, step: int | None) -> LastCheckpoint:
    """Save a checkpoint of a run that ends, unless there is one, and return how to go on.

    Args:
        trainer: Our trainer. No training worker may be at work.
        step: The step that the trainer's weights have finished; None: they are in the middle of one.
    """
    again = "start the same command again with trainer.resume_mode=auto, which goes on from"
    if step is None:
        said = f"nothing was saved, because a step was half trained; {again} the last checkpoint"
        return LastCheckpoint(said, is_lost=True)
    if step == 0:
        return LastCheckpoint("no step was trained yet, so nothing was saved")
    checkpoints = Path(trainer.config.trainer.default_local_dir)
    folder, after = checkpoint_folder(checkpoints, step), ""
    if trainer.saved_step != step or not _names(checkpoints, step):
        try:
            _forget_validation(trainer.agent_loop_manager)
            trainer.global_steps = step
            trainer._save_checkpoint()
        except Exception as error:  # of the disk, of Ray, of a training worker, or of a callback of the user's
            if not (_names(checkpoints, step) and is_complete(folder)):
                said = f"its weights could not be saved ({describe(error)}); {again} the last checkpoint"
                return LastCheckpoint(said, is_lost=True)
            after = f", after which trainer.checkpoint_callback_class failed ({describe(error)})"
    if not _names(checkpoints, step):  # verl writes it after the weights, which Megatron may save in the background
        return LastCheckpoint(
            f"the weights of step {step} are being saved in {str(folder)!r}; {again} them if {TRACKER} names {step} by "
            "then, and else from the checkpoint before"
        )
    return LastCheckpoint(f"the weights of step {step} are saved in {str(folder)!r}{after}; {again} them")


def stop_with_checkpoint(trainer: Any, request: StopRequest, step: int | None) -> None:
    """Save the last checkpoint of a run that has to end, and answer the request.

    Args:
        trainer: Our trainer. No training worker may be at work.
        request: The request.
        step: As for `save_last`.

    Raises:
        StopDue: The weights could not be saved.
    """
    last = save_last(trainer, step)
    if last.is_lost:
        request.take()
        raise StopDue(f"the run was asked to end; {last.said}")
    request.answer(StopAnswer(step or 0, last.said))


def _names(checkpoints: Path, step: int) -> bool:
    """Return whether the tracker file, which verl writes last, names a step; it may be an earlier run's."""
    tracker = checkpoints / TRACKER
    return tracker.exists() and tracker.read_text(encoding="utf-8").strip() == str(step)


def _forget_validation(agent_loop_manager: Any) -> None:
    """Cancel a validation that is running; verl saves all of TransferQueue, and would take up its rows later."""
    if uids := list(list_prompts(VALIDATION)):
        if hasattr(agent_loop_manager, "cancel"):  # a manager of the user's need not have it
            agent_loop_manager.cancel(uids)
        clear_groups(uids, VALIDATION)

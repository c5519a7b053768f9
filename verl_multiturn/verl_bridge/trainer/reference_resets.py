"""`ReferenceResets`: the reference of the KL term becomes the actor, at the end of some steps.

KL terms hold the actor near its reference. A long run is held back by them, once it is far from where it began. So
ProRL (arXiv 2505.24864) makes the actor the new reference now and then, with an optimizer that begins anew.

    global_step_N/reference.json      the step whose weights the reference in force in step N has; 0: the run's model
    global_step_N/actor/reference/    that reference, a file for each rank; missing with step 0

verl removes the folder with the actor's folder (`max_actor_ckpt_to_keep`). Checkpoints with the same reference share
its file where the disk has hard links, so that it takes its space once.

Invariants:
- the reference in force depends on the checkpoint alone that a start resumes from: a reset after it happens again;
- a run does not resume with another reference than the checkpoint's.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig
from verl.trainer.ppo.core_algos import kl_penalty

from verl_multiturn.config import PATH, ReferenceResetSettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.models.checkpoints import REFERENCE, reference_folder
from verl_multiturn.records.write.run_file import write_whole
from verl_multiturn.verl_bridge.compat.row_store import get_columns
from verl_multiturn.verl_bridge.settings import settings_of
from verl_multiturn.verl_bridge.trainer.reference_worker import WORKERS
from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows

logger = logging.getLogger(__name__)

PREFIX = "rollout/reference/"
_KEY = f"{PATH}.reference_reset"
_COLUMNS = ["response_mask", "old_log_probs", "ref_log_prob"]


class ReferenceResets:
    """The reference of a trainer whose setting `reference_reset` is on.

    Its metrics of a step, under `rollout/reference/`:
    - `kl`: mean divergence of the step's policy from the reference over the trained tokens, in nats, as verl's
      `low_var_kl` estimates it; missing where no token is trained;
    - `step`: the step whose weights the reference had; 0: those of the run's model;
    - `reset`: 1 where the step ended with a reset, else 0.

    Args:
        settings: When the reference is reset.
    """

    def __init__(self, settings: ReferenceResetSettings) -> None:
        self._settings = settings
        self.step = 0
        """The step whose weights the reference has; 0: those of the run's model."""
        self.begin_step()

    @classmethod
    def of(cls, config: DictConfig) -> ReferenceResets | None:
        """Return the reference of a run; None where it is never reset."""
        settings = settings_of(config.actor_rollout_ref.rollout).reference_reset
        return cls(settings) if settings.is_on else None

    def begin_step(self) -> None:
        """Forget the step before."""
        self._sum, self._tokens = 0.0, 0
        self._used, self._reset = self.step, False

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics."""
        own = {f"{PREFIX}step": float(self._used), f"{PREFIX}reset": float(self._reset)}
        return own if self._tokens == 0 else {**own, f"{PREFIX}kl": self._sum / self._tokens}

    def look(self, rows: BatchRows, silent: Collection[str]) -> None:
        """Add the divergence of a batch, whose masks are final.

        Args:
            rows: Those of verl's batch.
            silent: Groups without signal, whose old log-probs are not the trainer's.
        """
        if not (keys := [key for key in rows.real if key.uid not in silent]):
            return
        data = get_columns(keys, rows.partition_id, _COLUMNS)
        for mask, old, reference in zip(*(data[name].unbind() for name in _COLUMNS), strict=True):
            trained = mask != 0
            each = kl_penalty(old[trained].double(), reference[trained].double(), "low_var_kl")
            self._sum += float(each.sum())
            self._tokens += len(each)

    def end_step(self, step: int, workers: Any, timing: dict[str, float]) -> None:
        """Reset the reference where that is due.

        Args:
            step: The step whose updates are over.
            workers: verl's group of training workers.
            timing: Seconds of the step's phases; those of a reset are added as `reference_reset`.
        """
        every, most = self._settings.every, self._settings.kl_above
        far = most is not None and self._tokens > 0 and self._sum / self._tokens > most
        if far or (every is not None and step % every == 0):
            began = time.perf_counter()
            workers.reset_reference()
            timing["reference_reset"] = time.perf_counter() - began
            self.step, self._reset = step, True
            logger.info("the reference has the weights of step %d now", step)

    def look_at(self, workers: Any) -> None:
        """Refuse models whose reference cannot get the actor's parameters, before the first step.

        Raises:
            ConfigError: Their parts differ.
        """
        if differs := next(filter(None, workers.look_at_reference()), ""):
            raise ConfigError(
                f"{_KEY}: the reference's parameters are not divided as the actor's are ({differs}); give "
                "actor_rollout_ref.ref.fsdp_config the actor's values, or leave it out"
            )

    def save(self, folder: Path, workers: Any) -> None:
        """Write the reference into a checkpoint; of the run's model its step alone. It is called before verl writes.

        Args:
            folder: Folder of the checkpoint.
            workers: verl's group of training workers.
        """
        write_whole(folder / REFERENCE, json.dumps({"step": self.step}))
        workers.save_reference(str(reference_folder(folder.absolute())), self.step)

    def load(self, folder: Path, workers: Any) -> None:
        """Restore the reference of a checkpoint, which verl has just loaded.

        Args:
            folder: Folder of the checkpoint.
            workers: verl's group of training workers.

        Raises:
            ConfigError: Not all ranks have the same one, or not that of the checkpoint.
        """
        place, told = reference_folder(folder.absolute()), _saved_step(folder)
        # With the run's model, files of another run may lie on the disk of another machine.
        steps = [0] if told == 0 else sorted({*workers.load_reference(str(place))})
        if len(steps) > 1:
            raise ConfigError(
                f"{str(place)!r} has references of several steps, got {steps} (0: none), expected that of one step "
                "for each rank; go on from another checkpoint: trainer.resume_mode=resume_path and "
                "trainer.resume_from_path"
            )
        (self.step,) = steps
        if told is not None and self.step != told:
            raise ConfigError(
                f"{str(place)!r} has the reference of step {self.step} (0: none), expected that of step {told}, which "
                f"{REFERENCE} beside actor names; resume from a whole copy of the checkpoint"
            )
        self.begin_step()


def _saved_step(folder: Path) -> int | None:
    """Return the step of a checkpoint's reference; None: it is of a run that resets none.

    Raises:
        ConfigError: The file has none.
    """
    path = folder / REFERENCE
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return int(json.loads(text)["step"])
    except (ValueError, LookupError, TypeError):
        raise ConfigError(
            f'{str(path)!r} holds {text[:80]!r}, expected {{"step": N}}; resume from a whole copy of the checkpoint'
        ) from None


def with_our_workers(workers: dict[Any, Any]) -> dict[Any, Any]:
    """Return a trainer's classes of workers by role, with ours where one holds actor and reference.

    Raises:
        ConfigError: None of them is a worker of verl's that does.
    """
    ours = {role: WORKERS.get(getattr(worker, "__ray_actor_class__", None)) for role, worker in workers.items()}
    if not any(ours.values()):
        found = sorted({str(getattr(worker, "__ray_actor_class__", worker)) for worker in workers.values()})
        raise ConfigError(f"{_KEY} needs a training worker of verl's own, got {found}; leave it out")
    return {role: workers[role] if own is None else ray.remote(own) for role, own in ours.items()}


def require_no_reference(folder: Path, compares: bool) -> None:
    """Refuse a checkpoint with a reference of its own in a run that never resets one.

    Args:
        folder: Folder of the checkpoint.
        compares: Whether the run compares the actor with a reference.

    Raises:
        ConfigError: The run would go on with another reference.
    """
    place = reference_folder(folder)
    if not (place.is_dir() or _saved_step(folder)):  # the folder may be on another machine's disk
        return
    if compares:
        raise ConfigError(
            f"{str(place)!r} is the reference of this checkpoint, and without {_KEY} the run would go on with its "
            f"model as the reference; set {_KEY}.every to the same steps as before (or to more than the run has, for "
            f"no further reset), or move that folder and {REFERENCE} away"
        )
    logger.warning("%s is not loaded: the run compares with no reference", place)

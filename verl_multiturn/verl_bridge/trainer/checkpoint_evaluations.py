"""`EvaluateCheckpoints`: a `trainer.checkpoint_callback_class` that has each checkpoint evaluated beside the training.

verl calls it inside the step, and its exception would end the run. So `on_save` waits for a thread of its own for two
seconds at most, and raises nothing: a full disk, a disk that hangs or a machine without a process to spare costs one
checkpoint's evaluation, which the log names. All else happens in other processes (`runs/checkpoint_evaluations.py`).
"""

from __future__ import annotations

import logging
import subprocess
import threading
from pathlib import Path
from typing import Any

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

from verl_multiturn.describe import describe
from verl_multiturn.runs.checkpoint_evaluations import put, wanted_of
from verl_multiturn.verl_bridge.settings import settings_of

logger = logging.getLogger(__name__)

_WAIT_S = 2.0


class EvaluateCheckpoints(CheckpointCallback):
    """Has each checkpoint evaluated in a process of its own.

    Args:
        config: The trainer's configuration.
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._last: threading.Thread | None = None
        self._workers: list[subprocess.Popen[bytes]] = []

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        """Let a checkpoint wait for its evaluation; log where it cannot."""
        try:
            if async_save:
                self._tell(global_step, "async_save: its weights are not whole yet; `verl-multiturn eval` it later")
            elif self._last is not None and self._last.is_alive():
                self._tell(global_step, "the disk has not answered since the checkpoint before")
            else:
                self._last = threading.Thread(target=self._put, args=(global_step, checkpoint_dir), daemon=True)
                self._last.start()
                self._last.join(_WAIT_S)
        except Exception as error:  # whatever it is, the training goes on
            self._tell(global_step, describe(error))

    def _put(self, step: int, checkpoint: str) -> None:
        try:
            run = Path(str(self.config.recipe.out))
            rows = self.config.data.val_files
            settings = settings_of(self.config.actor_rollout_ref.rollout).checkpoint_evaluation
            files = [rows] if isinstance(rows, str) else [str(path) for path in rows]
            self._workers = [worker for worker in self._workers if worker.poll() is None]  # the others are reaped
            self._workers.append(put(run, step, Path(checkpoint), wanted_of(settings.model_dump(), run, files)))
        except Exception as error:  # of the disk, of the system, or of a run that no recipe began
            self._tell(step, describe(error))

    @staticmethod
    def _tell(step: int, why: str) -> None:
        logger.warning("the checkpoint of step %d is not evaluated: %s", step, why)

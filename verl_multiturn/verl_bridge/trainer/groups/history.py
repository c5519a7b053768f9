"""`History`: which prompts were trained, and which were evicted, since the last checkpoint.

verl saves a step's checkpoint before it removes the rows that the step trained, and reads them once more afterwards. So
verl's checkpoint of TransferQueue still has them. They are named in a file beside it, and removed after it is loaded.

    global_step_6/trained.json      {"trained": {"5": [UID, …], "6": [UID, …]}, "evicted": [UID, …],
                                     "padding": [UID, …], "skipped": {"5": [UID, …]}, "queue": true, "filter": {…},
                                     "advantage": {…}}

The last four are there with states alone: `filter` is that of a filter of groups without signal (`signal_filter.py`),
and `advantage` that of a function of advantages of the run's own (`advantages/estimators.py`). `skipped` are groups
that were in a step's batch and had no signal. `queue` is whether a checkpoint of TransferQueue belongs to the file. In
`sync` none does: there the file is written for the sake of the states alone.

Invariants, along the steps that lead to the weights of a checkpoint, whatever starts made them:
- every uid that was drawn was trained or skipped in one of the steps, or was evicted, or is a prompt in the checkpoint
  of TransferQueue. A prompt that was begun anew (`rerolls.py`) has a new uid in the place of its old one. In `sync`,
  without that queue, those of a step that broke off are nowhere;
- a checkpoint's file has the steps since the checkpoint before it. In a run that saves none (`trainer.save_freq`), the
  one that is saved when it breaks off has the last step alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_multiturn.describe import describe
from verl_multiturn.errors import ConfigError
from verl_multiturn.models.checkpoints import TRAINED
from verl_multiturn.verl_bridge.compat.row_store import TRAIN, clear_groups
from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows

logger = logging.getLogger(__name__)


class History:
    """The prompts of a trainer since its last checkpoint.

    Args:
        saves: Whether the run saves checkpoints. Otherwise only the last step is kept, which a load needs.
        has_queue: Whether verl's checkpoints have one of TransferQueue: not in `sync`.
    """

    def __init__(self, saves: bool, has_queue: bool = True) -> None:
        self._saves, self._has_queue = saves, has_queue
        self._trained: dict[int, list[str]] = {}
        self._skipped: dict[int, list[str]] = {}
        self._evicted: list[str] = []
        self._padding: list[str] = []
        """Rows of the last step that verl added to fill the batch."""
        self._saved = 0

    def train(self, step: int, rows: BatchRows, silent: Collection[str] = ()) -> None:
        """Note a step that has trained.

        Args:
            step: The step.
            rows: Those of all the step's updates.
            silent: Groups among them that had no signal, and were skipped.
        """
        if not self._saves:
            self._trained, self._skipped = {}, {}
        self._trained[step] = [uid for uid in rows.groups if uid not in silent]
        if skipped := [uid for uid in rows.groups if uid in silent]:
            self._skipped[step] = skipped
        self._padding = list(dict.fromkeys(key.uid for key in rows.padding))

    def save(self, step: int, folder: Path, evicted: Sequence[str], kept: Mapping[str, Any] | None = None) -> None:
        """Write the file of a step's checkpoint, before verl writes its own.

        Args:
            step: The step. Its checkpoint may be written again, with the groups that were evicted meanwhile.
            folder: Folder of the checkpoint, which exists.
            evicted: Uids that were evicted since this method was called last.
            kept: The states of the run's parts, under `filter` and `advantage`; None for a part without one.
        """
        if step > self._saved:
            for noted in (self._trained, self._skipped):
                for each in [each for each in noted if each <= self._saved]:
                    del noted[each]
            self._evicted = []
            self._saved = step
        self._evicted += evicted
        groups = {"trained": self._trained, "evicted": self._evicted, "padding": self._padding}
        states = {name: state for name, state in (kept or {}).items() if state is not None}
        ours = {"skipped": self._skipped, "queue": self._has_queue, **states} if states else {}
        (folder / TRAINED).write_text(json.dumps(groups | ours), encoding="utf-8")

    def load(self, folder: Path) -> dict[str, Any]:
        """Remove the prompts that were trained before a checkpoint, which verl has just loaded, and their rows.

        Args:
            folder: Folder of the checkpoint.

        Returns:
            The states that `save` was given, under their names; one that is not there was None.

        Raises:
            ConfigError: The file of the checkpoint is torn.
        """
        file = folder / TRAINED
        if not file.is_file():
            return {}
        try:
            noted = json.loads(file.read_text(encoding="utf-8"))
            steps = [*noted["trained"].values(), *noted.get("skipped", {}).values()]
            trained = {uid for uids in steps for uid in uids} | {*noted["padding"]}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{str(file)!r} was not written to its end ({describe(error)}), so that the prompts of its step would "
                "be trained twice; go on from another checkpoint: trainer.resume_mode=resume_path and "
                "trainer.resume_from_path"
            ) from None
        rows = clear_groups(trained, TRAIN)
        logger.info("%d rows that were trained before the checkpoint are removed", rows)
        return {name: noted[name] for name in ("filter", "advantage") if name in noted}

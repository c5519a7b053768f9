"""The updates in which a batch is trained: their number, and which of them are skipped.

verl counts a batch's updates by its rows. Where conversations have several rows, the updates are counted by prompts:

    updates = prompts / ppo_mini_batch_size, rounded up
    rows    = the batch's, and rows of padding up to a multiple that divides into these updates

Updates without a trained token are skipped.

Such an update has nothing to learn from, and it does harm. With `loss_agg_mode=token-mean` its loss is 0 divided by 0.
With any other mode the optimizer would still move the weights by its momentum.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig

from verl_multiturn.verl_bridge.compat.row_store import Batch, trained_rows
from verl_multiturn.verl_bridge.trainer.report import PREFIX
from verl_multiturn.verl_bridge.trainer.rows.skipped_rows import NEITHER, TAUGHT, SkippedRows, UpdateRows

logger = logging.getLogger(__name__)

Update = Callable[[Any, dict[str, Any]], Any]

ACTOR = "actor"
"""Name of the actor's device mesh."""


class TrainedUpdates:
    """The updates of actor and critic that have a trained token.

    Their metric is `rollout/skipped_updates`, the number of skipped updates of actor and critic in a step.

    Args:
        group_size: `rollout.n`.
        spared: Skips rows without advantages in the actor's updates; None: all stay.
    """

    def __init__(self, group_size: int, spared: SkippedRows | None = None) -> None:
        self._group_size, self._spared = group_size, spared
        self._skipped = 0
        self.numbers: dict[str, int | None] = {}
        """In which update the last batch trained each row, by the row's name; None: the workers draw it. A row that no
        update took is not there."""

    def begin_step(self) -> None:
        """Forget the step before."""
        self._skipped = 0

    def metrics(self) -> dict[str, float]:
        """Return the step's metric."""
        return {f"{PREFIX}skipped_updates": self._skipped}

    def run(
        self, batch: Batch, metrics: dict[str, Any], update: Update, settings: DictConfig, workers: Any, mesh: str
    ) -> Any:
        """Run verl's updates with a batch, except those without a trained token; return the whole batch.

        Args:
            batch: verl's batch.
            metrics: Metrics of the step, which `update` fills.
            update: verl's method that updates the actor or the critic.
            settings: The configuration of the actor or the critic.
            workers: Its worker group.
            mesh: Name of the worker group's device mesh, by which verl dispatches the batch.
        """
        spared = self._spared if mesh == ACTOR else None
        worth = [] if spared is None else spared.worth(batch)
        trained = trained_rows(batch.keys, batch.partition_id) if spared is None else [each > NEITHER for each in worth]
        size, ranks = settings.ppo_mini_batch_size * self._group_size, data_parallel_size(workers, mesh)
        kept = rows_to_train(trained, size, ranks, bool(settings.shuffle))
        names = [batch.keys[i] for i in kept]
        numbers = update_numbers(len(kept), size, ranks, bool(settings.shuffle))
        self.numbers = dict(zip(names, numbers, strict=True))
        skipped = (len(trained) - len(kept)) // size * settings.ppo_epochs
        self._skipped += skipped
        if skipped:
            logger.warning("%d updates without a trained token are skipped", skipped)
        thinned = None
        if spared is not None:
            thinned = spared.thin([worth[i] for i in kept], size, ranks)
            spared.count(len(kept) - (len(kept) if thinned is None else len(thinned.kept)))
            # A row that only fills an update is spared, whether its gradient of 0 was computed or not.
            self.numbers = {batch.keys[i]: self.numbers[batch.keys[i]] for i in kept if worth[i] == TAUGHT}
        if thinned is not None and spared is not None:
            self._update_part(spared, batch, names, thinned, metrics, update, settings, size, ranks)
        elif not skipped:
            return update(batch, metrics)
        elif kept:
            part = batch.select_keys(names)
            part.extra_info.update(batch.extra_info)
            update(part, metrics)
        return batch

    def _update_part(
        self,
        spared: SkippedRows,
        batch: Batch,
        names: Sequence[str],
        thinned: UpdateRows,
        metrics: dict[str, Any],
        update: Update,
        settings: DictConfig,
        size: int,
        ranks: int,
    ) -> None:
        """Run the updates with the rows that stay in them."""
        rows = len(thinned.kept)
        with (
            spared.part_of(batch, names, thinned, size, ranks) as part,
            mini_batches(rows, len(names) // size, self._group_size, settings),
        ):
            update(part, metrics)


def updates_of(prompts: int, config: DictConfig) -> int:
    """Return the number of updates of the actor that prompts are trained in, at least one."""
    return max(1, math.ceil(prompts / int(config.actor_rollout_ref.actor.ppo_mini_batch_size)))


def rows_multiple(prompts: int, ranks: int, config: DictConfig) -> int:
    """Return a number of which a batch's number of rows has to be a multiple.

    verl asks that an update has a multiple of `rollout.n` rows, and that each rank's part of an update, and of the
    whole batch, can be divided into micro-batches.

    Args:
        prompts: Number of the batch's prompts.
        ranks: Number of data-parallel ranks.
        config: verl's whole configuration.
    """
    parts = config.actor_rollout_ref
    actor, rollout = parts.actor, parts.rollout
    micro = 1 if actor.get("use_dynamic_bsz") else actor.get("ppo_micro_batch_size_per_gpu") or 1
    inferred = [
        1 if part.get("log_prob_use_dynamic_bsz") else part.get("log_prob_micro_batch_size_per_gpu") or 1
        for part in (rollout, parts.get("ref") or {})
    ]
    size = updates_of(prompts, config) * math.lcm(rollout["n"], ranks * micro)
    return math.lcm(size, *(ranks * each for each in inferred))


@contextmanager
def mini_batches(rows: int, updates: int, group_size: int, settings: DictConfig) -> Iterator[None]:
    """Make verl train this many rows in this many updates, while the context lasts.

    Args:
        rows: Number of the batch's rows.
        updates: Number of updates.
        group_size: `rollout.n`, by which verl multiplies `ppo_mini_batch_size`.
        settings: The configuration of the actor.
    """
    own = settings.ppo_mini_batch_size
    settings.ppo_mini_batch_size = rows // updates // group_size
    try:
        yield
    finally:
        settings.ppo_mini_batch_size = own


def rows_to_train(trained: Sequence[bool], size: int, ranks: int, shuffled: bool) -> list[int]:
    """Return the indices of a batch's rows, without the rows of updates that have no trained token.

    verl gives each data-parallel rank one contiguous part of the batch. An update takes the next `size / ranks` rows of
    every part. Example, with 4 rows, 2 rows in an update and 1 rank:
        rows_to_train([True, False, False, False], 2, 1, False) == [0, 1]

    Args:
        trained: For each row whether it has a trained token.
        size: Number of rows in one update.
        ranks: Number of data-parallel ranks.
        shuffled: Whether the workers draw which rows an update takes. If so, as many untrained rows are excluded as
            fill whole updates. The untrained rows that stay are too few to fill an update alone.
    """
    everything = list(range(len(trained)))
    if len(trained) % size or size % ranks:
        return everything  # verl refuses such a batch
    if shuffled:
        untrained = [i for i in everything if not trained[i]]
        left_out = set(untrained[: len(untrained) // size * size])
        return [i for i in everything if i not in left_out]
    share, part = len(trained) // ranks, size // ranks
    kept = []
    for update in range(len(trained) // size):
        rows = [rank * share + update * part + i for rank in range(ranks) for i in range(part)]
        kept += rows if any(trained[i] for i in rows) else []
    return sorted(kept)


def update_numbers(rows: int, size: int, ranks: int, shuffled: bool) -> list[int | None]:
    """Return for each row of a batch in which update verl's first epoch takes it, counted from 0; None: it is drawn.

    Example: with 8 rows, 4 rows in an update and 2 ranks, `[0, 0, 1, 1, 0, 0, 1, 1]`.

    Args:
        rows: Number of rows that are trained.
        size: Number of rows in one update.
        ranks: Number of data-parallel ranks.
        shuffled: Whether the workers draw which rows an update takes.
    """
    if rows % size or size % ranks or (shuffled and rows > size):
        return [None] * rows
    share, part = rows // ranks, size // ranks
    return [i % share // part for i in range(rows)]


def data_parallel_size(workers: Any, mesh: str) -> int:
    """Return the number of data-parallel ranks, found as verl does when it dispatches a batch."""
    if mesh not in workers._dispatch_info:
        workers._dispatch_info[mesh] = workers._query_dispatch_info(mesh)
    return int(max(workers._dispatch_info[mesh])) + 1

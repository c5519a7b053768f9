"""`SkippedRows`: rows that teach nothing leave the update, and groups without signal the old log-probabilities, too.

A row whose advantages are all 0 has a gradient of exactly 0 where the loss is proportional to the advantages. It costs
a forward and a backward pass all the same. So it leaves the update:

    taught    rows with an advantage other than 0: they stay in the update that they were in
    fillers   some others, so that each update has as many rows on each rank, and whole multiples of `rollout.n`; first
              those with a trained token, by which a loss can be divided
    spared    the rest

verl divides a loss by the tokens, or by the rows, of an update. So the advantages of the rows that stay are multiplied,
for the time of the update, by a correction of the division:

    token-mean       tokens in the loss, of the rows that stay ÷ of all rows of the update
    seq-mean-…       rows that stay ÷ all rows
    token-sum        1

An update without a taught row has fillers alone: as without a filter, its gradient is 0, and momentum moves the
weights.

The groups of `silent` (`signal_filter.py`) have no signal: their advantages are made exactly 0, and their old
log-probabilities are not computed. The engine's values are in their place; only the certificate reads them.

Invariants:
- loss and gradient of an update are those with all rows, up to rounding (`benchmarks.filters`);
- the batch itself keeps all its rows: scores, metrics and records are of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig

from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.compat.row_store import Batch, get_columns, get_rows, nested, put_columns, put_zeros
from verl_multiturn.verl_bridge.trainer.report import FILTER_PREFIX

NEITHER, TRAINED, TAUGHT = range(3)
"""A row's worth to an update: nothing; it has a trained token; one with an advantage other than 0."""
_MICRO = "micro_batch_size_per_gpu"
_OF_ROWS = ("seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


class UpdateRows(NamedTuple):
    """The rows of a batch that stay."""

    kept: list[int]
    """Indices of its rows, in the order in which ranks and updates take them."""
    of_update: list[int]
    """The update of each of them, counted from 0."""


def thin(worth: Sequence[int], size: int, ranks: int, multiple: int, micro: int = 0) -> UpdateRows | None:
    """Return which rows of a batch stay in its updates; None: all.

    verl gives each rank one contiguous part of the batch, and an update takes the next `size / ranks` rows of each.
    Example, with 8 rows, 4 rows in an update, 1 rank and multiples of 1: of `[1, 1, 2, 2, 2, 0, 1, 1]` the rows 2, 3, 4
    and 6 stay: two in each update, of which the last one is a filler.

    Args:
        worth: Of each row: `TAUGHT`, `TRAINED` or `NEITHER`.
        size: Number of rows in one update.
        ranks: Number of data-parallel ranks.
        multiple: Number of which an update's number of rows has to be a multiple: `rollout.n`.
        micro: The configured size of micro-batches; 0: verl divides by tokens.
    """
    if not worth or len(worth) % size or size % ranks:
        return None
    share, part = len(worth) // ranks, size // ranks
    cells = {
        (rank, update): range(rank * share + update * part, rank * share + (update + 1) * part)
        for rank in range(ranks)
        for update in range(len(worth) // size)
    }
    least = max(1, *(sum(worth[i] == TAUGHT for i in cell) for cell in cells.values()))
    fitting = [each for each in range(least, part) if each * ranks % multiple == 0]
    each = fewest_passes([*fitting, part], micro)
    if each == part:
        return None
    kept: list[int] = []
    of_update: list[int] = []
    for (_, update), cell in cells.items():
        own = sorted(sorted(cell, key=lambda i: -worth[i])[:each])
        kept += own
        of_update += [update] * len(own)
    return UpdateRows(kept, of_update)


class SkippedRows:
    """The rows that a trainer spares.

    Their metrics of a step, under `rollout/filter/`:
    - `spared_rows`: rows of its batches that were skipped in the update;
    - `spared_log_probs`: rows whose old log-probabilities were not computed.

    Args:
        config: verl's whole configuration.
    """

    def __init__(self, config: DictConfig) -> None:
        actor = config.actor_rollout_ref.actor
        self._group_size = int(config.actor_rollout_ref.rollout.n)
        self._bypass = bool((config.algorithm.get("rollout_correction") or {}).get("bypass_mode"))
        loss_mode = (actor.get("policy_loss") or {}).get("loss_mode", "vanilla")
        # SAPO's loss has this mode, whatever the setting.
        self._mode = "seq-mean-token-mean" if loss_mode == "sapo" else actor.get("loss_agg_mode", "token-mean")
        rollout = config.actor_rollout_ref.rollout
        self._micro = 0 if actor.get("use_dynamic_bsz") else int(actor.get("ppo_micro_batch_size_per_gpu") or 0)
        dynamic = rollout.get("log_prob_use_dynamic_bsz")
        self._inferred = 0 if dynamic else int(rollout.get("log_prob_micro_batch_size_per_gpu") or 0)
        self.silent: frozenset[str] = frozenset()
        """The groups without signal of the batch that is trained next."""
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the step before."""
        self._rows = self._log_probs = 0

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics."""
        return {f"{FILTER_PREFIX}spared_rows": self._rows, f"{FILTER_PREFIX}spared_log_probs": self._log_probs}

    def old_log_probs(
        self, batch: Batch, metrics: dict[str, Any], verls: Callable[[Any, dict[str, Any]], Any], ranks: int
    ) -> Any:
        """Compute the old log-probabilities of a batch, without the rows of silent groups; return the batch.

        Args:
            batch: verl's batch.
            metrics: Metrics of the step, which `verls` fills.
            verls: verl's method that computes them.
            ranks: Number of data-parallel ranks.
        """
        silent = [name for name in batch.keys if RowKey.parse(name).uid in self.silent]
        others = len(batch.keys) - len(silent)
        # Each rank needs a row, and as many as the others.
        least, most = max(1, math.ceil(others / ranks)), math.ceil(len(batch.keys) / ranks)
        fillers = set(silent[: fewest_passes(range(least, most + 1), self._inferred) * ranks - others])
        left_out = set(silent) - fillers
        if self._bypass or not left_out:
            return verls(batch, metrics)
        part = batch.select_keys([name for name in batch.keys if name not in left_out])
        set_micro(part, self._inferred, len(part.keys) // ranks)
        verls(part, metrics)
        names = [name for name in batch.keys if name in left_out]
        data = get_columns(names, batch.partition_id, ["response_mask", "rollout_log_probs"])
        masks = list(data["response_mask"].unbind())
        sampled = data.get("rollout_log_probs", None)
        zeros = [torch.zeros_like(mask, dtype=torch.float32) for mask in masks]
        known = zeros if sampled is None else [row.float() for row in sampled.unbind()]
        put_columns(names, batch.partition_id, old_log_probs=nested(known), entropy=nested(zeros))
        self._log_probs += len(names)
        return batch

    def silence(self, keys: Sequence[RowKey], partition_id: str) -> None:
        """Make the advantages of silent groups exactly 0: those of equal rewards may differ from it by rounding.

        Args:
            keys: The rows of a batch whose advantages are computed.
            partition_id: TransferQueue's partition.
        """
        if silent := [key for key in keys if key.uid in self.silent]:
            put_zeros(silent, partition_id, ["advantages", "returns"], torch.float32)

    def worth(self, batch: Batch) -> list[int]:
        """Return for each row of a batch whether it is `TAUGHT`, `TRAINED` or `NEITHER`."""
        data = get_columns(batch.keys, batch.partition_id, ["response_mask", "advantages"])
        found = []
        for mask, advantages in zip(data["response_mask"].unbind(), data["advantages"].unbind(), strict=True):
            own = advantages[mask != 0]
            found.append(TAUGHT if (own != 0).any() else TRAINED if len(own) else NEITHER)
        return found

    def thin(self, worth: Sequence[int], size: int, ranks: int) -> UpdateRows | None:
        """Return which rows of a batch stay in its updates (`thin`); None: all."""
        return thin(worth, size, ranks, self._group_size, self._micro)

    def count(self, rows: int) -> None:
        """Note that so many rows were skipped in an update."""
        self._rows += rows

    @contextmanager
    def part_of(
        self, batch: Batch, names: Sequence[str], thinned: UpdateRows, size: int, ranks: int
    ) -> Iterator[Batch]:
        """Yield the rows that stay as a batch, whose loss is divided by the counts of all, while the context lasts.

        Args:
            batch: verl's batch.
            names: The rows of the updates with a trained token, in order.
            thinned: Those of them that stay.
            size: Number of rows in one update.
            ranks: Number of data-parallel ranks.
        """
        kept = [names[i] for i in thinned.kept]
        part = batch.select_keys(kept)
        part.extra_info.update(batch.extra_info)
        updates = 1 + max(thinned.of_update)
        set_micro(part, self._micro, len(kept) // ranks // updates)
        factors = self._factors(names, thinned, batch.partition_id, size, ranks)
        own = get_rows(kept, batch.partition_id, "advantages")
        scaled = [row * factors[update] for row, update in zip(own, thinned.of_update, strict=True)]
        put_columns(kept, batch.partition_id, advantages=nested(scaled))
        try:
            yield part
        finally:
            put_columns(kept, batch.partition_id, advantages=nested(own))

    def _factors(
        self, names: Sequence[str], thinned: UpdateRows, partition_id: str, size: int, ranks: int
    ) -> list[float]:
        """Return for each update the factor of its loss."""
        updates = 1 + max(thinned.of_update)
        if self._mode in _OF_ROWS:
            return [len(thinned.kept) / updates / size] * updates
        if self._mode == "token-sum":
            return [1.0] * updates
        # verl counts the tokens of the column `loss_mask`.
        tokens = [int(mask.sum()) for mask in get_rows(names, partition_id, "loss_mask")]
        share, part = len(names) // ranks, size // ranks
        all_tokens, kept_tokens = [0] * updates, [0] * updates
        for i, count in enumerate(tokens):
            all_tokens[i % share // part] += count
        for i, update in zip(thinned.kept, thinned.of_update, strict=True):
            kept_tokens[update] += tokens[i]
        return [own / whole for own, whole in zip(kept_tokens, all_tokens, strict=True)]


def fewest_passes(counts: Sequence[int], most: int) -> int:
    """Return which number of rows can be divided into the fewest micro-batches; of several the smallest.

    Example: `fewest_passes(range(97, 161), 8) == 104`, in 13 micro-batches of 8; 97 rows would be 97 of 1.

    Args:
        counts: The numbers to choose from, in ascending order.
        most: The configured size of micro-batches; 0: verl divides by tokens.
    """
    return min(counts, key=lambda rows: rows // micro_of(rows, most)) if most else counts[0]


def micro_of(rows: int, most: int) -> int:
    """Return the largest size of micro-batches that divides a number of rows, and is not above the configured one."""
    return next(each for each in range(min(most, rows), 0, -1) if rows % each == 0)


def set_micro(part: Batch, most: int, rows: int) -> None:
    """Give a batch the largest size of micro-batches that divides its rows.

    Args:
        part: The batch; verl's workers take the size from it where it has one.
        most: The configured size; 0: verl divides by tokens.
        rows: Rows of an update on a rank.
    """
    if most:
        part.extra_info[_MICRO] = micro_of(rows, most)

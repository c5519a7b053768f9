"""`EngineLogProbs`: takes the engine's log-probs for the old ones of a batch, where a sample of its rows allows it.

A batch whose tokens all have the age 0 was sampled by the weights that are about to be trained. Its old log-probs then
are those that came with the tokens, up to the differences of engine and trainer. verl computes them again, a
forward pass over the whole batch. With `custom.multiturn.old_log_prob_bound` only a sample of the rows is computed:

    every token of age 0? ──no──────────────────────────▶ the pass over the whole batch, as verl's
      │ yes
    a sixteenth of the rows, drawn: verl's pass ──beyond──▶ the same
      │ all their tokens agree within the bound
    the other rows take the engine's

Invariants:
- a row has the old log-probs of one source: the trainer's pass, or the engine, to the bit;
- a step's error is reported, whatever its consequence.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.compat.row_store import Batch, get_columns, nested, put_columns
from verl_multiturn.verl_bridge.trainer.report import PREFIX
from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows
from verl_multiturn.verl_bridge.trainer.rows.token_ages import versions_of
from verl_multiturn.verl_bridge.trainer.rows.updates import data_parallel_size

logger = logging.getLogger(__name__)

Pass = Callable[[Any, dict[str, Any]], Any]

SHARE = 1 / 16
"""Share of a batch's rows that are computed, to compare them with the engine's."""
_OLD, _ENGINES = "old_log_probs", "rollout_log_probs"


class EngineLogProbs:
    """The old log-probs of a trainer's batches.

    Metrics of a step, under `rollout/old_log_prob/`:
    - `engine_share`: share of the rows, padding aside, that took the engine's;
    - `error_max`, `error_mean`: of the absolute differences between trainer and engine, in nats, over the tokens of the
      rows that were compared. They are there in steps in which rows were compared.

    Args:
        bound: The largest difference of a token's log-prob with which the engine's are taken, in nats; None: they never
            are.
        config: verl's whole configuration.
    """

    def __init__(self, bound: float | None, config: DictConfig) -> None:
        self._bound = bound
        self._config = config
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the step before."""
        self._errors = np.empty(0, np.float32)
        self._rows = self._taken = 0
        self.taken: frozenset[RowKey] = frozenset()
        """Rows of the last batch that have the engine's log-probs."""

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics."""
        if self._bound is None:
            return {}
        found = {"engine_share": self._taken / max(1, self._rows)}
        if self._errors.size:
            found |= {"error_max": float(self._errors.max()), "error_mean": float(self._errors.mean())}
        return {f"{PREFIX}old_log_prob/{name}": value for name, value in found.items()}

    def compute(
        self, batch: Batch, metrics: dict[str, Any], rows: BatchRows, step: int, update: int, verls: Pass, workers: Any
    ) -> Any:
        """Give a batch its old log-probs, and return it.

        Args:
            batch: verl's batch.
            metrics: Metrics of the step, which `verls` fills: from the computed rows alone.
            rows: Those of the batch.
            step: The training step.
            update: Number of the batch within the step; the weights of a later one have been trained meanwhile.
            verls: verl's method that computes old log-probs.
            workers: verl's worker group of the actor.
        """
        self.taken = frozenset()
        if self._bound is None:
            return verls(batch, metrics)
        self._rows += len(rows.real)
        multiple = _multiple(data_parallel_size(workers, "actor"), self._config)
        size = math.ceil(len(batch.keys) * SHARE / multiple) * multiple
        if update or size >= len(batch.keys) or (engines := _of_fresh(rows, step)) is None:
            return verls(batch, metrics)
        drawn = set(random.Random(f"{step} {update}").sample(range(len(batch.keys)), size))
        compared, others = (
            [key for i, key in enumerate(rows.keys) if (i in drawn) is wanted] for wanted in (True, False)
        )
        part = batch.select_keys([str(key) for key in compared])
        part.extra_info.update(batch.extra_info)
        verls(part, metrics)
        errors = _errors(compared, rows.partition_id)
        self._errors = np.concatenate([self._errors, errors])
        if errors.size and errors.max() <= self._bound:  # a NaN is beyond every bound
            put_columns(others, rows.partition_id, **{_OLD: nested([engines[key] for key in others])})
            self.taken = frozenset(others)
            self._taken += sum(key not in rows.padding for key in others)
            return batch
        logger.warning(
            "step %d: the engine's log-probs differ from the trainer's by up to %s nats in %d rows, and may by %g "
            "(old_log_prob_bound); all rows are computed",
            step,
            f"{errors.max():.3g}" if errors.size else "an unknown number of",
            len(compared),
            self._bound,
        )
        return verls(batch, metrics)


def _of_fresh(rows: BatchRows, step: int) -> dict[RowKey, torch.Tensor] | None:
    """Return the engine's log-probs of each row; None where the step's weights may not have sampled a trained token."""
    data = get_columns(rows.keys, rows.partition_id, ["response_mask", _ENGINES])
    if not rows.real or data.get(_ENGINES, None) is None:
        return None
    masks = dict(zip(rows.keys, data["response_mask"].unbind(), strict=True))
    versions = versions_of(rows, [masks[key] for key in rows.real])
    for key, own in zip(rows.real, versions, strict=True):
        if (own[masks[key].numpy() != 0] != step - 1).any():
            return None
    return dict(zip(rows.keys, data[_ENGINES].unbind(), strict=True))


def _errors(keys: list[RowKey], partition_id: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the absolute differences between trainer and engine, of all trained tokens of rows."""
    data = get_columns(keys, partition_id, ["response_mask", _OLD, _ENGINES])
    columns = [data[name].unbind() for name in ("response_mask", _OLD, _ENGINES)]
    found = [(old.float() - engines.float())[mask != 0].abs() for mask, old, engines in zip(*columns, strict=True)]
    return torch.cat(found).numpy()


def _multiple(ranks: int, config: DictConfig) -> int:
    """Return a number of which the number of rows of a pass has to be a multiple."""
    rollout = config.actor_rollout_ref.rollout
    is_dynamic = rollout.get("log_prob_use_dynamic_bsz")
    return ranks * (1 if is_dynamic else rollout.get("log_prob_micro_batch_size_per_gpu") or 1)

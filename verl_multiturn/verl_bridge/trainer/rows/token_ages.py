"""The ages of the tokens that a step trains: they are measured and, with `custom.multiturn.max_staleness`, bounded.

Invariants:
- before advantages are computed, the masks of tokens beyond the bound, and of tokens of an unknown version, are 0.
  Nothing else changes;
- this holds with every strategy. Other strategies than `mask` and `reroll` only leave such tokens in odd cases, such as
  a run that goes on with a smaller bound.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verl_multiturn.rollout.groups.staleness import StalenessBound, too_old
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.compat.row_store import get_columns, get_rows, nested, put_columns
from verl_multiturn.verl_bridge.trainer.report import ASYNC_PREFIX
from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows

VERSIONS = "rollout_versions"


class TokenAges:
    """The ages of the tokens in a trainer's batches.

    Metrics of a step: `age/mean` and `age/max` of the trained tokens, and `masked_share`, the share of tokens that were
    not trained because of their age. Tokens that rejection sampling takes out later count as trained.

    Args:
        bound: The bound of the ages; None: they are measured only.
    """

    def __init__(self, bound: StalenessBound | None) -> None:
        self._bound = bound
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the step before."""
        self._ages: list[NDArray[Any]] = []
        self._masked = self._tokens = 0

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics; without a trained token of a known version, none about ages."""
        found = {}
        ages = np.concatenate([np.empty(0, int), *self._ages])
        if ages.size:
            found = {f"{ASYNC_PREFIX}age/mean": float(ages.mean()), f"{ASYNC_PREFIX}age/max": float(ages.max())}
        if self._bound is not None:
            found[f"{ASYNC_PREFIX}masked_share"] = self._masked / max(1, self._tokens)
        return found

    def look(self, rows: BatchRows, step: int) -> None:
        """Measure the ages of a batch's tokens, and set the masks of tokens beyond the bound to 0.

        Args:
            rows: Those of verl's batch.
            step: The training step.
        """
        keys = rows.real
        if not keys:
            return
        masks = get_rows(keys, rows.partition_id, "response_mask")
        changed: dict[RowKey, torch.Tensor] = {}
        for key, mask, row in zip(keys, masks, versions_of(rows, masks), strict=True):
            trained = mask.numpy() != 0
            self._tokens += int(trained.sum())
            if self._bound is not None:
                old = trained & too_old(row, step, self._bound)
                if old.any():
                    self._masked += int(old.sum())
                    trained &= ~old
                    changed[key] = mask * torch.from_numpy(~old)
            self._ages.append((step - 1 - row[trained & (row >= 0)]).astype(int))
        if changed:
            column = nested(list(changed.values()))
            put_columns(list(changed), rows.partition_id, response_mask=column, loss_mask=column)


def versions_of(rows: BatchRows, masks: list[torch.Tensor]) -> list[NDArray[Any]]:
    """Return the version of each response token of each row that is not padding; `masks` are those of these rows.

    A row of another agent loop has no column of versions; all its tokens then have the oldest version that its tag
    names.
    """
    column = get_columns(rows.real, rows.partition_id, [VERSIONS]).get(VERSIONS, None)
    if column is not None:
        return [row.numpy() for row in column.unbind()]
    found = []
    for key, mask in zip(rows.real, masks, strict=True):  # one of them lacks the column
        own = get_columns([key], rows.partition_id, [VERSIONS]).get(VERSIONS, None)
        oldest = rows.tags[key].get("min_global_steps")
        found.append(np.full(len(mask), -1 if oldest is None else oldest) if own is None else own.unbind()[0].numpy())
    return found

"""Rows with void turns are kept out of the loss: `custom.multiturn.void_turn_pattern`.

Invariants:
- before advantages are computed, the mask of a row with a void turn is 0 throughout. Nothing else of that row changes,
  and no other row changes.
"""

from __future__ import annotations

from verl_multiturn.verl_bridge.compat.stored_rows import put_zeros
from verl_multiturn.verl_bridge.trainer.batch_rows import BatchRows


def mask_void_rows(rows: BatchRows) -> None:
    """Set the masks of a batch's rows with void turns to 0 (columns `response_mask` and `loss_mask`)."""
    void = [key for key, stats in rows.stats.items() if stats.get("void")]
    if void:
        put_zeros(void, rows.partition_id, ["response_mask", "loss_mask"])

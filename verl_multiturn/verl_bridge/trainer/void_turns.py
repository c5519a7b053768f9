"""The trainer mixin that keeps rows with void turns out of the loss: `custom.multiturn.void_turn_pattern`.

Invariants:
- before advantages are computed, the mask of a row with a void turn is 0 throughout. Nothing else of that row changes,
  and no other row changes.
"""

from __future__ import annotations

from typing import Any

import torch
import transfer_queue
from omegaconf import DictConfig
from tensordict import TensorDict

from verl_multiturn.verl_bridge.startup.configuration import settings_of
from verl_multiturn.verl_bridge.trainer.report import fetch_stats

_MASKS = ("response_mask", "loss_mask")


class VoidTurnsMixin:
    """Mixin for a trainer class of verl that masks rows with void turns.

    List it before verl's class and after `CertificateMixin`, which reads `filters_void_rows`.
    """

    filters_void_rows: bool

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.filters_void_rows = settings_of(config.actor_rollout_ref.rollout).void_turn_pattern is not None

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.filters_void_rows:
            mask_void_rows(batch)
        return super()._compute_advantage(batch, metrics)  # type: ignore[misc]


def mask_void_rows(batch: Any) -> None:
    """Set the masks of a batch's rows with void turns to 0, in TransferQueue (`response_mask` and `loss_mask`)."""
    void = [key for key, stats in fetch_stats(batch).items() if stats.get("void")]
    if not void:
        return
    where = batch.partition_id
    data = transfer_queue.kv_batch_get(keys=void, partition_id=where, select_fields=["response_mask"])
    rows = [torch.zeros_like(mask) for mask in data.get("response_mask").unbind()]
    zeros = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    fields = TensorDict(dict.fromkeys(_MASKS, zeros), batch_size=len(void))
    transfer_queue.kv_batch_put(keys=void, partition_id=where, fields=fields)

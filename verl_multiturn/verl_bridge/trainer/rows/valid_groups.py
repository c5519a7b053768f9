"""Advantages, with invalid conversations excluded from their group.

Estimators that count conversations (`advantages.py`) leave invalid conversations out themselves. For verl's this holds:
- the advantages of a group are those that verl's estimator computes from its valid conversations alone. An invalid
  conversation has the advantage 0. A single valid conversation has 0 as well, since there is nothing to compare it with
  (verl would give it its raw score);
- with `rollout.n=1` groups of one are intended, and keep their advantages. verl's padding rows, and estimators that
  compare nothing within a group, are not changed either;
- a batch without a trained token gets advantages of 0. verl cannot compute any for it, and would end the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from verl.protocol import DataProto
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.workers.utils.padding import response_to_nested

from verl_multiturn.advantages.estimators import Estimator
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.compat.row_store import Keys, get_columns, put_columns, put_zeros, trained_rows
from verl_multiturn.verl_bridge.settings import estimator_of
from verl_multiturn.verl_bridge.trainer.rows.advantages import known_rows
from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows

Compute = Callable[[Any, dict[str, Any]], Any]

# verl's estimators that judge each row alone, or by all trained tokens of a batch. Invalid rows have no trained token.
_OF_A_ROW = {"gae", "reinforce_plus_plus", "remax"}
# verl's estimators that compare the rows of a group. An estimator that a user registers may be of either kind.
_OF_A_GROUP = {
    "grpo", "grpo_vectorized", "grpo_passk", "gdpo", "gpg", "opo", "reinforce_plus_plus_baseline", "rloo",
    "rloo_vectorized",
}  # fmt: skip


def compute_advantages(
    batch: Any,
    rows: BatchRows,
    metrics: dict[str, Any],
    verls: Compute,
    config: DictConfig,
    estimator: Estimator | None,
) -> Any:
    """Compute the advantages of a batch whose masks and scores are final, and return the batch.

    Args:
        batch: verl's batch.
        rows: Its rows.
        metrics: Metrics of the step, which `verls` fills.
        verls: verl's method that computes advantages.
        config: verl's whole configuration.
        estimator: The run's estimator if it counts conversations; None: one of verl's.
    """
    if not any(trained_rows(rows.keys, rows.partition_id)):
        _put_zeros(rows.keys, rows.partition_id)
        return batch
    if estimator is not None:
        with known_rows(rows, estimator):
            return verls(batch, metrics)
    batch = verls(batch, metrics)
    leave_out_invalid(rows, config)
    return batch


def leave_out_invalid(rows: BatchRows, config: DictConfig) -> None:
    """Compute the advantages of a batch in TransferQueue again, without its invalid rows; without any, do nothing.

    Args:
        rows: Those of verl's batch, whose columns `advantages` and `returns` verl has computed.
        config: verl's whole configuration.
    """
    estimator = estimator_of(config)
    if estimator in _OF_A_ROW:
        return
    left_out = {key for key, stats in rows.stats.items() if not stats["valid"]}
    if estimator in _OF_A_GROUP and config.actor_rollout_ref.rollout.n > 1:
        left_out |= _single(rows, left_out)
    if not left_out:
        return
    _put_zeros([key for key in rows.keys if key in left_out], rows.partition_id)
    if kept := [key for key in rows.keys if key not in left_out]:
        _put_advantages(kept, rows.partition_id, estimator, config)


def _single(rows: BatchRows, left_out: set[RowKey]) -> set[RowKey]:
    """Return the keys of rows whose conversation is the only valid one of its group."""
    single: set[RowKey] = set()
    for group in rows.groups.values():
        valid = [own for keys in group.values() if (own := [key for key in keys if key not in left_out])]
        if len(valid) == 1:
            single.update(valid[0])
    return single


def _put_advantages(keys: Sequence[RowKey], partition_id: str, estimator: str, config: DictConfig) -> None:
    """Compute and write the advantages of these rows, as verl does for a whole batch."""
    # `response_mask` already has rejection sampling in it; `token_level_rewards` exists only with a KL penalty.
    fields = ["uid", "response_mask", "rm_scores"]
    if config.algorithm.use_kl_in_reward:
        fields.append("token_level_rewards")
    fetched = get_columns(keys, partition_id, fields)
    mask = fetched["response_mask"]
    if sum(int(row.sum()) for row in mask.unbind()) < 2:  # some estimators divide by the number of tokens minus one
        _put_zeros(keys, partition_id)
        return
    data = DataProto(batch=fetched.to_padded_tensor())
    data.non_tensor_batch["uid"] = np.array(data.batch.pop("uid").tolist(), dtype=object)
    if "token_level_rewards" not in data.batch:
        data.batch["token_level_rewards"] = data.batch["rm_scores"]
    data = compute_advantage_for_multi_trajectories(
        data,
        batch_keys=[str(key) for key in keys],
        adv_estimator=estimator,
        gamma=config.algorithm.gamma,
        lam=config.algorithm.lam,
        num_repeat=config.actor_rollout_ref.rollout.n,
        norm_adv_by_std_in_grpo=config.algorithm.get("norm_adv_by_std_in_grpo", True),
        config=config.algorithm,
    )
    columns = {name: response_to_nested(data.batch[name], mask) for name in ("advantages", "returns")}
    put_columns(keys, partition_id, **columns)


def _put_zeros(keys: Keys, partition_id: str) -> None:
    put_zeros(keys, partition_id, ["advantages", "returns"], torch.float32)

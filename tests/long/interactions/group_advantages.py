"""Advantages of the rows of conversations, as our trainers compute them, without workers or a TransferQueue server."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_multiturn.config import MultiTurnSettings
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.compat import row_store
from verl_multiturn.verl_bridge.trainer import trainers
from verl_multiturn.verl_bridge.trainer.rows.advantages import load_run_estimator
from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows
from verl_multiturn.verl_bridge.trainer.rows.valid_groups import compute_advantages

assert trainers  # importing it registers our estimators
_NESTED = ("response_mask", "rm_scores", "rollout_log_probs")


class _Store:
    """TransferQueue within this process."""

    def __init__(self, rows: Mapping[str, dict[str, Any]]) -> None:
        self.rows = rows

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        rows = [self.rows[key] for key in keys]
        names = [name for name in select_fields if all(name in row for row in rows)]
        data = list_of_dict_to_tensordict([{name: row[name] for name in names} for row in rows])
        for name in _NESTED:
            if name in data and not data[name].is_nested:  # all rows are equally long
                data[name] = torch.nested.as_nested_tensor(list(data[name].unbind()), layout=torch.jagged)
        return data

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: Any) -> Any:
        for name in fields.keys():  # noqa: SIM118  # iterating a TensorDict yields its rows
            for key, value in zip(keys, fields[name].unbind(), strict=True):
                self.rows[key][name] = value
        return self.batch()

    def batch(self) -> Any:
        return KVBatchMeta(keys=list(self.rows), tags=[{} for _ in self.rows], partition_id="train")


def advantages_of(outputs: Mapping[str, Any], estimator: str, group: int = 8) -> dict[str, list[float]]:
    """Return the advantage of each response token of each row, by the row's name.

    Args:
        outputs: Outputs of our agent loop by the names of their rows, `UID_SESSION_INDEX`.
        estimator: Name of an estimator of verl's or ours.
        group: Conversations of a group.
    """
    if not outputs:
        return {}
    rows = {}
    for key, output in outputs.items():
        fields = output.as_dict()
        if "rm_scores" not in fields:
            raise ValueError(f"row {key!r} has no score; set interaction_reward.mode to replace")
        rows[key] = fields | {"uid": RowKey.parse(key).uid}
    store = _Store(rows)
    algorithm = {"adv_estimator": estimator, "gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False}
    config: Any = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": group}}})
    trainer = SimpleNamespace(config=config)

    def verls(given: Any, metrics: dict[str, Any]) -> Any:
        return trainer_base.PPOTrainer._compute_advantage(trainer, given, metrics)

    given = store.batch()
    with mock.patch.object(row_store, "transfer_queue", store), mock.patch.object(trainer_base, "tq", store):
        loaded = load_run_estimator(config, MultiTurnSettings())
        compute_advantages(given, BatchRows(given), {}, verls, config, loaded)
    return {key: [float(value) for value in row["advantages"]] for key, row in rows.items()}

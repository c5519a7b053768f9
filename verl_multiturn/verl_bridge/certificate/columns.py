"""The columns of a batch's rows as the certificate and the records read them: out of TransferQueue, as numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.compat.row_store import get_columns
from verl_multiturn.verl_bridge.names import STATS

VERSIONS, RECEIPTS = "rollout_versions", "rollout_receipts"
"""Columns that `certified_output.CertifiedOutput` adds."""
_OURS = [VERSIONS, RECEIPTS]
TEACHER = ("teacher_ids", "teacher_logprobs")
"""verl's columns of a teacher's answer."""
# Columns of verl's. Each row of our agent loop has them once `_compute_advantage` has ended.
_FIELDS = ["uid", "prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask",
           "rollout_log_probs", "old_log_probs", "advantages"]  # fmt: skip


def fetch(keys: Sequence[RowKey], partition_id: str, loss_inputs: Sequence[str]) -> list[dict[str, Any]]:
    """Return the batch columns of each row, tensors as numpy arrays; a column that a row lacks is omitted.

    Args:
        keys: Names of the rows in TransferQueue.
        partition_id: TransferQueue's partition.
        loss_inputs: Further columns that the loss takes.
    """
    names = list(dict.fromkeys([*_FIELDS, *loss_inputs, *_OURS]))
    rows = fetch_some(keys, partition_id, names)
    if not missing(rows[0]):
        return rows
    # TransferQueue leaves a column out when one of the rows lacks it, as rows of other agent loops do.
    for row, marked in zip(rows, fetch_some(keys, partition_id, ["uid", "metrics"]), strict=True):
        row.update(marked)
    ours = [i for i, row in enumerate(rows) if is_ours(row)]
    if not ours:
        return rows
    fetched = fetch_some([keys[i] for i in ours], partition_id, names)
    if missing(fetched[0]):  # fetch one by one, to see which rows lack it
        fetched = [fetch_some([keys[i]], partition_id, names)[0] for i in ours]
    for i, columns in zip(ours, fetched, strict=True):
        rows[i].update(columns)
    return rows


def missing(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the columns that each row of ours has, and this one lacks."""
    return [name for name in (*_FIELDS, *_OURS) if name not in row]


def is_ours(row: Mapping[str, Any]) -> bool:
    """Return whether our agent loop made a row: one of our columns is enough, since the others may have been lost."""
    return VERSIONS in row or RECEIPTS in row or STATS in (row.get("metrics") or {})


def fetch_some(keys: Sequence[RowKey], partition_id: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return columns of each row, tensors as numpy arrays; one that any of the rows lacks is omitted for all."""
    data = get_columns(keys, partition_id, names)
    columns: dict[str, list[Any]] = {}
    for name in data.keys():  # noqa: SIM118  # iterating a TensorDict yields its rows
        column = data.get(name)
        columns[name] = _arrays(column) if isinstance(column, torch.Tensor) else column.tolist()
    return [{name: values[i] for name, values in columns.items()} for i in range(len(keys))]


def _arrays(column: Any) -> list[Any]:
    """Return the rows of a tensor as numpy arrays; rows of different lengths come as a nested tensor."""
    if column.dtype == torch.bfloat16:  # numpy has no such type
        column = column.float()
    if column.is_nested and column.dim() == 2:  # takes a quarter of the time of `unbind`
        return np.split(column.values().numpy(), column.offsets().numpy()[1:-1])
    return [row.numpy() for row in column.unbind()]

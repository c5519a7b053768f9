"""The rows of a batch in TransferQueue, where verl's trainers keep them.

A row is named by a key such as `UID_SESSION_INDEX`. A column holds one value for each row. Only this module talks to
TransferQueue.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import transfer_queue
from tensordict import TensorDict

from verl_multiturn.certificate.conversations import conversation_of
from verl_multiturn.observe.metrics import Stats
from verl_multiturn.verl_bridge.loops.certified_output import STATS

TRAIN = "train"
"""TransferQueue's partition of the training data."""


def get_columns(keys: Sequence[str], partition_id: str, names: Sequence[str]) -> TensorDict:
    """Return columns of rows.

    TransferQueue leaves out a column that one of the rows lacks.

    Args:
        keys: The names of the rows.
        partition_id: TransferQueue's partition.
        names: The names of the columns.
    """
    data: TensorDict = transfer_queue.kv_batch_get(
        keys=list(keys), partition_id=partition_id, select_fields=list(names)
    )
    return data


def put_columns(keys: Sequence[str], partition_id: str, **columns: torch.Tensor) -> None:
    """Write columns of rows, given by name as nested tensors with a row for each key."""
    fields = TensorDict(columns, batch_size=len(keys))
    transfer_queue.kv_batch_put(keys=list(keys), partition_id=partition_id, fields=fields)


def get_rows(keys: Sequence[str], partition_id: str, name: str) -> list[torch.Tensor]:
    """Return a column that every one of the rows has, as a tensor for each row."""
    return list(get_columns(keys, partition_id, [name])[name].unbind())


def put_zeros(keys: Sequence[str], partition_id: str, names: Sequence[str], dtype: torch.dtype | None = None) -> None:
    """Write zeros into columns, as many in a row as it has response tokens.

    Args:
        keys: The names of the rows.
        partition_id: TransferQueue's partition.
        names: The names of the columns.
        dtype: The type of the zeros; that of `response_mask` by default.
    """
    masks = get_rows(keys, partition_id, "response_mask")
    zeros = nested([torch.zeros_like(mask, dtype=dtype) for mask in masks])
    put_columns(keys, partition_id, **dict.fromkeys(names, zeros))


def list_prompts(partition_id: str) -> dict[str, dict[str, Any]]:
    """Return the tags of a partition's prompts, by uid; each prompt stands for a group of conversations."""
    listed = transfer_queue.kv_list(partition_id) or {}
    return {key: tag for key, tag in listed.get(partition_id, {}).items() if tag.get("is_prompt", False)}


def get_prompts(uids: Sequence[str], partition_id: str) -> TensorDict:
    """Return the data rows of prompts, as verl's asynchronous trainers keep them for a restart."""
    data: TensorDict = transfer_queue.kv_batch_get(keys=list(uids), partition_id=partition_id)
    return data


def put_tags(keys: Sequence[str], partition_id: str, tags: Sequence[dict[str, Any]]) -> None:
    """Write a tag for each key; what a tag had before stays, unless it is named again."""
    transfer_queue.kv_batch_put(keys=list(keys), partition_id=partition_id, tags=list(tags))


def clear_groups(uids: Collection[str], partition_id: str, *, prompts: bool = True) -> int:
    """Remove all rows of groups, and their prompts, too, unless `prompts` is False; return how many there were."""
    listed = (transfer_queue.kv_list(partition_id) or {}).get(partition_id, {})
    keys = [key for key in listed if key.split("_")[0] in uids and (prompts or "_" in key)]
    if keys:
        transfer_queue.kv_clear(keys=keys, partition_id=partition_id)
    return len(keys)


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    """Return rows of different lengths as one nested tensor, the form of a column."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def fetch_stats(batch: Any) -> dict[str, Stats]:
    """Return the stats that our agent loop left with the rows of a batch, by row key.

    A row of an invalid conversation is invalid, too, whatever it says itself.
    Padding rows and rows of other agent loops have no entry.
    """
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    found = _fetch_metrics(keys, batch.partition_id) if keys else []
    if found is None:  # one of the rows lacks the column, as rows of no agent loop may
        found = [(_fetch_metrics([key], batch.partition_id) or [{}])[0] for key in keys]
    stats = {key: metrics[STATS] for key, metrics in zip(keys, found, strict=True) if STATS in metrics}
    broken = {conversation_of(key) for key, each in stats.items() if not each["valid"]}
    return {key: {**each, "valid": conversation_of(key) not in broken} for key, each in stats.items()}


def _fetch_metrics(keys: list[str], partition_id: str) -> list[dict[str, Any]] | None:
    column = get_columns(keys, partition_id, ["metrics"]).get("metrics", None)
    return None if column is None else list(column.tolist())


def trained_rows(batch: Any) -> list[bool]:
    """Return for each row of a batch whether it has a trained token."""
    return [bool(mask.any()) for mask in get_rows(batch.keys, batch.partition_id, "response_mask")]

"""The rows of a batch in TransferQueue, where verl's trainers keep them.

A column holds one value for each row. Only this module talks to TransferQueue, which names rows by texts, and `Batch`
is all that our hooks read of verl's batch objects. So another queue would be another file here.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import transfer_queue
from tensordict import NonTensorStack, TensorDict

from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.names import STATS

if TYPE_CHECKING:  # it imports the code that builds rows; the processes of the certificate do without
    from verl_multiturn.observe.metrics import Stats

TRAIN = "train"
"""TransferQueue's partition of the training data."""
VALIDATION = "val"
"""TransferQueue's partition of a validation's data."""

Keys = Sequence[RowKey] | Sequence[str]
"""Names of rows, taken apart or as verl has them."""


class Batch(Protocol):
    """The fields that we read of a batch of verl's trainers, a `KVBatchMeta` of TransferQueue, which names rows."""

    keys: list[str]
    """Names of the rows."""
    tags: list[dict[str, Any]]
    """verl's tag of each row."""
    partition_id: str
    """TransferQueue's partition, where the columns are."""
    extra_info: dict[str, Any]
    """Values of the whole batch, such as the temperature."""

    def select_keys(self, keys_to_select: list[str]) -> Batch:
        """Return a batch of some of the rows."""


@dataclass(frozen=True)
class NewRow:
    """A row that is to be written.

    Attributes:
        key: Its name.
        tag: verl's tag of it, which lists show without its columns.
        columns: Value of each column: a tensor, or any object that can be pickled.
    """

    key: str
    tag: dict[str, Any]
    columns: dict[str, Any]

    def form(self) -> Hashable:
        """Return the form that rows of one put must share: the columns, and of each tensor its type and dimensions.

        A nested tensor, as which lists of tensors are put, may differ in one dimension. It is the longest one here,
        which counts tokens.
        """
        return tuple((name, _form(self.columns[name])) for name in sorted(self.columns))

    def size(self) -> int:
        """Return the bytes of its tensors, also of those in a column of dictionaries, as images are."""
        values = list(self.columns.values())
        values += [each for value in values if isinstance(value, dict) for each in value.values()]
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def _form(value: Any) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return None
    sizes = list(value.shape)
    longest = sizes.index(max(sizes)) if sizes else None
    return value.dtype, longest, *(size for place, size in enumerate(sizes) if place != longest)


async def put_rows(rows: Sequence[NewRow], partition_id: str) -> None:
    """Write rows of one form (`NewRow.form`) in one put, each in the place of one that has its name.

    Args:
        rows: The rows.
        partition_id: TransferQueue's partition.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
        columns = {name: _column([row.columns[name] for row in rows]) for name in rows[0].columns}
    await transfer_queue.async_kv_batch_put(
        keys=[row.key for row in rows],
        partition_id=partition_id,
        fields=TensorDict(columns, batch_size=len(rows)),
        tags=[row.tag for row in rows],
    )


def _column(values: list[Any]) -> Any:
    """Return a column of new rows. The tensors of several rows are nested, also where their lengths are equal.

    TransferQueue keeps each row's part by itself then. Of a stacked tensor every row would keep the whole, and a
    checkpoint would write it once for each row. The layout with strides takes a twentieth of the time that the jagged
    one does; TransferQueue only takes it apart.
    """
    if not all(isinstance(value, torch.Tensor) for value in values):
        return NonTensorStack(*values)
    if len(values) == 1 or not values[0].dim():
        return torch.stack(values)
    return torch.nested.as_nested_tensor(values, layout=torch.strided)


def get_columns(keys: Keys, partition_id: str, names: Sequence[str]) -> TensorDict:
    """Return columns of rows.

    TransferQueue leaves out a column that one of the rows lacks.

    Args:
        keys: The names of the rows.
        partition_id: TransferQueue's partition.
        names: The names of the columns.
    """
    data: TensorDict = transfer_queue.kv_batch_get(
        keys=[str(key) for key in keys], partition_id=partition_id, select_fields=list(names)
    )
    return data


def put_columns(keys: Keys, partition_id: str, **columns: torch.Tensor) -> None:
    """Write columns of rows, given by name as nested tensors with a row for each key."""
    fields = TensorDict(columns, batch_size=len(keys))
    transfer_queue.kv_batch_put(keys=[str(key) for key in keys], partition_id=partition_id, fields=fields)


def get_rows(keys: Keys, partition_id: str, name: str) -> list[torch.Tensor]:
    """Return a column that every one of the rows has, as a tensor for each row."""
    return list(get_columns(keys, partition_id, [name])[name].unbind())


def put_zeros(keys: Keys, partition_id: str, names: Sequence[str], dtype: torch.dtype | None = None) -> None:
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
    """Return the tags of a partition's prompts, by uid; each prompt has a group of conversations."""
    listed = transfer_queue.kv_list(partition_id) or {}
    return {key: tag for key, tag in listed.get(partition_id, {}).items() if tag.get("is_prompt", False)}


def get_prompts(uids: Sequence[str], partition_id: str) -> TensorDict:
    """Return the data rows of prompts, as verl's asynchronous trainers keep them for a restart."""
    data: TensorDict = transfer_queue.kv_batch_get(keys=list(uids), partition_id=partition_id)
    return data


def put_tags(keys: Sequence[str], partition_id: str, tags: Sequence[dict[str, Any]]) -> None:
    """Write a tag for each key; its earlier fields stay, unless they are named again."""
    transfer_queue.kv_batch_put(keys=list(keys), partition_id=partition_id, tags=list(tags))


def clear_groups(uids: Collection[str], partition_id: str, *, prompts: bool = True) -> int:
    """Remove all rows of groups, and their prompts, too, unless `prompts` is False; return how many there were."""
    listed = (transfer_queue.kv_list(partition_id) or {}).get(partition_id, {})
    parsed = {name: RowKey.parse(name) for name in listed}
    names = [name for name, key in parsed.items() if key.uid in uids and (prompts or key.session)]
    if names:
        transfer_queue.kv_clear(keys=names, partition_id=partition_id)
    return len(names)


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    """Return rows of different lengths as one nested tensor, the form of a column."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def fetch_stats(keys: Sequence[RowKey], partition_id: str) -> dict[RowKey, Stats | None]:
    """Return the stats that our agent loop stored with each of these rows; None for rows of other loops."""
    found = _fetch_metrics(keys, partition_id)
    if found is None:  # one of the rows lacks the column, as rows of no agent loop may
        found = [(_fetch_metrics([key], partition_id) or [{}])[0] for key in keys]
    return {key: metrics.get(STATS) for key, metrics in zip(keys, found, strict=True)}


def _fetch_metrics(keys: Sequence[RowKey], partition_id: str) -> list[dict[str, Any]] | None:
    column = get_columns(keys, partition_id, ["metrics"]).get("metrics", None)
    return None if column is None else list(column.tolist())


def trained_rows(keys: Keys, partition_id: str) -> list[bool]:
    """Return for each row whether it has a trained token."""
    return [bool(mask.any()) for mask in get_rows(keys, partition_id, "response_mask")]

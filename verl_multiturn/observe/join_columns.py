"""`JoinTable`: the trainer's side of a run, by request id and row, with its columns of tokens as arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_FLOATS = ("advantages", "old_log_probs", "entropy", "untrained_tokens")


class JoinTable:
    """The rows of a join.

    Args:
        table: The table of `Records.joined`. Of a row that occurs twice, the last counts.
    """

    def __init__(self, table: Any) -> None:
        table = table.combine_chunks()
        names = set(table.column_names)
        plain = [
            name
            for name in ("request_id", "row", "role", "uid", "validation", "step", "trained", "untrained")
            if name in names
        ]
        self._plain = {name: table.column(name).to_pylist() for name in plain}
        self._lists = {name: _lists(table.column(name)) for name in _FLOATS if name in names}
        named = zip(self._plain.get("request_id", ()), self._plain.get("row", ()), strict=True)
        self._at = {key: at for at, key in enumerate(named)}

    def __len__(self) -> int:
        return len(self._at)

    @property
    def trained_groups(self) -> int:
        """Return the number of groups of the training, whether they have records or not."""
        named = zip(self._plain.get("uid", ()), self._plain.get("validation", ()), strict=True)
        return len({uid for uid, validation in named if not validation})

    def find(self, request_id: str, row: int) -> int | None:
        """Return the position of a row; None: it is not there."""
        return self._at.get((request_id, row))

    def step(self, at: int, default: int) -> int:
        """Return the step that trained a row."""
        step = self._plain["step"][at]
        return default if step is None else int(step)

    def number(self, column: str, at: int) -> float | None:
        """Return a finite number; None where there is none."""
        value = self._plain[column][at] if column in self._plain else None
        return None if value is None or not math.isfinite(value) else float(value)

    def text(self, column: str, at: int) -> str | None:
        """Return a text."""
        return self._plain[column][at] if column in self._plain else None

    def floats(self, column: str, at: int) -> Any:
        """Return a row's values of its tokens as an array; None where the trainer has none."""
        if column not in self._lists:
            return None
        offsets, valid, values = self._lists[column]
        return values[offsets[at] : offsets[at + 1]] if valid[at] else None


def _lists(column: Any) -> tuple[Any, Any, Any]:
    """Return offsets, which rows are not null, and all values of a column of lists."""
    if column.num_chunks == 0:
        return np.zeros(1, int), np.zeros(0, bool), np.zeros(0)
    chunk = column.chunk(0)
    values = chunk.values.to_numpy(zero_copy_only=False)
    values = values.astype(np.int64 if values.dtype.kind == "i" else np.float64)
    return chunk.offsets.to_numpy(), np.asarray(chunk.is_valid()), values

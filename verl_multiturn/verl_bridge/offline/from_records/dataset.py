"""`RecordedRows`: verl's `data.custom_cls` for SFT, whose rows are those of recorded conversations.

Ids and masks are the record's. Nothing is rendered or encoded again, so that a token is learned exactly when the engine
sampled it; verl's own data set renders each message anew, and also learns the line break after the end of a turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from verl_multiturn.errors import ConfigError
from verl_multiturn.records.read.learning import RecordLoader
from verl_multiturn.records.rows import columns
from verl_multiturn.rows.files import read_rows


class RecordedRows(Dataset[dict[str, torch.Tensor]]):
    """The rows of recorded conversations, in the form of verl's SFT trainer.

    Args:
        parquet_files: Files of `recipes/from_records/prepare_data.py`: a row names a record and a row of it.
        tokenizer: Not used; the ids are recorded.
        config: The section `data`.
        processor: Not used.
        max_samples: The most rows, the first ones; -1: all.

    Raises:
        ConfigError: A file cannot be read, or rows would have to be padded.
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: Any = None,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        settings = config or {}
        if (mode := settings.get("pad_mode", "no_padding")) != "no_padding":
            raise ConfigError(f"data.pad_mode={mode!r}: recorded rows are not padded; set it to no_padding")
        files = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        rows = [row for file in files for row in read_rows(Path(file), [".parquet"])]
        self._rows = rows if max_samples < 0 else rows[:max_samples]
        self._max_length = settings.get("max_length")
        self._shelf = RecordLoader()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        """Return `input_ids`, `position_ids` and `loss_mask` of a row, each int64 `(tokens,)`.

        Raises:
            ConfigError: The record is not there any more, or the row is too long.
            CertificateError: The record differs from the engine's output.
        """
        row = self._rows[item]
        held = columns(self._shelf.take(row)["rows"][row["index"]])
        ids = torch.tensor(held["ids"])
        if self._max_length is not None and len(ids) > self._max_length:
            raise ConfigError(
                f"row {row['index']} of request {row['request_id']!r} has {len(ids)} tokens, and data.max_length is "
                f"{self._max_length}; raise it, for a row is not cut"
            )
        return {
            "input_ids": ids,
            "position_ids": torch.arange(len(ids)),
            "loss_mask": torch.tensor(held["mask"]),
        }

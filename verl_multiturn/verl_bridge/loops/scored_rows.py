"""`scored_rows`: what verl's agent-loop worker sends to a reward worker, made where there is no worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from verl import DataProto

from verl_multiturn.verl_bridge.loops.certified_output import CertifiedOutput


def scored_rows(columns: Mapping[str, Any], outputs: Sequence[CertifiedOutput]) -> DataProto:
    """Return the rows of a conversation as verl's reward manager gets them (`run_single`).

    Args:
        columns: Fields of its data row; each row has them.
        outputs: Its rows, in order. The last one is scored.
    """
    prompts = [torch.tensor(output.prompt_ids, dtype=torch.int64) for output in outputs]
    responses = [torch.tensor(output.response_ids, dtype=torch.int64) for output in outputs]
    input_ids = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    held = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": input_ids,
        "attention_mask": [torch.ones_like(ids) for ids in input_ids],
    }
    batch = {name: pad_sequence(column, batch_first=True, padding_value=0) for name, column in held.items()}
    told: dict[str, list[Any]] = {name: [value] * len(outputs) for name, value in columns.items()}
    told["__num_turns__"] = [output.num_turns for output in outputs]
    told["tool_extra_fields"] = [output.extra_fields for output in outputs]
    told["prompt_len"] = [len(output.prompt_ids) for output in outputs]
    told["response_len"] = [len(output.response_ids) for output in outputs]
    return DataProto(
        batch=TensorDict(batch, batch_size=len(outputs)),
        non_tensor_batch={name: _objects(values) for name, values in told.items()},
    )


def _objects(values: Sequence[Any]) -> Any:
    """Return values as an array of objects; numpy would make arrays of lists."""
    column = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        column[place] = value
    return column

"""Data rows that know their position, so that the trainer can draw one again: `custom.multiturn.filter=difficulty`.

The start-up check makes `NumberedRows` the run's `data.custom_cls`. The position is taken out of a prompt before it is
submitted, so that no agent loop gets it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.tensordict_utils import get_tensordict

from verl_multiturn.rollout.difficulty import Pools

POSITION = "__position__"
"""Column of a row's position in the data set."""


class NumberedRows(RLHFDataset):
    """verl's data set, whose rows have their position as a further column, where the trainer asks for it."""

    is_numbered = False
    """Whether the trainer asks. It does so for its training rows; those of validation may come from the same file."""

    def __getitem__(self, item: int) -> dict[str, Any]:
        """Return a row."""
        row: dict[str, Any] = super().__getitem__(item)
        return {**row, POSITION: int(item)} if self.is_numbered else row


def draw_prompt(pools: Pools, fetch: Callable[[], Any], rows: Any) -> Any:
    """Return a batch of one prompt: a row that is drawn again, or the data loader's next that is not passed over.

    Args:
        pools: The pools of the run, which note the draw.
        fetch: Returns the data loader's next prompt, as verl does.
        rows: The data set.
    """
    again = pools.again()
    if again is not None:
        columns = collate_fn([rows[again]])
        columns["uid"] = np.array([str(uuid.uuid4())], dtype=object)
        prompt, position = get_tensordict(columns), again
        del prompt[POSITION]
    else:
        for _ in range(max(1, len(rows))):
            prompt = fetch()
            position = int(only_value(prompt.pop(POSITION)))
            if not pools.passes_over(position):
                break
    pools.draw(str(only_value(prompt["uid"])), position)
    return prompt


def only_value(column: Any) -> Any:
    """Return the value of a column of a batch of one prompt."""
    (value,) = column.tolist() if hasattr(column, "tolist") else column
    return value

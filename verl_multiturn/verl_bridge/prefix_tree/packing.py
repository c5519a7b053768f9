"""Divide rows into micro-batches that count each common prefix once.

Rows with a common prefix are neighbours in the order of `sort_rows`, so a micro-batch is a stretch of that order, and
rows of a group and of a conversation come together without being named.
"""

from __future__ import annotations

import numpy as np

from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.prefix_tree.forest import Ints, SortedRows


def count(rows: SortedRows, most: int) -> int:
    """Return the smallest number of micro-batches of at most `most` tokens each.

    Raises:
        ConfigError: A row alone has more.
    """
    longest = int(rows.lengths.max(initial=0))
    if longest > most:
        raise ConfigError(
            f"a row has {longest} tokens, and a micro-batch may have {most}; raise "
            "actor.ppo_max_token_len_per_gpu (and rollout.log_prob_max_token_len_per_gpu), or shorten the rows"
        )
    return len(_cuts(rows, most))


def divide(rows: SortedRows, parts: int) -> list[list[int]]:
    """Divide rows into micro-batches whose largest is as small as can be in the rows' order.

    Args:
        rows: The sorted rows.
        parts: Number of micro-batches, not more than there are rows.

    Returns:
        For each micro-batch the indices of its rows.
    """
    low, high = int(rows.lengths.max(initial=0)), int(rows.lengths.sum())
    while low < high:
        middle = (low + high) // 2
        if len(_cuts(rows, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    cuts = _cuts(rows, low)
    # Fewer would do here, but all ranks compute equally many. A row that shares least costs least when it is cut off.
    spare = sorted(set(range(len(rows.order))) - set(cuts), key=lambda at: (int(rows.shared[at]), at))
    cuts = sorted([*cuts, *spare[: parts - len(cuts)]])
    return [part.tolist() for part in np.split(rows.order, cuts[1:])]


def largest(lengths: Ints, size: int) -> int:
    """Return the number of tokens of the largest micro-batch of `size` rows that verl would make."""
    return max(int(lengths[start : start + size].sum()) for start in range(0, len(lengths), size))


def _cuts(rows: SortedRows, most: int) -> list[int]:
    """Return where micro-batches begin that are filled one after the other."""
    cuts: list[int] = []
    filled = 0
    for at, (length, shared) in enumerate(zip(rows.lengths.tolist(), rows.shared.tolist(), strict=True)):
        filled += length - shared
        if filled > most or not cuts:
            cuts.append(at)
            filled = length
    return cuts

"""Which rows of a batch each data-parallel rank gets: those of a group together, so that they share their prompt.

verl gives rank `i` the `i`-th equal part of the batch, and balances these parts row by row. With prefix trees
(`verl_bridge/prefix_tree/`) a prompt is computed once on each rank that has a row of its group.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def deal(groups: Sequence[Hashable], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the rows of each rank: equally many, with whole groups where they fit, and about equally many tokens.

    Example: with two groups of two rows and two ranks, `deal("abab", [9, 1, 9, 1], 2) == [[0, 2], [1, 3]]`.

    Args:
        groups: For each row its group.
        lengths: For each row its number of tokens.
        ranks: Number of ranks, which divides the number of rows.

    Returns:
        For each rank the indices of its rows, in the batch's order.
    """
    rows_of: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        rows_of.setdefault(group, []).append(row)
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    share, tokens = len(groups) // ranks, [0] * ranks

    def give(rows: list[int]) -> bool:
        free = [rank for rank in range(ranks) if len(dealt[rank]) + len(rows) <= share]
        if not free:
            return False
        rank = min(free, key=lambda each: tokens[each])
        dealt[rank] += rows
        tokens[rank] += sum(lengths[row] for row in rows)
        return True

    # The longest first, so that the short ones even out what is left.
    longest = sorted(rows_of.values(), key=lambda rows: -sum(lengths[row] for row in rows))
    for rows in [rows for rows in longest if not give(rows)]:
        for row in rows:  # no rank has room for the whole group
            give([row])
    return [sorted(rows) for rows in dealt]

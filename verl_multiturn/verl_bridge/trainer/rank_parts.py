"""Which rows of a batch each data-parallel rank gets: those of a group together, so that they share their prompt.

verl gives rank `i` the `i`-th equal part of the batch, and balances these parts row by row. With prefix trees
(`verl_bridge/prefix_tree/`) a prompt is computed once on each rank that has a row of its group.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Sequence

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.names import ENGINE_CHOICE, ENGINE_VENDOR, STRICT_ENGINE_VENDOR, VENDOR_VARIABLE

logger = logging.getLogger(__name__)


def deal(groups: Sequence[Hashable], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the rows of each rank: equally many, with whole groups where they fit, and about equally many tokens.

    Example: with two groups of two rows and two ranks, `deal("abab", [9, 1, 9, 1], 2) == [[0, 2], [1, 3]]`. On one rank
    they are `[[0, 2, 1, 3]]`: a rank's updates take its rows in this order.

    Args:
        groups: For each row its group.
        lengths: For each row its number of tokens.
        ranks: Number of ranks, which divides the number of rows.

    Returns:
        For each rank the indices of its rows, those of a group behind each other, otherwise in the batch's order.
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
    first = {group: rows[0] for group, rows in rows_of.items()}
    return [sorted(rows, key=lambda row: (first[groups[row]], row)) for rows in dealt]


def has_our_engine(config: DictConfig) -> bool:
    """Tell whether the training workers have our engine, as the start-up check chose it.

    Args:
        config: verl's whole configuration.

    Raises:
        ConfigError: They do not have the choice in their environment, and the run insists on it.
    """
    vendor = OmegaConf.select(config, ENGINE_CHOICE)
    if vendor not in (ENGINE_VENDOR, STRICT_ENGINE_VENDOR):
        return False
    if (found := os.environ.get(VENDOR_VARIABLE)) == vendor:  # the trainer has it from where its workers have it
        return True
    said = (
        f"{VENDOR_VARIABLE} is {found!r} in the trainer's environment, where {vendor!r} was set for Ray's workers: "
        "Ray was running already, so that verl did not start it with ray_kwargs.ray_init.runtime_env"
    )
    if vendor == STRICT_ENGINE_VENDOR:
        raise ConfigError(
            f"prefix_tree=on: {said}; set {VENDOR_VARIABLE}={vendor} where Ray is started, or the setting to off"
        )
    logger.warning("prefix_tree=auto: no prefix trees in training; %s", said)
    return False

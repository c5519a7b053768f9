"""Which rows of a batch each data-parallel rank gets: those of a group together, so that they share their prompt.

verl gives rank `i` the `i`-th equal part of the batch, and balances these parts row by row. With prefix trees
(`verl_bridge/prefix_tree/`) a prompt is computed once on each rank that has a row of its group.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.names import ENGINE_CHOICE, ENGINE_VENDOR, STRICT_ENGINE_VENDOR, VENDOR_VARIABLE

logger = logging.getLogger(__name__)


def deal(
    groups: Sequence[Hashable], lengths: Sequence[int], ranks: int, silent: Collection[Hashable] = ()
) -> list[list[int]]:
    """Return the rows of each rank: equally many, with whole groups where they fit, and about equally many tokens.

    Example: with two groups of two rows and two ranks, `deal("abab", [9, 1, 9, 1], 2) == [[0, 2], [1, 3]]`. On one rank
    they are `[[0, 2, 1, 3]]`: a rank's updates take its rows in this order.

    Each update of each rank has as many rows as the one that is taught most (`skipped_rows.py`). So with silent groups
    the others are dealt first, equally many rows to each rank, and both kinds alternate in a rank's order:
    `deal("aabbccdd", [1] * 8, 2, silent="ac") == [[0, 1, 2, 3], [4, 5, 6, 7]]`.

    Args:
        groups: For each row its group.
        lengths: For each row its number of tokens.
        ranks: Number of ranks, which divides the number of rows.
        silent: Groups that teach nothing.

    Returns:
        For each rank the indices of its rows, those of a group behind each other, otherwise in the batch's order.
    """
    rows_of: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        rows_of.setdefault(group, []).append(row)
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    share, tokens = len(groups) // ranks, [0] * ranks

    def give(rows: list[int], evenly: bool) -> bool:
        free = [rank for rank in range(ranks) if len(dealt[rank]) + len(rows) <= share]
        if not free:
            return False
        rank = min(free, key=lambda each: (len(dealt[each]) if evenly else 0, tokens[each]))
        dealt[rank] += rows
        tokens[rank] += sum(lengths[row] for row in rows)
        return True

    taught = [rows for group, rows in rows_of.items() if group not in silent]
    others = [rows for group, rows in rows_of.items() if group in silent]
    for kind in (taught, others):
        evenly = bool(others) and kind is taught
        # The longest first, so that the short ones even out the rest.
        longest = sorted(kind, key=lambda rows: -sum(lengths[row] for row in rows))
        for rows in [rows for rows in longest if not give(rows, evenly)]:
            for row in rows:  # no rank has room for the whole group
                give([row], evenly)
    return [_in_order(rows, groups, rows_of, silent) for rows in dealt]


def _in_order(
    rows: list[int], groups: Sequence[Hashable], rows_of: Mapping[Hashable, list[int]], silent: Collection[Hashable]
) -> list[int]:
    """Return a rank's rows in their order: groups as the batch has them, silent ones spread among the others."""
    own: dict[Hashable, list[int]] = {}
    for row in sorted(rows, key=lambda row: (rows_of[groups[row]][0], row)):
        own.setdefault(groups[row], []).append(row)
    sizes, before = Counter[bool](), Counter[bool]()
    for group, each in own.items():
        sizes[group in silent] += len(each)
    middle: dict[Hashable, float] = {}
    for group, each in own.items():
        is_silent = group in silent
        middle[group] = (before[is_silent] + len(each) / 2) / sizes[is_silent]
        before[is_silent] += len(each)
    return [row for group in sorted(own, key=lambda group: middle[group]) for row in own[group]]


def has_our_engine(config: DictConfig) -> bool:
    """Return whether the training workers have our engine, as the start-up check chose it.

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

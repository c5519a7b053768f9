"""DAPO's filter of groups (`algorithm.filter_groups`), which compares conversations here.

verl leaves out a group whose rows all have the same number, since nothing can be learnt from it, and a fresh prompt
takes its place. Rows are not compared: one conversation may have several, and an invalid one has a score of 0
without a meaning. So each valid conversation counts once, with one number, or with one for each of its trained roles
(`proxy.roles`):

    metric `reward`     the conversation's total over all its rows (stats, `conversation.score`); that of a role over
                        the role's rows
    any other metric    the reward function's report under this name; 0 for a session whose agent failed, which
                        has none, as verl's validation counts it

A conversation of another agent loop than ours counts with its last row, the one that verl's GRPO compares.

Invariants:
- a group is excluded if all its valid conversations have one number (for each role: `have_signal`), or if fewer than
  two are valid: then there is nothing to compare. A group that is a single, valid conversation stays, as `rollout.n=1`
  is meant to have them;
- of groups with fewer than two valid conversations a step replaces at most as many as it trains. Further ones are
  trained, which changes nothing, so that a run in which every conversation fails goes on from step to step.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from verl_multiturn.errors import ConfigError
from verl_multiturn.observe.metrics import Stats, by_conversation
from verl_multiturn.observe.roles import rewards_by_role, role_of
from verl_multiturn.rollout.groups.difficulty import Pools
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.rows.reward_numbers import RoleRewards, have_signal
from verl_multiturn.verl_bridge.compat.row_store import TRAIN, Batch, get_columns
from verl_multiturn.verl_bridge.trainer.report import PREFIX
from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows

TOO_FEW = math.nan
"""Verdict on a group with fewer than two valid conversations."""

REWARD = "reward"
"""The metric of a conversation's total reward."""


LeftOut = Callable[[BatchRows], Collection[str]]
"""Returns the names of conversations that the trainer will leave out of a batch with these rows."""


def _nobody(rows: BatchRows) -> Collection[str]:
    return ()


def verdict(numbers: Sequence[RoleRewards | None]) -> float | None:
    """Judge a group by the numbers of its conversations by role, None for an invalid one.

    Numbers are the same if they differ by rounding alone (`are_equal`). It is `have_signal` that compares them.

    Returns:
        The number that all valid conversations share, summed over their roles, so that the group is excluded; None:
        they differ, or the group is meant to be a single conversation; NaN (`TOO_FEW`): fewer than two are valid.

    Example, without roles, of the numbers under None: [1, 1, None] gives 1, [1, 0] and [1] None, [1, None] and
    [None, None] `TOO_FEW`.
    """
    valid = [number for number in numbers if number is not None]
    if len(valid) < 2:
        return None if len(valid) == len(numbers) == 1 else TOO_FEW
    return None if have_signal(valid) else float(np.float32(max(map(whole, valid))))


def whole(numbers: RoleRewards) -> float:
    """Return a conversation's number over all its roles."""
    return math.fsum(numbers.values())


def verdicts(
    uids: Collection[str],
    partition: Mapping[str, Mapping[str, Any]],
    partition_id: str,
    metric: str,
    left_out: LeftOut = _nobody,
) -> dict[str, float | None]:
    """Judge finished groups; see `verdict`.

    Args:
        uids: The groups.
        partition: The tags of all rows of the partition, by name.
        partition_id: TransferQueue's partition.
        metric: `algorithm.filter_groups.metric`.
        left_out: Returns the conversations that also count as invalid.

    Raises:
        ConfigError: The reward function does not report the metric.
    """
    groups = numbers_of(rows_of(uids, partition, partition_id), metric, left_out)
    return {uid: verdict([*groups.get(uid, {}).values()]) for uid in uids}


def rows_of(uids: Collection[str], partition: Mapping[str, Mapping[str, Any]], partition_id: str) -> BatchRows:
    """Return the rows of finished groups.

    Args:
        uids: The groups.
        partition: The tags of all rows of the partition, by name.
        partition_id: TransferQueue's partition.
    """
    names = [name for name in partition if RowKey.parse(name).uid in uids]
    tags = [partition[name] for name in names]
    return BatchRows(SimpleNamespace(keys=names, tags=tags, partition_id=partition_id))


def numbers_of(rows: BatchRows, metric: str, left_out: LeftOut = _nobody) -> dict[str, dict[str, RoleRewards | None]]:
    """Return the numbers of each conversation by role, None for an invalid one: uid → name of the conversation → role.

    Args:
        rows: The rows of finished groups.
        metric: `algorithm.filter_groups.metric`.
        left_out: Returns the conversations that also count as invalid.

    Raises:
        ConfigError: The reward function does not report the metric.
    """
    last: dict[str, dict[str | None, RowKey]] = defaultdict(dict)
    for key in sorted(rows.real, key=lambda key: key.number):
        last[key.conversation][role_of(rows.stats.get(key, {}))] = key
    broken = {key.conversation for key, own in rows.stats.items() if not own["valid"]} | set(left_out(rows))
    valid = [key for name, own in last.items() if name not in broken for key in own.values()]
    numbers = _numbers(valid, rows.stats, rows.partition_id, metric)
    found = {
        name: {role: numbers[key] for role, key in own.items()} for name, own in last.items() if name not in broken
    }
    return {uid: {name: found.get(name) for name in group} for uid, group in rows.groups.items()}


def _numbers(
    keys: Sequence[RowKey], stats: Mapping[RowKey, Stats], partition_id: str, metric: str
) -> dict[RowKey, float]:
    """Return the number of each conversation, by its last row, or of each of its roles, by the role's."""
    if metric == REWARD:
        earned = {name: rewards_by_role(own) for name, own in by_conversation(stats).items() if own["valid"]}
        known = {key: earned[key.conversation][role_of(stats[key])] for key in keys if key in stats}
        others = [key for key in keys if key not in stats]
        scores = get_columns(others, partition_id, ["rm_scores"])["rm_scores"].unbind() if others else []
        return known | {key: float(row.sum()) for key, row in zip(others, scores, strict=True)}
    fields = list(get_columns(keys, partition_id, ["extra_fields"])["extra_fields"]) if keys else []
    return {key: _reported(key, found, stats, metric) for key, found in zip(keys, fields, strict=True)}


def _reported(key: RowKey, field: Any, stats: Mapping[RowKey, Stats], metric: str) -> float:
    """Return a reward function's report of a conversation under the metric's name."""
    extra = getattr(field, "data", field)
    reported = (extra.get("reward_extra_info") if isinstance(extra, dict) else None) or {}
    if metric in reported:
        return float(reported[metric])
    if "session" in stats.get(key, {}):
        return 0.0
    raise ConfigError(
        f"algorithm.filter_groups.metric={metric!r}: the reward of conversation {key.conversation} does not report it, "
        f"but only {sorted(reported)}; set the metric to one of these, or to reward"
    )


class FinishedGroups(NamedTuple):
    """The finished groups of training, as a replay buffer has listed them."""

    uids: Set[str]
    rows: Mapping[str, Mapping[str, Any]]
    """Tags of all rows of the partition, by name; those of groups that still run are among them."""
    steps: Mapping[str, int]
    """Step in which each group was dispatched."""

    def oldest(self, uids: Collection[str]) -> list[str]:
        """Return groups in the order in which they were dispatched."""
        return sorted(uids, key=lambda uid: (self.steps[uid], uid))


class GroupFilter:
    """Decides which groups of a replay buffer leave it untrained: verl's filter, and without a metric none.

    `replay_buffer.py` asks it for each list of finished groups; `hooks.py` asks it for `silent`, `pools` and `state`,
    which only `SignalFilter` has.

    Its metric of a step is `rollout/filter_groups/too_few_valid`: groups that were replaced because fewer than two of
    their conversations are valid. verl's `training/filter_groups/evicted_samples` counts them, too.

    Args:
        metric: `algorithm.filter_groups.metric`; None: no group leaves.
        batch_size: Number of groups that a training step takes in all its samples.
    """

    refills = False
    """True when exactly one group is submitted for each that leaves; else verl decides how many."""
    pools: Pools | None = None
    """The pools from which rows are drawn again; None: each row is drawn once."""
    silent: frozenset[str] = frozenset()
    """Groups without signal in the batch that was sampled last."""

    def __init__(self, metric: str | None = None, batch_size: int = 0) -> None:
        self.metric = metric
        self.left_out: LeftOut = _nobody
        """Returns the conversations that the trainer will leave out, such as those that an outage affected."""
        self._batch_size = batch_size
        self._verdicts: dict[str, float | None] = {}
        """Verdict on each finished group, which does not change any more."""
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the counts of the step before."""
        self._too_few_replaced = 0

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics."""
        return {} if self.metric is None else {f"{PREFIX}filter_groups/too_few_valid": self._too_few_replaced}

    def state(self) -> dict[str, Any] | None:
        """Return the filter's state for a checkpoint: none."""
        return None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the `state` of another filter: not at all."""

    def filtered(self, finished: FinishedGroups) -> tuple[set[str], Counter[float]]:
        """Return the groups that leave, and how many of the finished ones share each number.

        Args:
            finished: The finished groups.

        Raises:
            ConfigError: The reward function does not report the metric.
        """
        if self.metric is None:
            return set(), Counter()
        known = self._verdicts
        for uid in known.keys() - finished.uids:
            del known[uid]
        if new := finished.uids - known.keys():
            known.update(verdicts(new, finished.rows, TRAIN, self.metric, self.left_out))
        replaced = finished.oldest(self._too_few())[: max(0, self._batch_size - self._too_few_replaced)]
        shared = {uid: number for uid, number in known.items() if number is not None and not math.isnan(number)}
        return {*shared, *replaced}, Counter(shared.values())

    def replace(self, uids: Set[str], finished: FinishedGroups, step: int) -> None:
        """Count groups that `filtered` returned, and that leave now.

        Args:
            uids: The groups.
            finished: The finished groups, these among them.
            step: The trainer's step.
        """
        self._too_few_replaced += len(uids & self._too_few())

    def drop(self, uids: Collection[str]) -> None:
        """Forget groups that were dropped untrained, for any cause."""

    def judge(self, batch: Batch, uids: Collection[str], step: int) -> None:
        """Look at the groups that were sampled for training.

        Args:
            batch: The rows of the groups.
            uids: The groups. One that failed may have no row.
            step: The trainer's step.
        """

    def _too_few(self) -> set[str]:
        """Return the finished groups with fewer than two valid conversations."""
        return {uid for uid, number in self._verdicts.items() if number is not None and math.isnan(number)}

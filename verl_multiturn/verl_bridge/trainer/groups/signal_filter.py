"""`SignalFilter`: groups without signal in our replay buffers: `custom.multiturn.filter`.

A group has a signal if two of its valid conversations earned different rewards, with roles in one same trained role
(`group_filter.verdict`). Without one all its advantages are 0, and its rollouts teach nothing.

    skip         a sampled group without signal stays in the batch; `silent` names it, `skipped_rows.py` spares its work
    refill       it is evicted as soon as it has finished, and one fresh prompt takes its place
    difficulty   as `skip`; the results of groups decide which rows are drawn again      difficulty.py

Invariants:
- validation is not looked at;
- who is right is decided by the rewards of the run so far (`reward_numbers.ScoreRange`), a checkpoint's among them;
- a group gets one verdict: when it is sampled, or when it is evicted. Those that the trainer will leave out
  (`left_out`) do not count;
- of `refill`: for each group that is evicted exactly one is submitted, so that none is generated in vain. A step
  replaces at most `MOST_REPLACED` times as many as it trains; the further ones are trained, which changes nothing, so
  that a run whose groups all have no signal goes on from step to step, and logs it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Set
from typing import Any

from verl_multiturn.config import FilterMode
from verl_multiturn.rollout.groups.difficulty import Pools
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.rows.reward_numbers import RoleRewards, ScoreRange
from verl_multiturn.verl_bridge.compat.row_store import TRAIN, Batch
from verl_multiturn.verl_bridge.trainer.groups.group_filter import (
    REWARD,
    FinishedGroups,
    GroupFilter,
    numbers_of,
    rows_of,
    verdict,
    whole,
)
from verl_multiturn.verl_bridge.trainer.report import FILTER_PREFIX
from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows

logger = logging.getLogger(__name__)

MOST_REPLACED = 10
"""The most groups that a step replaces, as a multiple of those that it trains."""

_COUNTS = ("groups", "conversations", "no_signal", "all_right", "all_wrong", "too_few_valid", "replaced")


class SignalFilter(GroupFilter):
    """Decides which groups have no signal, as `custom.multiturn.filter` asks.

    Its metrics of a step, under `rollout/filter/`, are about the groups that it sampled or replaced:
    - `groups`, `conversations`: their numbers;
    - `no_signal`: groups without signal; of these `all_right`, `all_wrong` (one is not right) and `too_few_valid`;
    - `replaced`: groups that were replaced;
    - `rollouts_per_signal`: conversations for each group with a signal; missing where there is none;
    - `total/groups`, `total/no_signal`: sums since the beginning of training, over all starts.

    Args:
        mode: `custom.multiturn.filter`, other than `off`.
        batch_size: Number of groups that a training step takes in all its samples.
        group_size: `rollout.n`.
    """

    def __init__(self, mode: FilterMode, batch_size: int, group_size: int) -> None:
        self.mode = mode
        self.refills = mode == "refill"
        self.pools = Pools(group_size) if mode == "difficulty" else None
        self.totals: Counter[str] = Counter()
        self.scores = ScoreRange()
        """The range of the rewards of the run so far."""
        super().__init__(REWARD if self.refills else None, batch_size)

    def begin_step(self) -> None:
        """Forget the counts of the step before."""
        super().begin_step()
        self._counts: Counter[str] = Counter()
        self._told = 1
        if self.pools is not None:
            self.pools.begin_step()

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics."""
        counts: dict[str, float] = {name: self._counts[name] for name in _COUNTS}
        if signals := counts["groups"] - counts["no_signal"]:
            counts["rollouts_per_signal"] = counts["conversations"] / signals
        counts |= {f"total/{name}": self.totals[name] for name in ("groups", "no_signal")}
        counts |= {} if self.pools is None else self.pools.metrics()
        return super().metrics() | {FILTER_PREFIX + name: number for name, number in counts.items()}

    def state(self) -> dict[str, Any]:
        """Return the filter's state for a checkpoint."""
        pools = {} if self.pools is None else {"pools": self.pools.state()}
        return {"mode": self.mode, "totals": dict(self.totals), "scores": list(self.scores.ends), **pools}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the result of `state`.

        Raises:
            LookupError, TypeError, ValueError: It is something else.
        """
        self.totals = Counter({str(name): int(number) for name, number in state["totals"].items()})
        self.scores = ScoreRange.of(float(end) for end in state.get("scores", ()))
        if self.pools is not None and "pools" in state:
            self.pools.restore(state["pools"])

    def judge(self, batch: Batch, uids: Collection[str], step: int) -> None:
        """Judge the groups that were sampled for training; see `GroupFilter.judge`."""
        rows = BatchRows(batch)
        silent, before = set(), Counter(self._counts)
        groups = numbers_of(rows, REWARD, self.left_out)
        right = self._right(rows, groups)
        for uid, numbers in groups.items():
            judged = verdict([*numbers.values()])
            valid = sum(number is not None for number in numbers.values())
            self._count(judged, len(numbers), right[uid] == valid)
            if judged is not None:
                silent.add(uid)
            if self.pools is not None:
                self.pools.judge(uid, right[uid], valid, judged is None, step)
        self.drop(uids)
        self.silent = frozenset(() if self.refills else silent)
        if silent and len(silent) == len(rows.groups):
            found = self._counts - before
            logger.warning(
                "step %d: none of %d groups has a signal (%d all right, %d all wrong, %d with fewer than two valid "
                "conversations), so that it teaches nothing; %s",
                step, len(silent), found["all_right"], found["all_wrong"], found["too_few_valid"], _remedy(found),
            )  # fmt: skip

    def _right(self, rows: BatchRows, groups: Mapping[str, Mapping[str, RoleRewards | None]]) -> dict[str, int]:
        """Return how many valid conversations of each group are right.

        Args:
            rows: The rows of the groups.
            groups: Their numbers, as `numbers_of` returns them.
        """
        scores = {
            uid: {name: None if own is None else whole(own) for name, own in numbers.items()}
            for uid, numbers in groups.items()
        }
        self.scores.add(number for numbers in scores.values() for number in numbers.values())
        last = sorted(rows.stats, key=lambda key: key.number)
        accs = {key.conversation: rows.stats[key].get("reported", {}).get("acc") for key in last}
        return {
            uid: sum(
                number is not None and self.scores.is_right(number, accs.get(name)) for name, number in numbers.items()
            )
            for uid, numbers in scores.items()
        }

    def _count(self, judged: float | None, conversations: int, right: bool, replaced: bool = False) -> None:
        """Count a group by its verdict; `right`: whether each of its valid conversations is."""
        found = Counter(groups=1, conversations=conversations, replaced=int(replaced))
        if judged is not None:
            cause = "too_few_valid" if math.isnan(judged) else "all_right" if right else "all_wrong"
            found.update(["no_signal", cause])
        self._counts.update(found)
        self.totals.update(found)

    def filtered(self, finished: FinishedGroups) -> tuple[set[str], Counter[float]]:
        """Return the groups without signal that are replaced, the oldest first; see `GroupFilter.filtered`."""
        uids, shared = super().filtered(finished)
        most = max(0, MOST_REPLACED * self._batch_size - self._counts["replaced"])
        return set(finished.oldest(uids)[:most]), shared

    def replace(self, uids: Set[str], finished: FinishedGroups, step: int) -> None:
        """Count and judge groups that are replaced; see `GroupFilter.replace`."""
        super().replace(uids, finished, step)
        if not uids:
            return
        rows = rows_of(uids, finished.rows, TRAIN)
        groups = numbers_of(rows, REWARD, self.left_out)
        right = self._right(rows, groups)
        sizes = Counter(uid for uid, _ in {RowKey.parse(name)[:2] for name in finished.rows})
        for uid in uids:
            valid = sum(number is not None for number in groups.get(uid, {}).values())
            is_right = bool(valid) and right[uid] == valid
            self._count(self._verdicts[uid], sizes[uid], is_right, replaced=True)
        if self._counts["replaced"] >= min(self._told, MOST_REPLACED) * self._batch_size:
            self._tell(step)

    def drop(self, uids: Collection[str]) -> None:
        """Forget groups that were dropped untrained: their rows may be drawn again."""
        if self.pools is not None:
            self.pools.drop(uids)

    def _tell(self, step: int) -> None:
        """Warn that a step replaces many groups: at one batch of them, then each time that their number has doubled."""
        while self._counts["replaced"] >= self._told * self._batch_size:
            self._told *= 2
        ends = self._counts["replaced"] >= MOST_REPLACED * self._batch_size
        logger.warning(
            "step %d: %d groups without signal have been replaced (%d all right, %d all wrong, %d with fewer than two "
            "valid conversations)%s; %s",
            step, self._counts["replaced"], self._counts["all_right"], self._counts["all_wrong"],
            self._counts["too_few_valid"],
            ", the most that a step replaces, and those that come now teach nothing" if ends else "",
            _remedy(self._counts),
        )  # fmt: skip


def _remedy(found: Mapping[str, int]) -> str:
    most = max(("too_few_valid", "all_right", "all_wrong"), key=lambda cause: found[cause])
    return {
        "all_right": "take harder rows, or end the run here",
        "all_wrong": "take easier rows, more samples (rollout.n), or a reward for a part of the way",
        "too_few_valid": "see rollout/invalid_share, and what ends the conversations",
    }[most]

"""`SignalFilter`: groups without signal in our replay buffers: `custom.multiturn.filter`.

A group has a signal if two of its valid conversations earned different rewards (`group_filter.verdict`). Without one
all its advantages are 0, and its rollouts teach nothing.

    skip         a sampled group without signal stays in the batch; `silent` names it, and `spared.py` spares its work
    refill       it is evicted as soon as it has finished, and one fresh prompt takes its place
    difficulty   as `skip`; what each group was decides which rows are drawn again      difficulty.py

Invariants:
- validation is not looked at;
- who is right is decided by the rewards of the run so far (`reward_numbers.ScoreRange`), a checkpoint's among them;
- a group is judged once: when it is sampled, or when it is evicted. Those that the trainer will leave out
  (`left_out`) do not count;
- of `refill`: for each group that is evicted exactly one is submitted, so that none is generated in vain. A step
  replaces at most `MOST_REPLACED` times as many as it trains; what comes then is trained, which changes nothing, so
  that a run whose groups all have no signal goes on from step to step, and says so.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from verl_multiturn.config import FilterMode
from verl_multiturn.reward_numbers import ScoreRange
from verl_multiturn.rollout.difficulty import Pools
from verl_multiturn.row_keys import RowKey
from verl_multiturn.verl_bridge.compat.stored_rows import TRAIN
from verl_multiturn.verl_bridge.trainer.batch_rows import BatchRows
from verl_multiturn.verl_bridge.trainer.group_filter import REWARD, GroupFilter, numbers_of, rows_of, verdict
from verl_multiturn.verl_bridge.trainer.report import FILTER_PREFIX

logger = logging.getLogger(__name__)

MOST_REPLACED = 10
"""The most groups that a step replaces, as a multiple of those that it trains."""

_COUNTS = ("groups", "conversations", "no_signal", "all_right", "all_wrong", "too_few_valid", "replaced")


class SignalFilter(GroupFilter):
    """Mixin for a replay buffer of verl, listed before it; it does nothing with `filter=off`.

    Its metrics of a step, under `rollout/filter/`, are about the groups that it sampled or replaced:
    - `groups`, `conversations`: their numbers;
    - `no_signal`: groups without signal; of these `all_right`, `all_wrong` (one is not right) and `too_few_valid`;
    - `replaced`: groups that were replaced;
    - `rollouts_per_signal`: conversations for each group with a signal; missing where there is none;
    - `total/groups`, `total/no_signal`: sums since the beginning of training, over all starts.

    Args:
        batch_size: Number of groups that a training step takes in all its samples.
        arguments: Those of verl's class.
    """

    refill_fn: Any

    def __init__(self, batch_size: int, **arguments: Any) -> None:
        self.mode: FilterMode = "off"
        self.pools: Pools | None = None
        self.silent: frozenset[str] = frozenset()
        """Groups without signal of the batch that was sampled last; empty with `off` and `refill`."""
        self.totals: Counter[str] = Counter()
        self.scores = ScoreRange()
        """The range of the rewards of the run so far."""
        self._selected: list[str] = []
        self._evicted_uids: list[str] = []
        super().__init__(batch_size, **arguments)

    def use(self, mode: FilterMode, group_size: int) -> None:
        """Filter groups in a mode.

        Args:
            mode: `custom.multiturn.filter`.
            group_size: `rollout.n`.
        """
        self.mode = mode
        if mode == "refill":
            self.filter_groups_metric = REWARD
        if mode == "difficulty":
            self.pools = Pools(group_size)

    def begin_step(self) -> None:
        """Forget the counts of the step before."""
        super().begin_step()
        self._counts: Counter[str] = Counter()
        self._told = 1
        if self.pools is not None:
            self.pools.begin_step()

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics."""
        found = super().metrics()
        if self.mode == "off":
            return found
        counts: dict[str, float] = {name: self._counts[name] for name in _COUNTS}
        if signals := counts["groups"] - counts["no_signal"]:
            counts["rollouts_per_signal"] = counts["conversations"] / signals
        counts |= {f"total/{name}": self.totals[name] for name in ("groups", "no_signal")}
        counts |= {} if self.pools is None else self.pools.metrics()
        return found | {FILTER_PREFIX + name: number for name, number in counts.items()}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the filter."""
        pools = {} if self.pools is None else {"pools": self.pools.state()}
        return {"mode": self.mode, "totals": dict(self.totals), "scores": list(self.scores.ends), **pools}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned, with `off` not at all.

        Raises:
            LookupError, TypeError, ValueError: It is something else.
        """
        if self.mode == "off":
            return
        self.totals = Counter({str(name): int(number) for name, number in state["totals"].items()})
        self.scores = ScoreRange.of(float(end) for end in state.get("scores", ()))
        if self.pools is not None and "pools" in state:
            self.pools.restore(state["pools"])

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Sample a batch as verl does, and judge its groups."""
        sampled: tuple[Any, dict[str, Any]] = super().sample(  # type: ignore[misc]
            global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )
        if partition_id == TRAIN and self.mode != "off":
            self._judge(BatchRows(sampled[0]), global_steps)
        return sampled

    def _materialize_batch(self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: Any) -> Any:
        self._selected = selected_prompt_uids
        return super()._materialize_batch(  # type: ignore[misc]
            partition_id, selected_prompt_uids, partition_snapshot
        )

    def _judge(self, rows: BatchRows, step: int) -> None:
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
        if self.pools is not None:
            self.pools.drop(self._selected)  # a group that failed may have no row
        self.silent = frozenset(silent if self.mode != "refill" else ())
        if silent and len(silent) == len(rows.groups):
            found = self._counts - before
            logger.warning(
                "step %d: none of %d groups has a signal (%d all right, %d all wrong, %d with fewer than two valid "
                "conversations), so that it teaches nothing; %s",
                step, len(silent), found["all_right"], found["all_wrong"], found["too_few_valid"], _remedy(found),
            )  # fmt: skip

    def _right(self, rows: BatchRows, groups: Mapping[str, Mapping[str, float | None]]) -> dict[str, int]:
        """Return how many valid conversations of each group are right.

        Args:
            rows: The rows of the groups.
            groups: Their numbers, as `numbers_of` returns them.
        """
        self.scores.add(number for numbers in groups.values() for number in numbers.values())
        last = sorted(rows.stats, key=lambda key: key.number)
        accs = {key.conversation: rows.stats[key].get("reported", {}).get("acc") for key in last}
        return {
            uid: sum(
                number is not None and self.scores.is_right(number, accs.get(name)) for name, number in numbers.items()
            )
            for uid, numbers in groups.items()
        }

    def _count(self, judged: float | None, conversations: int, right: bool, replaced: bool = False) -> None:
        """Count a group by its verdict; `right` says whether each of its valid conversations is."""
        found = Counter(groups=1, conversations=conversations, replaced=int(replaced))
        if judged is not None:
            cause = "too_few_valid" if math.isnan(judged) else "all_right" if right else "all_wrong"
            found.update(["no_signal", cause])
        self._counts.update(found)
        self.totals.update(found)

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter[float]]:
        uids, shared = super()._dapo_filtered_keys(partition_id)
        if self.mode != "refill" or partition_id != TRAIN:
            return uids, shared
        steps = self.prompt_global_steps[partition_id]
        in_order = sorted(uids, key=lambda uid: (steps[uid], uid))
        return set(in_order[: max(0, MOST_REPLACED * self._batch_size - self._counts["replaced"])]), shared

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: Any) -> Any:
        replaced = eviction_reasons[1] if self.mode == "refill" else set()
        rows = rows_of(replaced, self.partitions[partition_id], partition_id)
        groups = numbers_of(rows, REWARD, self.left_out) if replaced else {}
        right = self._right(rows, groups)
        sizes = Counter(uid for uid, _ in {RowKey.parse(name)[:2] for name in self.partitions[partition_id]})
        for uid in replaced:
            valid = sum(number is not None for number in groups.get(uid, {}).values())
            is_right = bool(valid) and right[uid] == valid
            self._count(self._dapo_classification_cache[partition_id][uid], sizes[uid], is_right, replaced=True)
        found = super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)
        self._evicted_uids += sorted(found[0])
        if self.pools is not None:
            self.pools.drop(found[0])
        if not replaced:
            return found
        if self._counts["replaced"] >= min(self._told, MOST_REPLACED) * self._batch_size:
            self._tell(global_steps)
        if isinstance(self, ReplayBufferAsync):
            return found
        # verl's synchronous buffer would submit two for each, wait for both, and throw one away.
        self.refill_fn(len(replaced))
        return found[0], found[1], 0, found[3]

    def take_evicted(self) -> list[str]:
        """Return the uids of all groups that left untrained since the last call."""
        evicted, self._evicted_uids = self._evicted_uids, []
        return evicted

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

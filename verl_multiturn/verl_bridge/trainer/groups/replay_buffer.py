"""Our replay buffers: verl's own, which wake up when a group has finished, and keep the bound of the ages.

With `custom.multiturn.max_staleness` the bound decides, and verl's `max_off_policy_threshold` is not looked at. Each
strategy takes the finished groups with the earliest deadlines first (`rollout/groups/staleness.py`).

    drop      a finished group whose deadline has passed is evicted, and a fresh prompt takes its place
    wait      a batch is taken only when every group that stays can still meet its deadline
    mask      nothing is evicted; the trainer leaves old tokens out of the loss        token_ages.py
    reroll    as `mask`; besides, the trainer begins late groups anew                  rerolls.py

Without the setting verl's own rules hold. The buffer's filter decides which groups teach nothing: `group_filter.py`
for verl's setting, `signal_filter.py` for ours. Only this module knows the methods of verl's replay buffers.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Protocol

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from verl_multiturn.config import FilterMode
from verl_multiturn.rollout.groups.staleness import StalenessBound, earliest, may_take
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.compat.row_store import TRAIN, VALIDATION
from verl_multiturn.verl_bridge.trainer.groups.group_filter import FinishedGroups, GroupFilter, LeftOut
from verl_multiturn.verl_bridge.trainer.groups.signal_filter import SignalFilter
from verl_multiturn.verl_bridge.trainer.report import ASYNC_PREFIX, PREFIX
from verl_multiturn.verl_bridge.workers.group_end import GroupEnd

logger = logging.getLogger(__name__)

_TOLD_EVERY_S = 60.0
_SHOWN = 5
_ASKED_S = 1.0
"""Seconds in which a worker has to report why a group failed."""
_LEFT = ("evicted", "filtered", "failed")
"""Causes for which groups leave, in the order of verl's reasons; `discarded` are those that were too many."""


_NOTHING = "no materializable trajectories"
"""Words of verl's error for a batch of which every group failed."""


class Waiter(Protocol):
    """An object that a replay buffer waits with, until there may be something new."""

    def wait(self, timeout_s: float) -> None:
        """Return when a group has finished, and after `timeout_s` seconds at the latest."""

    def end_of(self, uids: Collection[str]) -> GroupEnd | None:
        """Return when the last of these groups ended; None when that is not known."""

    def take_raised(self) -> int:
        """Return how many conversations have raised since the last call."""

    def blame_raised(self) -> None:
        """Let the run end by the first error of its conversations, at the next look after it."""


class Sleep:
    """The waiter of a run in which nothing reports that a group has finished."""

    def wait(self, timeout_s: float) -> None:
        """Sleep for `timeout_s` seconds, as verl does."""
        time.sleep(timeout_s)

    def end_of(self, uids: Collection[str]) -> GroupEnd | None:
        """Return None."""
        return None

    def take_raised(self) -> int:
        """Return 0."""
        return 0

    def blame_raised(self) -> None:
        """Let the run end by verl's error: no other one is known."""


class BufferHooks:
    """Mixin for a replay buffer of verl, listed before it: it waits with a `Waiter`, and asks a filter.

    Each time that it has waited it calls `look_after`, with which the trainer looks after its servers. After a minute
    it logs for which groups it waits.

    Its metrics of a step are those of its filter, `raised` (conversations that raised since the step before),
    `listings` (how often all of TransferQueue was listed) and, where the trainer waited, `wake_ms`: milliseconds from
    the end of the batch's last conversation to the trainer's going on. `rows_ms` of them passed until the rows that
    came at the end were rewarded and stored.

    Args:
        filter: Decides which groups leave untrained.
        batch_size: Number of groups that a training step takes in all its samples.
        arguments: Those of verl's class.
    """

    # Attributes of verl's replay buffer: partition → names, or name → step.
    poll_interval: float
    pending_keys: dict[str, set[str]]
    running_keys: dict[str, set[str]]
    finished_keys: dict[str, set[str]]
    failure_keys: dict[str, set[str]]
    prompt_global_steps: dict[str, dict[str, int]]
    partitions: dict[str, dict[str, dict[str, Any]]]

    def __init__(self, filter: GroupFilter, batch_size: int, **arguments: Any) -> None:
        super().__init__(**arguments | {"filter_groups_metric": filter.metric})
        self.filter, self._batch_size = filter, batch_size
        self.waiter: Waiter = Sleep()
        self.look_after: Callable[[], None] = lambda: None
        self._seen_at: dict[str, float] = {}
        self._waited = False
        self._selected: list[str] = []
        self._left: dict[str, list[str]] = {}
        self._evicted_uids: list[str] = []
        self.begin_step()

    def follow(self, waiter: Waiter, look_after: Callable[[], None], left_out: LeftOut) -> None:
        """Serve a trainer whose training begins.

        Args:
            waiter: Waits for a group's end.
            look_after: Called each time that the buffer has waited.
            left_out: Returns the conversations that the trainer will leave out.
        """
        self.waiter, self.look_after, self.filter.left_out = waiter, look_after, left_out

    def begin_step(self) -> None:
        """Forget the counts of the step before."""
        self.filter.begin_step()
        self._listings = 0
        self._woken: list[tuple[float, set[str]]] = []
        """Time at which the trainer went on, and the groups with which it did."""

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics."""
        found: dict[str, float] = {f"{ASYNC_PREFIX}listings": self._listings}
        found[f"{PREFIX}raised"] = self.waiter.take_raised()
        # A group's end may be reported later than its status in TransferQueue, but not as late as the end of a step.
        ends = [(woken, end) for woken, uids in self._woken if (end := self.waiter.end_of(uids)) is not None]
        if ends:
            woken, end = max(ends, key=lambda known: known[0] - known[1].conversation)
            found[f"{ASYNC_PREFIX}wake_ms"] = (woken - end.conversation) * 1e3
            found[f"{ASYNC_PREFIX}rows_ms"] = (end.rows - end.conversation) * 1e3
        return found | self.filter.metrics()

    def take_evicted(self) -> list[str]:
        """Return the uids of all groups that were dropped untrained since the last call."""
        evicted, self._evicted_uids = self._evicted_uids, []
        return evicted

    def take_left(self) -> dict[str, list[str]]:
        """Return the uids of groups that were dropped untrained since the last call, by cause (`schema.StepLine`)."""
        left, self._left = self._left, {}
        return left

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Sample a batch as verl does; note how long the trainer took to go on, and let the filter judge the groups."""
        self._waited = False
        is_empty = False
        try:
            sampled: tuple[Any, dict[str, Any]] = super().sample(  # type: ignore[misc]
                global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
            )
            is_empty = not sampled[0].keys  # verl refuses it, in a validation by an error of TransferQueue
        except RuntimeError as error:
            is_empty = _NOTHING in str(error)
            raise
        finally:
            if self.failure_keys.get(partition_id):  # why they failed is known before the run goes on, or ends by it
                self.waiter.wait(_ASKED_S)
                if is_empty:
                    self.waiter.blame_raised()
                self.look_after()
        if self._waited and partition_id == TRAIN:
            self._woken.append((time.time(), {RowKey.parse(name).uid for name in sampled[0].keys}))
        if partition_id == TRAIN:
            self.filter.judge(sampled[0], self._selected, global_steps)
        return sampled

    def _materialize_batch(self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: Any) -> Any:
        self._selected = selected_prompt_uids
        return super()._materialize_batch(  # type: ignore[misc]
            partition_id, selected_prompt_uids, partition_snapshot
        )

    def _finished(self) -> FinishedGroups:
        return FinishedGroups(self.finished_keys[TRAIN], self.partitions[TRAIN], self.prompt_global_steps[TRAIN])

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter[float]]:
        return self.filter.filtered(self._finished()) if partition_id == TRAIN else (set(), Counter())

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: Any) -> Any:
        self.filter.replace(eviction_reasons[1], self._finished(), global_steps)
        noted: set[str] = set()
        for name, uids in zip(_LEFT, eviction_reasons, strict=False):  # a group may have several reasons
            self._note_left(name, uids - noted)
            noted |= uids
        evicted = super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)  # type: ignore[misc]
        self._evicted_uids += sorted(evicted[0])
        self.filter.drop(evicted[0])
        return evicted

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        known = {uid for left in self._left.values() for uid in left}
        if partition_id == TRAIN:
            self._note_left("discarded", uids - known)
        super()._clear_groups(partition_id, uids)  # type: ignore[misc]

    def _note_left(self, name: str, uids: Collection[str]) -> None:
        self._left.setdefault(name, []).extend(sorted(uids))

    def _sync_metadata_from_transfer_queue(self) -> None:
        self._listings += 1
        super()._sync_metadata_from_transfer_queue()  # type: ignore[misc]
        now = time.time()
        known = [uid for groups in self.prompt_global_steps.values() for uid in groups]
        self._seen_at = {uid: self._seen_at.get(uid, now) for uid in known}

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        self._waited = True
        self.waiter.wait(self.poll_interval)
        self.look_after()
        now = time.time()
        if now - last_debug_time < _TOLD_EVERY_S:
            return last_debug_time
        logger.warning("%s", self._waits_for(partition_id, now))
        return now

    def _waits_for(self, partition_id: str, now: float) -> str:
        """Return a sentence about the unfinished groups, the oldest first."""
        steps = self.prompt_global_steps[partition_id]
        unfinished = self.pending_keys[partition_id] | self.running_keys[partition_id]
        in_order = sorted(unfinished, key=lambda uid: (steps[uid], uid))
        shown = [f"{uid} (dispatched in step {steps[uid]}, {now - self._seen_at[uid]:.0f} s ago)" for uid in in_order]
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        return f"the trainer waits for {len(shown)} groups of {partition_id!r}: {', '.join(shown[:_SHOWN])}{more}"


class MultiTurnReplayBuffer(BufferHooks, ReplayBuffer):
    """verl's synchronous replay buffer, with `BufferHooks`."""

    refill_fn: Callable[[int], Any]

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: Any) -> Any:
        uids, stale, filtered, metrics = super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)
        if self.filter.refills and filtered:
            # verl would submit two for each, wait for both, and throw one away.
            self.refill_fn(filtered)
            filtered = 0
        return uids, stale, filtered, metrics


class MultiTurnReplayBufferAsync(BufferHooks, ReplayBufferAsync):
    """verl's asynchronous replay buffer, with `BufferHooks`; it keeps the bound of the ages.

    Its further metrics of a step are `evicted` (groups that were beyond the bound) and `prompts_lost` (prompts that
    leave untrained, because their group was evicted or failed).

    Args:
        bound: The bound of the ages; None: verl's own rules hold.
        filter: Decides which groups leave untrained.
        batch_size: Number of groups that a training step takes in all its samples.
        arguments: Those of verl's class.
    """

    def __init__(self, bound: StalenessBound | None, filter: GroupFilter, batch_size: int, **arguments: Any) -> None:
        super().__init__(filter, batch_size, **arguments)
        self._bound = bound
        self._taken = (0, 0)
        if bound is not None:
            self.max_off_policy_threshold = None  # verl's rules are off; ours are below

    def begin_step(self) -> None:
        """Forget the counts of the step before."""
        super().begin_step()
        self._evicted = self._lost = 0

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics."""
        found = {f"{ASYNC_PREFIX}evicted": self._evicted, f"{ASYNC_PREFIX}prompts_lost": self._lost}
        return super().metrics() | found

    def _deadlines(self, partition_id: str, bound: StalenessBound) -> dict[str, int]:
        """Return the deadline of every group; that of a finished one follows from its oldest token."""
        oldest: dict[str, list[int | None]] = {}
        for name, tag in self.partitions[partition_id].items():
            oldest.setdefault(RowKey.parse(name).uid, []).append(tag.get("min_global_steps"))
        deadlines = {}
        for uid, dispatched in self.prompt_global_steps[partition_id].items():
            found = oldest.get(uid, []) if uid in self.finished_keys[partition_id] else []
            known = [version for version in found if version is not None]
            # A row whose versions are not known may be as old as the dispatch.
            deadlines[uid] = bound.deadline(dispatched, min(known) if known and len(known) == len(found) else None)
        return deadlines

    def _stale_terminal_keys(self, global_steps: int, partition_id: str) -> set[str]:
        if self._bound is None:
            stale: set[str] = super()._stale_terminal_keys(global_steps, partition_id)
            return stale
        if partition_id == VALIDATION or self._bound.strategy != "drop":
            return set()
        deadlines = self._deadlines(partition_id, self._bound)
        return {uid for uid in self.finished_keys[partition_id] if deadlines[uid] < global_steps}

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: Any) -> Any:
        stale, _, failed, _ = eviction_reasons
        if partition_id == TRAIN:
            self._evicted += len(stale)
            self._lost += len(stale | failed)
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)

    def _has_enough_samples(
        self, global_steps: int, partition_id: str, batch_size: int, sampleable_keys: set[str]
    ) -> bool:
        if not super()._has_enough_samples(global_steps, partition_id, batch_size, sampleable_keys):
            return False
        if self._bound is None or self._bound.strategy != "wait" or partition_id == VALIDATION:
            return True
        deadlines = self._deadlines(partition_id, self._bound)
        step, taken = self._taken
        left = self._batch_size - batch_size - (taken if step == global_steps else 0)
        return may_take(
            [deadlines[uid] for uid in sampleable_keys],
            [deadlines[uid] for uid in self.pending_keys[partition_id] | self.running_keys[partition_id]],
            batch_size,
            global_steps,
            max(0, left),
            self._batch_size,
        )

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict[str, Any]], dict[str, int]]:
        selected = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        if self._bound is None or partition_id == VALIDATION:
            found: tuple[list[str], dict[str, dict[str, Any]], dict[str, int]] = selected
            return found
        deadlines = self._deadlines(partition_id, self._bound)
        first = earliest({uid: deadlines[uid] for uid in sorted(sampleable_keys)}, batch_size)
        return first, selected[1], selected[2]

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Sample a batch as verl does, and note how many groups of the step are taken."""
        sampled: tuple[Any, dict[str, Any]] = super().sample(
            global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )
        if partition_id == TRAIN:
            step, taken = self._taken
            self._taken = (global_steps, batch_size + (taken if step == global_steps else 0))
        return sampled


def replay_buffer_from(
    verls: Any, bound: StalenessBound | None, batch_size: int, mode: FilterMode = "off", group_size: int = 1
) -> Any:
    """Return our replay buffer with the arguments of verl's; None for one of the user's own class.

    Args:
        verls: The replay buffer that verl's trainer built.
        bound: The bound of the ages; None: verl's own rules hold.
        batch_size: Number of groups that a training step takes.
        mode: `custom.multiturn.filter`.
        group_size: `rollout.n`.
    """
    if type(verls) not in (ReplayBuffer, ReplayBufferAsync):
        return None
    names = [name for name in inspect.signature(ReplayBuffer.__init__).parameters if name != "self"]
    arguments = {name: getattr(verls, name) for name in names}
    metric = verls.filter_groups_metric
    filter = GroupFilter(metric, batch_size) if mode == "off" else SignalFilter(mode, batch_size, group_size)
    if type(verls) is ReplayBuffer:
        return MultiTurnReplayBuffer(filter, batch_size, **arguments)
    return MultiTurnReplayBufferAsync(bound, filter, batch_size, **arguments)

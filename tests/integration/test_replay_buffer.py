"""Our replay buffers, on a TransferQueue of keys and tags within this process."""

import logging
from collections.abc import Collection, Iterator
from typing import Any

import pytest

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


class Queue:
    """TransferQueue's keys and tags, and a clock that moves when the buffer waits."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, Any]] = {}
        self.now = 0.0
        self.waits: list[float] = []
        self.events: list[Any] = []
        """A function for each wait, which is called in it."""

    def group(self, uid: str, dispatched: int, status: str = "running", oldest: int | None = None) -> None:
        self.tags[uid] = {"is_prompt": True, "status": status, "global_steps": dispatched}
        if status == "finished":
            oldest = dispatched - 1 if oldest is None else oldest
            for session, version in enumerate((oldest + 1, oldest)):
                self.tags[f"{uid}_{session}_0"] = {"min_global_steps": version, "max_global_steps": version}

    def kv_list(self) -> dict[str, dict[str, dict[str, Any]]]:
        return {"train": self.tags, "val": {}}

    def kv_clear(self, partition_id: str, keys: list[str]) -> None:
        assert partition_id == "train"
        for key in keys:
            del self.tags[key]

    def time(self) -> float:
        return self.now

    def wait(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)
        self.now += timeout_s
        if not self.events:
            raise TimeoutError("the buffer waits for ever")
        self.events.pop(0)()

    def end_of(self, uids: Collection[str]) -> Any:
        from verl_multiturn.verl_bridge.workers.group_end import GroupEnd

        self.asked = uids
        return GroupEnd(self.now - 0.25, self.now - 0.125)

    def take_raised(self) -> int:
        return 3


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    from verl.trainer.ppo.v1 import replay_buffer as verls

    from verl_multiturn.verl_bridge.trainer.groups import replay_buffer as ours

    made = Queue()
    monkeypatch.setattr(verls, "tq", made)
    for module in (verls, ours):
        monkeypatch.setattr(module, "time", made)
    return made


def make(queue: Queue, strategy: str | None, eta: int = 1, batch_size: int = 2, refilled: Any = None) -> Any:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

    from verl_multiturn.rollout.groups.staleness import StalenessBound
    from verl_multiturn.verl_bridge.trainer.groups.replay_buffer import replay_buffer_from

    refill = [].append if refilled is None else refilled.append
    verls = ReplayBufferAsync("separate_async", {}, eta + 1, "drop", {}, refill_fn=refill)
    bound = None if strategy is None else StalenessBound(eta, strategy)  # type: ignore[arg-type]
    buffer = replay_buffer_from(verls, bound, batch_size)
    buffer.waiter = queue
    return buffer


def sample(buffer: Any, step: int, size: int = 2) -> list[str]:
    batch, _ = buffer.sample(global_steps=step, partition_id="train", batch_size=size)
    return sorted({key.split("_")[0] for key in batch.keys})


def counts(buffer: Any) -> tuple[float, float]:
    metrics = buffer.metrics()
    assert metrics.keys() >= {"rollout/async/evicted", "rollout/async/prompts_lost"}
    return metrics["rollout/async/evicted"], metrics["rollout/async/prompts_lost"]


def test_why_a_group_failed_is_known_before_the_batch_is_used(queue: Queue) -> None:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    from verl_multiturn.verl_bridge.trainer.groups.replay_buffer import replay_buffer_from

    buffer = replay_buffer_from(ReplayBuffer("sync", {}, None, "drop", {}), None, 2)
    buffer.waiter = queue
    looked: list[str] = []
    buffer.look_after = lambda: looked.append("looked")
    for uid, status in (("a", "finished"), ("b", "finished")):
        queue.group(uid, 1, status)
    assert (sample(buffer, step=1), queue.waits, looked) == (["a", "b"], [], [])
    queue.tags.clear()
    queue.group("c", 2, "finished")
    queue.group("d", 2, "failure")
    queue.events.append(lambda: None)
    assert (sample(buffer, step=2), queue.waits, looked) == (["c"], [1.0], ["looked"])


@pytest.mark.parametrize("partition", ["train", "val"])
def test_a_batch_in_which_all_have_raised_ends_by_their_error(partition: str, queue: Queue) -> None:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    from verl_multiturn.verl_bridge.trainer.groups.replay_buffer import replay_buffer_from

    buffer = replay_buffer_from(ReplayBuffer("sync", {}, None, "drop", {}), None, 2)
    blamed: list[str] = []

    class Blamed:
        wait = staticmethod(lambda timeout_s: None)
        blame_raised = staticmethod(lambda: blamed.append("blamed"))

    def look() -> None:
        raise LookupError("the first error" if blamed else "none")

    buffer.waiter, buffer.look_after = Blamed(), look
    for uid in "ab":
        queue.group(uid, 1, "failure")
    queue.tags = {name: tag for name, tag in queue.tags.items() if "_" not in name}  # no row was written
    queue.kv_list = lambda: {"train": {}, "val": {}} | {partition: queue.tags}  # type: ignore[method-assign]
    queue.kv_clear = lambda partition_id, keys: None  # type: ignore[method-assign]
    with pytest.raises(LookupError, match="the first error"):
        buffer.sample(global_steps=1, partition_id=partition, batch_size=2)


@pytest.mark.parametrize("end", [KeyboardInterrupt, RuntimeError("the store is lost")])
def test_another_end_is_not_blamed_on_a_group_that_failed(end: Any, queue: Queue) -> None:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    from verl_multiturn.verl_bridge.trainer.groups.replay_buffer import replay_buffer_from

    buffer = replay_buffer_from(ReplayBuffer("sync", {}, None, "drop", {}), None, 2)
    blamed: list[str] = []

    class Ends:
        waits = 0

        def wait(self, timeout_s: float) -> None:
            self.waits += 1
            if self.waits == 1:
                raise end

        blame_raised = staticmethod(lambda: blamed.append("blamed"))

    buffer.waiter, buffer.look_after = Ends(), lambda: None
    queue.group("a", 1, "failure")
    queue.group("b", 1, "running")
    with pytest.raises(end if isinstance(end, type) else type(end)):
        sample(buffer, step=1)
    assert not blamed


def test_drop_evicts_what_is_over_age_and_counts_it(queue: Queue) -> None:
    refilled: list[int] = []
    buffer = make(queue, "drop", refilled=refilled)
    queue.group("old", 1, "finished")
    queue.group("failed", 3, "failure")
    for uid in ("a", "b"):
        queue.group(uid, 3, "finished")
    assert sample(buffer, step=3) == ["a", "b"]
    assert refilled == [2]
    assert counts(buffer) == (1, 2)
    assert sorted(queue.tags) == ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]  # verl clears the rows when the step ends
    buffer.begin_step()
    assert counts(buffer) == (0, 0)
    assert (buffer.take_evicted(), buffer.take_evicted()) == (["failed", "old"], [])
    left = {"evicted": ["old"], "filtered": [], "failed": ["failed"]}
    assert (buffer.take_left(), buffer.take_left()) == (left | {"discarded": []}, {})


def test_a_group_that_began_late_is_not_dropped(queue: Queue) -> None:
    """Verl counts from the dispatch step; the oldest token of this group is younger."""
    queue.group("a", 1, "finished", oldest=2)
    queue.group("b", 3, "finished")
    buffer = make(queue, "drop")
    assert sample(buffer, step=4) == ["a", "b"]
    assert counts(buffer) == (0, 0)


def test_a_row_of_unknown_age_counts_from_the_dispatch(queue: Queue) -> None:
    queue.group("a", 1, "finished", oldest=2)
    queue.tags["a_0_0"]["min_global_steps"] = None
    for uid in ("b", "c"):
        queue.group(uid, 4, "finished")
    assert sample(make(queue, "drop"), step=4) == ["b", "c"]


def test_wait_leaves_no_more_groups_than_can_be_trained_in_time(queue: Queue) -> None:
    """Verl's `wait` takes the younger groups, and later has three groups that only step 3 may train."""
    for uid in ("slow1", "slow2", "slow3"):
        queue.group(uid, 2)
    for uid in ("quick1", "quick2"):
        queue.group(uid, 3, "finished")
    queue.events = [lambda: queue.group("slow2", 2, "finished")]
    assert sample(make(queue, "wait"), step=2) == ["quick1", "slow2"]
    assert queue.waits == [2.0]


def test_wait_takes_a_batch_when_waiting_cannot_help(queue: Queue) -> None:
    for uid in ("a", "b"):
        queue.group(uid, 1, "finished")
    for uid in ("c", "d", "e", "f", "g"):
        queue.group(uid, 1)
    assert sample(make(queue, "wait"), step=2) == ["a", "b"]
    assert queue.waits == []


def test_wait_knows_what_a_step_has_taken(queue: Queue) -> None:
    """A step samples twice; `slow` is due in it."""
    buffer = make(queue, "wait", batch_size=2)
    queue.group("slow", 1)
    for uid in ("a", "b"):
        queue.group(uid, 2, "finished")
    assert sample(buffer, step=2, size=1) == ["a"]
    queue.events = [lambda: queue.group("slow", 1, "finished")]
    assert sample(buffer, step=2, size=1) == ["slow"]
    assert queue.waits == [2.0]


@pytest.mark.parametrize("strategy", ["mask", "reroll"])
def test_nothing_is_evicted_and_the_oldest_go_first(queue: Queue, strategy: str) -> None:
    buffer = make(queue, strategy)
    queue.group("b", 5, "finished")
    queue.group("a", 5, "finished", oldest=5)
    queue.group("old", 1, "finished")
    queue.group("running", 1)
    assert sample(buffer, step=5) == ["b", "old"]
    assert [key for key, tag in queue.tags.items() if tag.get("is_prompt")] == ["a", "running"]
    assert counts(buffer) == (0, 0)


def test_without_a_bound_verls_own_rules_hold(queue: Queue) -> None:
    refilled: list[int] = []
    buffer = make(queue, None, refilled=refilled)
    queue.group("old", 1, "finished", oldest=3)
    for uid in ("a", "b"):
        queue.group(uid, 3, "finished")
    assert sample(buffer, step=3) == ["a", "b"]
    assert refilled == [1]
    assert counts(buffer) == (1, 1)


def test_a_long_wait_is_told_once_a_minute(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    buffer = make(queue, "reroll")
    for number in range(7):
        queue.group(f"g{number}", 1 + number // 4)

    def finish() -> None:
        for uid in ("g0", "g6"):
            queue.group(uid, 1, "finished")

    queue.events = [lambda: None] * 64 + [finish]
    with caplog.at_level(logging.WARNING):
        assert sample(buffer, step=2) == ["g0", "g6"]
    told = [record.getMessage() for record in caplog.records if "the trainer waits" in record.getMessage()]
    groups = [f"g{i} (dispatched in step {1 + i // 4}, {{}} s ago)" for i in range(5)]
    shown = f"the trainer waits for 7 groups of 'train': {', '.join(groups)} and 2 more"
    assert told == [shown.format(*[60] * 5), shown.format(*[120] * 5)]


def test_the_arguments_are_those_of_verls_buffer() -> None:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

    from verl_multiturn.rollout.groups.staleness import StalenessBound
    from verl_multiturn.verl_bridge.trainer.groups.replay_buffer import MultiTurnReplayBuffer, Sleep, replay_buffer_from

    class Users(ReplayBufferAsync):
        pass

    def refill(count: int) -> None:
        pass

    common = {"trainer_mode": "sync", "trainer_config": {}, "max_off_policy_threshold": 8,
              "max_off_policy_strategy": "drop", "sampler_kwargs": {}, "refill_fn": refill,
              "filter_groups_metric": "acc"}  # fmt: skip
    sync = ReplayBuffer(**common, train_batch_size=4, gen_batch_size=1, max_inflight_gen_batches=3)
    ours = replay_buffer_from(sync, None, 4)
    assert type(ours) is MultiTurnReplayBuffer
    assert (ours.max_inflight_gen_batches, ours.refill_fn, ours.filter_groups_metric) == (3, refill, "acc")
    assert isinstance(ours.waiter, Sleep)
    bounded = replay_buffer_from(ReplayBufferAsync(**common), StalenessBound(1, "drop"), 4)
    assert (bounded.refill_fn, bounded.filter_groups_metric, bounded.poll_interval) == (refill, "acc", 2.0)
    users = Users(**common)
    assert replay_buffer_from(users, StalenessBound(1, "drop"), 4) is None


def test_a_sampler_of_the_users_looks_after_workers_while_it_samples(queue: Queue) -> None:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

    from verl_multiturn.verl_bridge.trainer.groups.custom_sampler import look_after_sampler

    class Users(ReplayBufferAsync):
        def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
            queue.wait(1.0)
            return last_debug_time

    users = Users("separate_async", {}, None, "drop", {}, refill_fn=[].append)
    queue.group("a", 1)
    queue.events = [lambda: None] * 2
    looked: list[float] = []

    def look_after() -> None:  # a worker that has died is replaced, and its group finishes
        looked.append(queue.now)
        if len(looked) == 2:
            queue.group("a", 1, "finished")

    look_after_sampler(users, look_after)
    assert sample(users, step=1, size=1) == ["a"]
    assert looked == [0.0, 1.0]
    assert users.get_sampleable_count(1, "train") == 0
    assert len(looked) == 2  # verl also counts while new weights are sent
    look_after_sampler(object(), look_after)  # of no class of verl's


def test_a_step_tells_how_often_it_listed_and_how_late_it_woke(queue: Queue) -> None:
    buffer = make(queue, None)
    queue.group("a", 1, "finished")
    queue.events = [lambda: None, lambda: queue.group("b", 1, "finished")]
    assert sample(buffer, step=1) == ["a", "b"]
    metrics = buffer.metrics()
    assert queue.asked == {"a", "b"}
    assert (metrics["rollout/async/listings"], metrics["rollout/async/wake_ms"]) == (3, 250.0)
    assert metrics["rollout/raised"] == 3
    assert metrics["rollout/async/rows_ms"] == 125.0
    buffer.begin_step()
    for uid in ("c", "d"):
        queue.group(uid, 1, "finished")
    assert sample(buffer, step=1) == ["c", "d"]
    metrics = buffer.metrics()  # the trainer did not wait
    assert (metrics["rollout/async/listings"], "rollout/async/wake_ms" in metrics) == (1, False)

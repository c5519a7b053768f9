"""DAPO's filter of groups, which compares conversations: `verl_bridge/trainer/groups/group_filter.py`."""

import math
import random
from typing import Any

import pytest

from tests.integration.trainer_rows import CALL, Store, make_output, put_in_place
from verl_multiturn import ConfigError

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([1.0, 1.0], 1.0),
        ([1.0, 0.0], None),
        ([0.0] * 3, 0.0),
        # Seven right answers and one outage are not a signal.
        ([1.0] * 7 + [None], 1.0),
        ([1.0, 0.0, None], None),
        # Sums of the same rewards in another order.
        ([0.1 + 0.2, 0.3], 0.30000001192092896),
        ([100.0, 100.00001], 100.00000762939453),
        ([100.0, 100.0009], None),
        ([0.0, 5e-6], None),
        ([0.3, 0.3001], None),
        # With `rollout.n=1` a group of one is meant.
        ([0.5], None),
        ([0.5, None], math.nan),
        ([None], math.nan),
        ([None, None], math.nan),
        ([], math.nan),
    ],
)
def test_what_all_valid_conversations_have(numbers: list[float | None], expected: float | None) -> None:
    from verl_multiturn.verl_bridge.trainer.groups.group_filter import verdict

    conversations = [None if number is None else {None: number} for number in numbers]
    assert verdict(conversations) == pytest.approx(expected, abs=0, nan_ok=True)


WON, LOST = {"white": 1.0, "black": -1.0}, {"white": -1.0, "black": 1.0}


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        # The sums of a zero-sum game are all 0.
        ([WON, LOST], None),
        ([WON, WON, LOST, None], None),
        ([WON, WON], 0.0),
        ([WON, None], math.nan),
        # One role's rewards differ, the other's do not.
        ([{"white": 1.0, "black": 0.0}, {"white": 1.0, "black": 0.5}], None),
        # Each role is compared with itself alone, and only where it spoke.
        ([{"white": 1.0}, {"black": 0.0}], 1.0),
        ([{"white": 1.0}, {"white": 1.0, "black": 0.0}, {"black": 0.5}], None),
    ],
)
def test_a_group_has_a_signal_if_one_role_has(numbers: list[Any], expected: float | None) -> None:
    from verl_multiturn.verl_bridge.trainer.groups.group_filter import verdict

    assert verdict(numbers) == pytest.approx(expected, abs=0, nan_ok=True)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    put_in_place(made, monkeypatch)
    return made


def judged(store: Store, metric: str = "reward", uids: tuple[str, ...] = ("u",)) -> Any:
    from verl_multiturn.verl_bridge.trainer.groups.group_filter import verdicts

    return verdicts(set(uids), store.tags, "train", metric)


def output_of(session: int, score: float, *, valid: bool = True, acc: float | None = None, rows: int = 1) -> list[Any]:
    """Return the rows of a conversation as our agent loop makes them, copied for several rows."""
    made = make_output("u", session, [CALL, "2<|im_end|>"] if valid else [])
    (row,) = made if isinstance(made, list) else [made]
    outputs = [row.model_copy(deep=True) for _ in range(rows)]
    for index, output in enumerate(outputs):
        output.reward_score = score
        output.stats = {**output.stats, "conversation": {"rows": rows, "row": index}}
        output.extra_fields["reward_extra_info"] = {} if acc is None else {"acc": acc}
    return outputs


def test_rows_of_the_real_agent_loop(store: Store) -> None:
    for session, (score, valid) in enumerate([(1.0, True), (1.0, True), (0.0, False)]):
        (output,) = output_of(session, score, valid=valid)
        store.add("u", session, output)
    assert not store.rows["u_2_0"]["metrics"]["rollout"]["valid"]
    assert judged(store) == {"u": 1.0}
    (output,) = output_of(3, 0.0)
    store.add("u", 3, output)
    assert judged(store) == {"u": None}
    assert judged(store, uids=("u", "gone")) == {"u": None, "gone": pytest.approx(math.nan, nan_ok=True)}


def test_the_rows_of_a_conversation_are_one(store: Store) -> None:
    """Verl compares rows: with a reward at a turn, those of one conversation differ."""
    for session in range(2):
        first, last = output_of(session, 0.75, rows=2)
        first.turn_rewards = [(0, 0.25)]
        for output in (first, last):
            output.stats["tool_score"] = 0.25
        for index, output in enumerate((first, last)):
            store.add("u", session, output, index)
    sums = [float(row["rm_scores"].sum()) for row in store.rows.values()]
    assert sums == [0.25, 0.75, 0.25, 0.75]
    assert judged(store) == {"u": 1.0}


def test_what_the_trainer_will_leave_out_does_not_count(store: Store) -> None:
    from verl_multiturn.verl_bridge.trainer.groups.group_filter import verdicts

    for session, score in enumerate([1.0, 1.0, 0.0]):
        (output,) = output_of(session, score)
        store.add("u", session, output)
    assert verdicts({"u"}, store.tags, "train", "reward") == {"u": None}
    assert verdicts({"u"}, store.tags, "train", "reward", lambda rows: {"u_2": "outage"}) == {"u": 1.0}


def test_a_metric_of_the_reward_function(store: Store) -> None:
    for session, (score, acc) in enumerate([(0.9, 1.0), (0.4, 1.0)]):
        (output,) = output_of(session, score, acc=acc)
        store.add("u", session, output)
    assert judged(store, "acc") == {"u": 1.0}
    assert judged(store) == {"u": None}
    (output,) = output_of(2, 0.4)
    store.add("u", 2, output)
    with pytest.raises(ConfigError, match=r"metric='acc': the reward of conversation u_2 does not .* only \[\]; set"):
        judged(store, "acc")
    # A session whose agent failed has none, which verl's validation counts as 0.
    store.rows["u_2_0"]["metrics"]["rollout"]["session"] = {}
    assert judged(store, "acc") == {"u": None}
    # That of an invalid conversation is not requested.
    store.rows["u_2_0"]["metrics"]["rollout"] |= {"valid": False}
    del store.rows["u_2_0"]["metrics"]["rollout"]["session"]
    assert judged(store, "acc") == {"u": 1.0}


def test_rows_of_another_agent_loop_count_with_the_last(store: Store) -> None:
    for session in range(2):
        for index, output in enumerate(output_of(session, float(session), rows=2)):
            output.stats = {}
            fields = store.add("u", session, output, index)
            fields["rm_scores"][-1] = session + index
            del fields["metrics"]["rollout"]
    assert judged(store) == {"u": None}
    store.rows["u_0_1"]["rm_scores"][-1] = 2.0
    assert judged(store) == {"u": 2.0}


def test_the_groups_that_were_replaced_are_counted() -> None:
    from tests.long.training.dapo_filter import BATCH, CASES, Queue, in_place, make_buffer

    queue = Queue(CASES[4], random.Random(0))
    with in_place(queue):
        buffer = make_buffer(queue, "reward", is_async=False, is_ours=True)
        queue.submit(BATCH)
        _, metrics = buffer.sample(1, "train", BATCH)
        assert buffer.metrics()["rollout/filter_groups/too_few_valid"] == BATCH
        assert metrics["training/filter_groups/evicted_samples"] == BATCH
        left = {cause: len(uids) for cause, uids in buffer.take_left().items()}
        assert left == {"evicted": 0, "filtered": BATCH, "failed": 0, "discarded": 0}
        buffer.begin_step()
        assert buffer.metrics()["rollout/filter_groups/too_few_valid"] == 0
        plain = make_buffer(queue, None, is_async=True, is_ours=True)  # type: ignore[arg-type]
        assert "rollout/filter_groups/too_few_valid" not in plain.metrics()
        assert plain._dapo_filtered_keys("train") == (set(), {})


def test_groups_that_were_too_many_are_told() -> None:
    from tests.long.training.dapo_filter import BATCH, CASES, Queue, in_place, make_buffer

    queue = Queue(CASES[0], random.Random(0))
    told = counted = 0
    with in_place(queue):
        buffer = make_buffer(queue, "reward", is_async=False, is_ours=True)
        for step in range(1, 9):
            queue.submit(2 * BATCH)
            batch, metrics = buffer.sample(step, "train", BATCH)
            left = buffer.take_left()
            taken = {key.split("_")[0] for key in batch.keys}
            assert not taken & {uid for uids in left.values() for uid in uids}
            told += len(left["discarded"])
            counted += metrics.get("training/filter_groups/discarded_surplus_samples", 0)
            assert len(left["filtered"]) == metrics.get("training/filter_groups/evicted_samples", 0)
            queue.kv_clear("train", batch.keys)
    assert told == counted > 0

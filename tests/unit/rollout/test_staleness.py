"""The bound of the ages: deadlines, groups that may be taken or are begun anew, and which tokens are too old."""

import itertools
import random
from typing import Any

import numpy as np
import pytest

from verl_multiturn.config import read_settings
from verl_multiturn.errors import ConfigError
from verl_multiturn.rollout.groups.staleness import StalenessBound, earliest, may_take, to_reroll, too_old


def test_the_deadline_follows_from_the_oldest_token() -> None:
    assert StalenessBound(2, "wait").deadline(dispatched=5) == 7  # its tokens have the version 4 or a later one
    assert StalenessBound(2, "wait").deadline(dispatched=5, oldest=6) == 9  # it waited for its first token
    assert StalenessBound(0, "wait").deadline(dispatched=1) == 1


def test_the_age_of_a_trained_token_is_bounded() -> None:
    versions = np.array([-1, 0, 2, 3, 4, 5, -1])
    assert too_old(versions, 6, StalenessBound(2, "mask")).tolist() == [True, True, True, False, False, False, True]
    assert too_old(versions, 6, StalenessBound(0, "mask")).tolist() == [True, True, True, True, True, False, True]
    # Before there can be old tokens, those of an unknown version are still too old.
    assert too_old(np.array([-1, 0]), 1, StalenessBound(4, "mask")).tolist() == [True, False]


def test_the_earliest_deadlines_go_first() -> None:
    assert earliest({"a": 4, "b": 2, "c": 3, "d": 2}, 3) == ["b", "d", "c"]


@pytest.mark.parametrize(
    ("finished", "unfinished", "allowed"),
    [
        ([9, 9], [8, 8, 8], False),  # step 8 could take only 2 of the 3
        ([9, 9], [8, 8, 9], True),
        ([8, 9], [8, 8, 9], True),
        ([7, 7], [8, 8, 8], True),  # waiting cannot help: these two are first in any case
        ([9, 9], [7], False),  # the unfinished one has to be trained now
        ([9, 9], [], True),
        ([9, 9, 9], [9, 9, 9, 9], True),
        ([9, 9, 9], [8, 9, 9, 9], False),  # 5 stay, and steps 8 and 9 take 4
    ],
)
def test_what_stays_can_meet_its_deadline(finished: list[int], unfinished: list[int], allowed: bool) -> None:
    assert may_take(finished, unfinished, count=2, step=7, left=0, batch_size=2) is allowed


def test_the_rest_of_a_step_counts() -> None:
    """A step that samples twice may leave in its first sample groups that are due in its second."""
    assert may_take([9], [7], count=1, step=7, left=1, batch_size=2)
    assert not may_take([9], [7], count=1, step=7, left=0, batch_size=2)


def _feasible(deadlines: list[int], step: int, left: int, batch_size: int) -> bool:
    """Find by trying every order whether all groups can be trained in time; `step` takes `left` more."""
    for order in itertools.permutations(deadlines):
        slots = [step] * left + [step + 1 + i // batch_size for i in range(len(order))]
        if all(slot <= deadline for slot, deadline in zip(slots, order, strict=False)):
            return True
    return False


def test_may_take_agrees_with_trying_every_order() -> None:
    rng = random.Random(0)
    answers = set()
    for _ in range(2000):
        finished = [rng.randint(3, 6) for _ in range(rng.randint(2, 4))]
        unfinished = [rng.randint(3, 6) for _ in range(rng.randint(1, 3))]
        left = rng.randint(0, 1)
        allowed = may_take(finished, unfinished, count=2, step=3, left=left, batch_size=2)
        stay = sorted(finished)[2:] + unfinished
        cannot_help = min(unfinished) >= sorted(finished)[1]
        assert allowed == (cannot_help or _feasible(stay, 3, left, 2)), (finished, unfinished, left)
        answers.add((allowed, cannot_help))
    assert answers == {(True, True), (True, False), (False, False)}


def test_late_groups_are_begun_anew_three_times() -> None:
    def tag(status: str, dispatched: int, **more: int) -> dict[str, Any]:
        return {"is_prompt": True, "status": status, "global_steps": dispatched, **more}

    tags = {
        "late": tag("running", 3),
        "later": tag("pending", 1, rerolls=2),
        "in time": tag("running", 4),
        "finished": tag("finished", 1),
        "failed": tag("failure", 1),
        "slow every time": tag("running", 1, rerolls=3),
    }
    assert to_reroll(tags, step=6, bound=StalenessBound(2, "reroll")) == ["late", "later"]


@pytest.mark.parametrize("value", [-1, 1.5, 1.0, True, "2"])
def test_the_bound_is_a_whole_number(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"custom\.multiturn\.max_staleness: .*got " + repr(value)):
        read_settings({"max_staleness": value})
    assert read_settings({"max_staleness": 2}).max_staleness == 2
    assert read_settings({}).max_staleness is None


def test_the_strategy_is_a_known_one() -> None:
    assert read_settings({}).staleness_strategy == "reroll"
    with pytest.raises(ConfigError, match=r"staleness_strategy: Input should be 'drop', 'wait', 'mask' or 'reroll'"):
        read_settings({"staleness_strategy": "evict"})

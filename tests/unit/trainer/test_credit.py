"""Rewards of the completions of a session: the three values of `proxy.credit`."""

import random
import statistics

import numpy as np
import pytest

from verl_multiturn.advantages.turns import GroupMember, of_completions, of_conversations, of_discounted
from verl_multiturn.rollout.turn import Turn

BRANCHES = GroupMember([Turn(0), Turn(1, 1.0, parent=0), Turn(2, parent=0)])


def test_branches_do_not_pay_for_each_other() -> None:
    assert of_completions([BRANCHES, GroupMember([Turn(0)])], std=False) == [[0.0, 0.5, -0.5], [-0.5]]


def test_the_sessions_outcome_is_that_of_all_its_ends() -> None:
    planner = GroupMember([Turn(0), Turn(1), Turn(2), Turn(3, parent=1), Turn(4, parent=0)], outcome=1.0)
    made = of_completions([planner, GroupMember([Turn(0)])], gamma=0.5, std=False)
    assert made == [[0.0, 0.0, 0.5, 0.5, 0.5], [-0.5]]


def test_the_order_of_arrival_changes_nothing() -> None:
    turned = GroupMember([Turn(0), Turn(2, 1.0, parent=0), Turn(1, parent=0)])
    other = GroupMember([Turn(0)], outcome=3.0)
    first, second = of_completions([BRANCHES, other]), of_completions([turned, other])
    assert first == second


def test_sessions_of_one_score_teach_nothing() -> None:
    """Their completions earned less than a session: divided by no deviation, that would be endless."""
    both = [
        GroupMember([Turn(0, 0.1), Turn(1, 0.2)], outcome=0.7),
        GroupMember([Turn(0, 0.2), Turn(1, 0.1)], outcome=0.7),
    ]
    assert of_completions(both) == [[0.0, 0.0], [0.0, 0.0]]
    assert of_completions(both, std=False)[0] == pytest.approx([-0.2, -0.1])


@pytest.mark.parametrize("score", [0.3, 1.0, 10.3, 100.1, -12_345.6])
def test_scores_that_differ_by_the_rounding_of_32_bits_are_the_same(score: float) -> None:
    """The trainer has rewards with 32 bits. A score that is split over tokens is rounded otherwise than a whole one."""
    whole = GroupMember([Turn(0)], outcome=float(np.float32(score)))
    parts = [float(np.float32(part)) for part in (0.1, 0.7, score - 0.8)]
    split = GroupMember([Turn(0, parts[0]), Turn(1, parts[1], parent=0)], outcome=parts[2])
    assert split.reward != whole.reward
    for estimate in (of_conversations, of_completions, of_discounted):
        assert estimate([whole, split, whole]) == [[0.0], [0.0, 0.0], [0.0]]


def test_completions_that_begin_alone() -> None:
    alone = GroupMember([Turn(0, 1.0), Turn(1), Turn(2)], outcome=1.0)
    assert of_completions([alone, GroupMember([Turn(0)])], std=False) == [[1.0, 0.0, 0.0], [-1.0]]


def test_a_discount_by_what_follows_in_the_row() -> None:
    row = GroupMember([Turn(0, after=2), Turn(1, after=1), Turn(2, after=0), Turn(3, after=0)], outcome=1.0)
    assert of_discounted([row, GroupMember([Turn(0)])], gamma=0.5, std=False) == [[0.125, 0.25, 0.5, 0.5], [-0.5]]


@pytest.mark.parametrize("estimate", [of_completions, of_discounted])
def test_invalid_sessions_are_left_out(estimate: object) -> None:
    assert callable(estimate)
    broken = GroupMember([Turn(0, 9.0)], valid=False, outcome=9.0)
    other = GroupMember([Turn(0)])
    alone = estimate([BRANCHES, other], gamma=0.5)
    assert estimate([BRANCHES, broken, other], gamma=0.5) == [alone[0], [0.0], alone[1]]
    assert estimate([broken, BRANCHES], gamma=0.5) == [[0.0], [0.0, 0.0, 0.0]]


def random_session(draw: random.Random) -> GroupMember:
    turns: list[Turn] = []
    for number in range(draw.randint(1, 12)):
        parent = draw.choice([None, *range(number)]) if number else None
        turns.append(
            Turn(number, draw.choice([0.0, 0.0, draw.uniform(-2, 2)]), parent=parent, after=draw.randint(0, 5))
        )
    draw.shuffle(turns)
    return GroupMember(turns, outcome=draw.uniform(-1, 1))


def naive(group: list[GroupMember], credit: str, gamma: float) -> list[list[float]]:
    """Compute the same from the definition, by recursion."""
    scores = [played.outcome + sum(turn.earned or 0.0 for turn in played.turns) for played in group]
    mean, deviation = statistics.mean(scores), statistics.stdev(scores) + 1e-6

    def earned(played: GroupMember, turn: Turn) -> float:
        children = [each for each in played.turns if each.parent == turn.number]
        if not children:
            return (turn.earned or 0.0) + played.outcome
        return (turn.earned or 0.0) + gamma * statistics.mean(earned(played, child) for child in children)

    made = []
    for played, score in zip(group, scores, strict=True):
        if credit == "completion":
            made.append([(earned(played, turn) - mean) / deviation for turn in played.turns])
        else:
            power = gamma if credit == "discounted" else 1.0
            made.append([(score - mean) / deviation * power**turn.after for turn in played.turns])
    return made


def test_an_independent_computation_over_random_forests() -> None:
    draw = random.Random(0)
    for _ in range(200):
        group, gamma = [random_session(draw) for _ in range(draw.randint(2, 6))], draw.uniform(0, 1)
        for credit, made in (
            ("session", of_conversations(group)),
            ("discounted", of_discounted(group, gamma)),
            ("completion", of_completions(group, gamma)),
        ):
            for own, expected in zip(made, naive(group, credit, gamma), strict=True):
                assert own == pytest.approx(expected, abs=1e-6), credit

"""The mathematics of `mt_grpo`, `mt_turns` and `mt_gigpo`."""

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest

from tests.long.interactions import interaction_advantages as benchmark
from verl_multiturn.advantages.turns import Advantages, GroupMember, of_conversations, of_states, of_turns
from verl_multiturn.rollout.turn import Turn


def played(*rewards: float, states: str = "", valid: bool = True) -> GroupMember:
    names = [*states, *[None] * len(rewards)]
    return GroupMember([Turn(number, reward, names[number]) for number, reward in enumerate(rewards)], valid)


GROUP = [played(0.0, 1.0), played(0.0, 0.0, 0.0), played(0.5)]


def test_conversations_are_compared_once_each_whatever_their_number_of_turns() -> None:
    assert of_conversations(GROUP, std=False) == [[0.5, 0.5], [-0.5, -0.5, -0.5], [0.0]]
    made = of_conversations(GROUP)
    assert made[0] == pytest.approx([1.0, 1.0], abs=1e-5)  # the sample's deviation is 0.5


def test_a_return_to_go_less_the_mean_of_the_whole_group() -> None:
    assert of_turns([played(0.0, 1.0), played(0.0)]) == [[0.5, 0.5], [-0.5]]
    group = [played(1.0, 2.0), played(0.0, 0.0, 4.0), played(-1.0), played(3.0)]
    returns = [[2.0, 2.0], [1.0, 2.0, 4.0], [-1.0], [3.0]]
    means = [5 / 4, 4 / 4, 4 / 4]
    expected = [[value - means[turn] for turn, value in enumerate(own)] for own in returns]
    for made, own in zip(of_turns(group, gamma=0.5), expected, strict=True):
        assert made == pytest.approx(own)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
def test_a_reward_at_the_end_is_discounted_by_the_turns_after(gamma: float) -> None:
    """The reward r is r * gamma^(T - i) for turn i of T, as in Kimi-Researcher, less the group's mean of it."""
    draw = random.Random(0)
    rewards = [draw.uniform(-1, 1) for _ in range(6)]
    lengths = [draw.randint(1, 7) for _ in range(6)]
    made = of_turns([played(*[0.0] * (last - 1), r) for r, last in zip(rewards, lengths, strict=True)], gamma)

    def decayed(j: int, i: int) -> float:
        return rewards[j] * gamma ** (lengths[j] - i) if i <= lengths[j] else 0.0

    for j, own in enumerate(made):
        expected = [decayed(j, i) - sum(decayed(k, i) for k in range(6)) / 6 for i in range(1, lengths[j] + 1)]
        assert own == pytest.approx(expected, abs=1e-12)


def test_what_only_rounding_tells_apart_is_equal() -> None:
    """A batch holds rewards as float32, in which 33.3 + 33.3 + 33.3 and 99.9 differ."""
    single = [33.29999923706055] * 3  # 33.3 as float32, and 99.9
    group = [played(*single, states="sab"), played(99.9000015258789, states="s"), played(*single, states="sab")]
    nothing = [[0.0] * 3, [0.0], [0.0] * 3]
    assert of_conversations(group) == nothing
    assert of_states(group, std=True) == nothing


@pytest.mark.parametrize("estimate", [of_conversations, of_turns, of_states])
def test_invalid_conversations_are_left_out(estimate: benchmark.Estimator) -> None:
    broken = played(-3.0, 9.0, 9.0, 9.0, states="aaaa", valid=False)
    group = [played(0.0, 1.0, states="ab"), played(0.0, 0.0, 0.0, states="aba")]
    alone = estimate(group)
    assert any(value for own in alone for value in own)
    assert estimate([group[0], broken, group[1]]) == [alone[0], [0.0] * 4, alone[1]]
    assert estimate([broken, group[1], broken]) == [[0.0] * 4, [0.0] * 3, [0.0] * 4]
    assert estimate([]) == []


@pytest.mark.parametrize("estimate", [of_conversations, of_turns, of_states])
def test_only_the_numbers_of_turns_say_their_order(estimate: benchmark.Estimator) -> None:
    group = [played(0.1, 1.0, states="ab"), played(0.2, 0.0, 0.5, states="aba")]
    turned = [GroupMember(each.turns[::-1]) for each in group]
    assert [own[::-1] for own in estimate(turned)] == estimate(group)


def test_a_missing_turn_keeps_its_distance() -> None:
    """A turn whose row was dropped still lies between the others."""
    with_a_gap = GroupMember([Turn(0), Turn(2, 1.0)])
    assert of_turns([with_a_gap, played(0.0)], gamma=0.5)[0] == [0.25 / 2, 0.5]


def test_equal_states_are_compared_and_unknown_ones_are_not() -> None:
    win, loss = played(0.0, 1.0, states="ab"), played(0.0, 0.0, 0.0, states="aca")
    assert of_states([win, loss], 0.5, across_rows=False) == [
        pytest.approx([0.5 + 0.5 - 0.5 / 3, 0.5]),
        pytest.approx([-0.5 - 0.5 / 3, -0.5, -0.5 - 0.5 / 3]),
    ]
    unknown = [played(0.0, 1.0), played(0.0, 0.0, 0.0)]
    assert of_states(unknown, 0.5) == of_conversations(unknown, std=False)
    assert of_states([win, loss], 0.5, weight=0.0) == of_conversations(unknown, std=False)
    assert of_states([win, loss], weight=0.0, std=True) == of_conversations(unknown)


def test_the_published_numbers_and_plain_numpy() -> None:
    assert benchmark.recorded_error() < 1e-12
    assert benchmark.random_error(100) < 1e-6


def test_the_gradient_is_exact_where_the_policy_decides_when_to_stop() -> None:
    assert benchmark.gradient_error(of_turns) < 1e-6
    assert benchmark.gradient_error(of_conversations_without_a_deviation) < 1e-6


def of_conversations_without_a_deviation(group: Sequence[GroupMember]) -> Advantages:
    return of_conversations(group, std=False)


def of_those_still_there(group: Sequence[GroupMember]) -> Advantages:
    """Compare a return to go with the mean of those alone that reached the turn."""
    returns = [[sum(turn.earned or 0.0 for turn in each.turns[k:]) for k in range(len(each.turns))] for each in group]
    reached: dict[int, list[float]] = defaultdict(list)
    for own in returns:
        for number, value in enumerate(own):
            reached[number].append(value)
    means = {number: sum(values) / len(values) for number, values in reached.items()}
    return [[value - means[number] for number, value in enumerate(own)] for own in returns]


@pytest.mark.parametrize("biased", [benchmark.control, of_those_still_there])
def test_other_baselines_are_biased_there(biased: benchmark.Estimator) -> None:
    """The test above can fail."""
    assert benchmark.gradient_error(biased, scaled=True) > 0.1

"""Pools of data rows: which are drawn again, and which are passed over (`rollout/groups/difficulty.py`)."""

import json

import pytest

from verl_multiturn.rollout.groups.difficulty import MOST_AGAIN, Pools

N = 8


def pools(*groups: tuple[int, int]) -> Pools:
    """Return pools of rows 0, 1, … whose groups brought `(right, of)`; a group has a signal where both kinds came."""
    made = Pools(N)
    for position, (right, of) in enumerate(groups):
        made.draw(f"u{position}", position)
        made.judge(f"u{position}", right, of, 0 < right < of, 3)
    return made


def test_every_second_prompt_is_fresh_and_the_others_are_mixed_rows() -> None:
    made = pools((8, 8), (4, 8), (7, 8), (0, 8))
    assert [made.again() for _ in range(4)] == [1, None, 1, None]
    made.draw("again", 1)
    assert [made.again() for _ in range(3)] == [2, None, 2]  # row 1 is in a group
    assert made.metrics() == {"again": 4, "passed_over": 0, "pool/mixed": 2, "pool/right": 1, "pool/wrong": 1}
    made.begin_step()
    assert made.metrics()["again"] == 0


def test_the_chance_of_a_signal_follows_from_the_recent_right_share() -> None:
    made = pools((4, 8), (7, 8), (8, 8))
    assert made.chance(0) == pytest.approx(1 - 2 * 0.5**8)
    assert made.chance(1) == pytest.approx(1 - 0.8**8 - 0.2**8)
    made.draw("u", 2)
    made.judge("u", 4, 8, True, 4)
    assert (made.seen[2].right, made.seen[2].of, made.seen[2].step) == (8.0, 12.0, 4)


def test_a_row_is_drawn_again_a_few_times_only() -> None:
    made = pools((4, 8))
    drawn = [made.again() for _ in range(2 * MOST_AGAIN + 4)]
    assert drawn.count(0) == MOST_AGAIN
    assert not made.passes_over(0)  # the data loader gives it anew
    assert 0 in (made.again(), made.again())


def test_a_row_without_signal_is_passed_over_once() -> None:
    made = pools((8, 8), (0, 8), (4, 8))
    assert [made.passes_over(0) for _ in range(4)] == [True, False, True, False]
    assert [made.passes_over(2), made.passes_over(9)] == [False, False]
    made.draw("running", 1)
    assert [made.passes_over(1) for _ in range(2)] == [True, True]
    assert made.metrics()["passed_over"] == 4


def test_groups_that_leave_or_are_begun_anew() -> None:
    made = Pools(N)
    for uid, position in (("a", 1), ("b", 2)):
        made.draw(uid, position)
    made.rename({"a": "c", "gone": "d"})
    made.drop(["b", "e"])
    assert made.drawn == {"c": 1}
    made.judge("b", 4, 8, True, 3)
    assert made.seen == {}


def test_pools_go_on_from_a_checkpoint() -> None:
    made = pools((4, 8), (7, 8), (8, 8), (0, 3))
    made.again()
    made.passes_over(2)
    made.draw("u", 7)
    other = Pools(N)
    other.restore(json.loads(json.dumps(made.state())))
    assert other.state() == made.state()
    assert [other.again() for _ in range(6)] == [made.again() for _ in range(6)]
    with pytest.raises(TypeError):
        other.restore({"turn": 1, "seen": {"0": {"unknown": 1}}, "drawn": {}})


def test_what_a_checkpoint_does_not_bring_back_is_forgotten() -> None:
    made = pools((4, 8), (8, 8), (4, 8))
    made.draw("there", 1)
    made.draw("gone", 3)  # of a step that broke off in `sync`
    made.draw("behind", 9)
    made.keep({"there", "behind"}, rows=2)
    assert made.drawn == {"there": 1}
    assert set(made.seen) == {0, 1}
    assert not made.passes_over(3)


def test_a_row_whose_repeat_a_checkpoint_does_not_bring_back_may_be_drawn_as_often_as_before() -> None:
    made = pools((4, 8), (4, 8))
    for uid, row in (("gone", 0), ("there", 1)):
        assert made.again() == row
        made.draw(uid, row)
        assert made.again() is None
    made.keep({"there"}, rows=2)
    assert [made.seen[row].again for row in (0, 1)] == [0, 1]

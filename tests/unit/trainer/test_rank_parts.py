"""Each data-parallel rank gets whole groups, equally many rows, and about equally many tokens."""

from collections.abc import Callable

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


@pytest.fixture(scope="module")
def deal() -> Callable[..., list[list[int]]]:
    from verl_multiturn.verl_bridge.trainer.rank_parts import deal

    return deal


def test_rows_of_a_group_go_to_one_rank(deal: Callable[..., list[list[int]]]) -> None:
    assert deal("abab", [9, 1, 9, 1], 2) == [[0, 2], [1, 3]]


def test_long_groups_are_dealt_first(deal: Callable[..., list[list[int]]]) -> None:
    assert deal("aabbccdd", [8, 8, 6, 6, 4, 4, 2, 2], 2) == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_a_group_that_fits_nowhere_is_divided(deal: Callable[..., list[list[int]]]) -> None:
    assert deal("aaabbb", [1] * 6, 3) == [[0, 3], [1, 4], [2, 5]]


def test_rows_of_padding_fill_what_is_left(deal: Callable[..., list[list[int]]]) -> None:
    assert deal(["a", "a", "a", "pad 0", "b", "b", "b", "pad 1"], [5, 5, 5, 2, 5, 5, 5, 2], 2) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


def test_one_rank_has_all_rows_in_their_order(deal: Callable[..., list[list[int]]]) -> None:
    assert deal("abc", [1, 9, 5], 1) == [[0, 1, 2]]

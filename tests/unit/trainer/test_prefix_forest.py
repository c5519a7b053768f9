"""Rows become a forest in which each common prefix occurs once."""

import random

import numpy as np
import pytest

from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.prefix_tree import packing
from verl_multiturn.verl_bridge.prefix_tree.forest import PrefixForest, grow, sort_rows

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


def arrays(*rows: list[int]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int64) for row in rows]


def paths(forest: PrefixForest) -> list[list[int]]:
    """Return the ids that lead to the last token of each row, by the parents alone."""
    found = []
    for end, begin in zip(forest.ends, [0, *forest.ends[:-1]], strict=True):
        token, path = (int(forest.nodes[end - 1]), []) if end > begin else (-1, [])
        while token >= 0:
            path.append(int(forest.ids[token]))
            token = int(forest.parents[token])
        found.append(path[::-1])
    return found


def seen(forest: PrefixForest) -> list[list[int]]:
    """Return for each token those that its segment lets it see: ancestors, and its own up to it."""
    return [
        [*each.ancestors.tolist(), *range(each.start, token + 1)]
        for each in forest.segments
        for token in range(each.start, each.end)
    ]


def test_two_rows_share_their_prefix() -> None:
    forest = grow(arrays([1, 2, 3, 4], [1, 2, 5]))
    assert forest.ids.tolist() == [1, 2, 3, 4, 5]
    assert forest.positions.tolist() == [0, 1, 2, 3, 2]
    assert forest.parents.tolist() == [-1, 0, 1, 2, 1]
    assert forest.nodes.tolist() == [0, 1, 2, 3, 0, 1, 4]
    assert [(each.start, each.end, each.ancestors.tolist()) for each in forest.segments] == [(0, 4, []), (4, 5, [0, 1])]
    assert forest.branches.tolist() == [4]
    assert forest.edges.tolist() == [0, 1, 2, -1, 0, 5, -1]  # 5 is the first branch, behind five tokens


def test_one_row_is_itself() -> None:
    forest = grow(arrays([7, 8, 9]))
    assert forest.ids.tolist() == [7, 8, 9]
    assert forest.edges.tolist() == [0, 1, -1]
    assert len(forest.segments) == 1


def test_equal_rows_stand_once() -> None:
    forest = grow(arrays([4, 5], [4, 5], [4, 5]))
    assert forest.ids.tolist() == [4, 5]
    assert forest.nodes.tolist() == [0, 1, 0, 1, 0, 1]
    assert forest.edges.tolist() == [0, -1, 0, -1, 0, -1]


def test_a_row_that_is_another_ones_prefix_adds_nothing() -> None:
    forest = grow(arrays([1, 2, 3], [1, 2], [1]))
    assert forest.ids.tolist() == [1, 2, 3]
    assert forest.nodes.tolist() == [0, 1, 2, 0, 1, 0]
    assert forest.edges.tolist() == [0, 1, -1, 0, -1, -1]
    assert [(each.start, each.end) for each in forest.segments] == [(0, 3)]


def test_rows_of_different_temperatures_share_nothing() -> None:
    rows = arrays([1, 2, 3], [1, 2, 4])
    assert len(grow(rows, temperatures=[1.0, 1.0]).ids) == 4
    assert len(grow(rows, temperatures=[1.0, 0.7]).ids) == 6


def test_rows_at_different_positions_share_nothing() -> None:
    rows = arrays([1, 2], [1, 2])
    forest = grow(rows, positions=arrays([0, 1], [5, 6]))
    assert forest.ids.tolist() == [1, 2, 1, 2]
    assert forest.positions.tolist() == [0, 1, 5, 6]


def test_a_token_of_a_row_has_its_row() -> None:
    forest = grow(arrays([1, 3], [1, 2]))
    assert forest.ids.tolist() == [1, 2, 3]
    assert forest.rows.tolist() == [1, 1, 0]


def test_no_rows_and_empty_rows_are_no_tokens() -> None:
    assert len(grow([]).ids) == 0
    forest = grow(arrays([], [1, 2], []))
    assert forest.ids.tolist() == [1, 2]
    assert forest.ends.tolist() == [0, 2, 2]
    assert forest.edges.tolist() == [0, -1]


@pytest.mark.parametrize("seed", range(20))
def test_a_forest_holds_exactly_its_rows(seed: int) -> None:
    draw = random.Random(seed)
    rows = [[draw.randrange(2) for _ in range(draw.randrange(9))] for _ in range(draw.randrange(1, 30))]
    forest = grow(arrays(*rows))
    assert paths(forest) == rows
    assert len(forest.ids) == len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})
    for token, visible in enumerate(seen(forest)):
        chain = [token]
        while forest.parents[chain[-1]] >= 0:
            chain.append(int(forest.parents[chain[-1]]))
        assert visible == chain[::-1]


def test_ten_thousand_segments() -> None:
    rows = [np.array([1, 2, 3, i, i + 1], dtype=np.int64) for i in range(10_000)]
    forest = grow(rows)
    assert len(forest.ids) == 3 + 2 * 10_000
    assert len(forest.segments) == 10_000
    assert len(forest.branches) == 9_999


def test_a_micro_batch_counts_a_common_prefix_once() -> None:
    rows = sort_rows(arrays([1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 5], [5, 6, 7, 9]))
    assert packing.count(rows, 10) == 1
    assert packing.count(rows, 9) == 2
    assert [sorted(part) for part in packing.divide(rows, 2)] == [[0, 2], [1, 3]]


def test_micro_batches_are_as_even_as_their_order_allows() -> None:
    rows = sort_rows(arrays(*([i] * 4 for i in range(6))))
    assert packing.count(rows, 20) == 2
    assert packing.divide(rows, 2) == [[0, 1, 2], [3, 4, 5]]  # not five rows and one


def test_more_micro_batches_than_needed_are_made_where_other_ranks_need_them() -> None:
    rows = sort_rows(arrays([1, 2, 3], [1, 2, 4], [9]))
    assert packing.divide(rows, 2) == [[0, 1], [2]]
    assert packing.divide(rows, 3) == [[0], [1], [2]]


def test_a_row_longer_than_a_micro_batch_is_refused() -> None:
    rows = sort_rows(arrays([1] * 9, [2]))
    with pytest.raises(ConfigError, match="a row has 9 tokens, and a micro-batch may have 8; raise"):
        packing.count(rows, 8)


@pytest.mark.parametrize("parts", range(1, 13))
def test_every_row_is_in_one_micro_batch(parts: int) -> None:
    draw = random.Random(parts)
    rows = sort_rows(arrays(*([draw.randrange(3) for _ in range(draw.randrange(1, 6))] for _ in range(12))))
    divided = packing.divide(rows, parts)
    assert len(divided) == parts
    assert all(divided)
    assert sorted(i for part in divided for i in part) == list(range(12))


def test_a_limit_in_rows_becomes_the_tokens_of_verls_largest_micro_batch() -> None:
    assert packing.largest(np.array([5, 1, 1, 7, 2]), 2) == 8

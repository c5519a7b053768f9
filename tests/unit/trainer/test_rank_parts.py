"""Each data-parallel rank gets whole groups, equally many rows, and about equally many tokens."""

import random
from typing import Any

import pytest

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


@pytest.fixture
def deal() -> Any:
    from verl_multiturn.verl_bridge.trainer.rows.rank_parts import deal

    return deal


def test_rows_of_a_group_go_to_one_rank(deal: Any) -> None:
    assert deal("abab", [9, 1, 9, 1], 2) == [[0, 2], [1, 3]]


def test_rows_of_a_group_are_neighbours_so_that_one_update_takes_them(deal: Any) -> None:
    # As verl's balance may leave four groups on two ranks, in two updates each.
    assert deal("abcdbadc", [1] * 8, 2) == [[0, 5, 2, 7], [1, 4, 3, 6]]


def test_long_groups_are_dealt_first(deal: Any) -> None:
    assert deal("aabbccdd", [8, 8, 6, 6, 4, 4, 2, 2], 2) == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_a_group_that_fits_nowhere_is_divided(deal: Any) -> None:
    assert deal("aaabbb", [1] * 6, 3) == [[0, 3], [1, 4], [2, 5]]


def test_rows_of_padding_fill_what_is_left(deal: Any) -> None:
    assert deal(["a", "a", "a", "pad 0", "b", "b", "b", "pad 1"], [5, 5, 5, 2, 5, 5, 5, 2], 2) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


def test_silent_groups_are_spread_over_the_ranks_and_their_updates(deal: Any) -> None:
    assert deal("aabbccdd", [1] * 8, 2, "ac") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert deal("aabbccdd", [9, 9, 9, 9, 1, 1, 1, 1], 1, "cd") == [[0, 1, 4, 5, 2, 3, 6, 7]]


@pytest.mark.parametrize(("ranks", "updates"), [(4, 1), (8, 1), (8, 4)])
def test_the_rows_of_half_the_groups_leave_the_update_if_these_are_silent(deal: Any, ranks: int, updates: int) -> None:
    from verl_multiturn.verl_bridge.trainer.rows.skipped_rows import TAUGHT, TRAINED, thin

    draw = random.Random(ranks * updates)
    groups = [group for group in range(64) for _ in range(8)]
    silent = set(draw.sample(range(64), 32))
    draw.shuffle(groups)
    dealt = deal(groups, [draw.randrange(100, 1000) for _ in groups], ranks, silent)
    assert [len(rows) for rows in dealt] == [512 // ranks] * ranks
    worth = [TRAINED if groups[row] in silent else TAUGHT for rows in dealt for row in rows]
    thinned = thin(worth, 512 // updates, ranks, 8)
    assert thinned is not None
    assert len(thinned.kept) == 256


@pytest.mark.parametrize("vendor", ["verl_multiturn", "verl_multiturn_strict"])
def test_workers_have_our_engine_if_the_choice_came_to_them(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import OmegaConf

    from verl_multiturn.errors import ConfigError
    from verl_multiturn.verl_bridge.names import ENGINE_CHOICE
    from verl_multiturn.verl_bridge.trainer.rows.rank_parts import has_our_engine

    config = OmegaConf.create()
    assert not has_our_engine(config)
    OmegaConf.update(config, ENGINE_CHOICE, vendor, force_add=True)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", vendor)
    assert has_our_engine(config)
    monkeypatch.delenv("VERL_ENGINE_VENDOR")
    if vendor == "verl_multiturn":
        assert not has_our_engine(config)
    else:
        with pytest.raises(ConfigError, match="VERL_ENGINE_VENDOR is None in the trainer's environment"):
            has_our_engine(config)


def test_one_rank_has_all_rows_in_their_order(deal: Any) -> None:
    assert deal("abc", [1, 9, 5], 1) == [[0, 1, 2]]

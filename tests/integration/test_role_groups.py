"""Advantages of conversations with roles: each (prompt, role) is a group."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from verl_multiturn.advantages.estimators import load_estimator
from verl_multiturn.config import read_settings
from verl_multiturn.rows.keys import RowKey

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

Row = tuple[str, dict[str, Any], list[float]]
"""A row's name, its stats, and the rewards of its tokens; all of them are trained."""


def turn(number: int, role: str | None, place: int, parent: int | None = None) -> dict[str, Any]:
    """Return a turn of two tokens, the `place`th of its row."""
    return {"turn": number, "parent": parent, "start": 2 * place, "end": 2 * place + 2, "reward": None, "role": role}


def game(session: int, white: float, uid: str = "u", valid: bool = True, of_completions: bool = False) -> list[Row]:
    """Return the rows of a game of two completions a side; `white` is the result of white, black's is its negative."""
    rows: list[Row] = []
    for row, (role, result) in enumerate({"white": white, "black": -white}.items()):
        outcome = 0.0 if of_completions else result
        told = {
            "valid": valid,
            "turns": [turn(row, role, 0), turn(row + 2, role, 1, row)],
            "session": {"role": role, "outcome": outcome, "outside": []},
        }
        rows.append((f"{uid}_{session}_{row}", told, [0.0, 0.0, 0.0, result]))
    return rows


def advantages(rows: Sequence[Row], std: bool = False, **settings: Any) -> dict[str, list[float]]:
    """Return the advantages of each row's tokens by `mt_grpo`, each value once."""
    import torch

    from verl_multiturn.verl_bridge.trainer.rows.advantages import _compute, known_rows

    keys = [RowKey.parse(name) for name, _, _ in rows]
    batch: Any = SimpleNamespace(
        keys=keys, padding={}, stats={key: own for key, (_, own, _) in zip(keys, rows, strict=True)}
    )
    rewards = torch.tensor([own for _, _, own in rows])
    with known_rows(batch, load_estimator("mt_grpo", read_settings(settings), std)):
        made, _ = _compute("mt_grpo", rewards, torch.ones_like(rewards))
    return {name: sorted(set(own.tolist())) for (name, _, _), own in zip(rows, made, strict=True)}


@pytest.mark.parametrize("credit", ["session", "completion"])
def test_a_zero_sum_game_has_a_signal_for_each_side(credit: str) -> None:
    """Together both sides of each game earn 0; with one group for all of them nothing could be learned."""
    games = [row for i, white in enumerate((1.0, -1.0, 1.0, 1.0)) for row in game(i, white)]
    expected = {}
    for i, white in enumerate((0.5, -1.5, 0.5, 0.5)):
        expected |= {f"u_{i}_0": [white], f"u_{i}_1": [-white]}
    assert advantages(games, proxy={"credit": credit}) == expected
    divided = advantages(games, std=True, proxy={"credit": credit})
    for name, own in expected.items():
        assert divided[name] == pytest.approx(own, abs=2e-6)  # the sample's deviation is 1


def test_without_roles_a_zero_sum_game_has_no_signal() -> None:
    games = [game(i, white, of_completions=True) for i, white in enumerate((1.0, -1.0, 1.0, 1.0))]
    for (_, first, _), (_, last, _) in games:
        del first["session"]
        for each in (*first["turns"], *last["turns"], last["session"]):
            each["role"] = None
    made = advantages([row for rows in games for row in rows])
    assert {value for own in made.values() for value in own} == {0.0}


def test_an_invalid_game_is_invalid_on_both_sides() -> None:
    broken = game(2, 9.0)
    broken[0][1]["valid"] = False  # one of its rows
    made = advantages([*game(0, 1.0), *game(1, 0.0), *broken])
    assert made == {"u_0_0": [0.5], "u_0_1": [-0.5], "u_1_0": [-0.5], "u_1_1": [0.5], "u_2_0": [0.0], "u_2_1": [0.0]}


def test_a_game_is_a_member_of_the_groups_of_its_own_roles_alone() -> None:
    """White's only row of the second game is missing: nothing of it counts among the whites."""
    made = advantages([*game(0, 1.0), game(1, 0.5)[1], *game(2, 0.0), *game(0, 1.0, "v"), *game(1, 1.0, "v")])
    assert {name: own for name, own in made.items() if name.startswith("u")} == {
        "u_0_0": [0.5], "u_2_0": [-0.5], "u_0_1": [-0.5], "u_1_1": [0.0], "u_2_1": [0.5],
    }  # fmt: skip
    assert {value for name, own in made.items() if name.startswith("v") for value in own} == {0.0}


def test_completions_of_a_role_outside_its_rows_count_in_that_role() -> None:
    first, second = game(0, 0.0, of_completions=True), game(1, 0.0, of_completions=True)
    first[0][1]["session"]["outside"] = [{"turn": 8, "reward": 1.0, "parent": None}]
    first[0][2][-1] += 1.0  # the reward of a completion without tokens lies on the last token of its role's last row
    made = advantages([*first, *second], proxy={"credit": "session"})
    assert made == {"u_0_0": [0.5], "u_0_1": [0.0], "u_1_0": [-0.5], "u_1_1": [0.0]}
    made = advantages([*first, *second], proxy={"credit": "completion"})
    assert made["u_0_0"] == [-0.5]  # it continued none of those in the row, which earned nothing


def test_the_order_of_the_batch_changes_nothing() -> None:
    rows = [row for i, white in enumerate((0.3, -1.0, 0.7)) for row in game(i, white)]
    assert advantages(rows[::-1], std=True) == advantages(rows, std=True)

"""Verdicts on BFCL's dialogues are those of the package, turn by turn: on some dialogues, and on all of them."""

import pytest

from tests.long.task_sets.bfcl import PLAYS, run


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("every", "seed"), [(25, 7), pytest.param(1, 0, marks=pytest.mark.long)])
def test_verdicts_are_the_packages_own(every: int, seed: int) -> None:
    found = run(every, seed)
    assert found["different"] == 0
    assert found["gold_right"] == found["dialogues"] >= 800 // every
    assert found["played"] == len(PLAYS) * found["dialogues"]

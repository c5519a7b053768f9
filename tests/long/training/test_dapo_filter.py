"""DAPO's filter takes the groups that a plain count takes: in some steps of random worlds, and in many."""

import pytest

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("case", range(5))
@pytest.mark.parametrize(("steps", "seed"), [(12, 1), pytest.param(200, 0, marks=pytest.mark.long)])
def test_random_groups_are_those_of_a_plain_count(case: int, is_async: bool, steps: int, seed: int) -> None:
    from tests.long.training.dapo_filter import BATCH, CASES, play

    found = play(CASES[case], steps, is_async, seed)
    assert (found["steps"], found["wrong"], found["endless"], found["raised"]) == (steps, 0, 0, 0)
    if CASES[case].name == "all invalid":
        # Each step replaces a batch of them, and trains another one.
        assert (found["too_few_valid"], found["kept"]) == (steps * BATCH, steps * BATCH)
    else:
        assert found["groups"] > steps * BATCH


def test_verls_own_filter_takes_others() -> None:
    """The control: it sees a filter that compares rows."""
    from tests.long.training.dapo_filter import CASES, play

    some, acc, none = (play(CASES[case], 12, True, seed=1, is_ours=False) for case in (1, 2, 4))
    assert some["wrong"] > 0
    assert acc["raised"] == 1
    assert none["endless"] == 1

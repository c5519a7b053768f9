"""pass@k of a validation, in literal numbers."""

from typing import Any

import pytest

from verl_multiturn.observe.pass_at_k import passed_shares, passes


def stats(group: str, *scores: float | None) -> list[dict[str, Any]]:
    """Return conversations of a prompt; None stands for an invalid one."""
    return [{"group": group, "valid": score is not None, "score": score or 0.0, "reported": {}} for score in scores]


def test_a_validation_with_several_samples() -> None:
    found = passed_shares([*stats("u", 1.0, 0.0, 0.0, 0.0), *stats("v", 1.0, 1.0, 0.0, 0.0)])
    assert found == {"pass@1": 0.375, "pass@2": pytest.approx((0.5 + 5 / 6) / 2), "pass@4": 1.0}


def test_that_of_all_samples_is_there_too() -> None:
    assert passed_shares(stats("u", 0.0, 0.0, 1.0)) == {
        "pass@1": pytest.approx(1 / 3),
        "pass@2": pytest.approx(2 / 3),
        "pass@3": 1.0,
    }


def test_an_invalid_conversation_is_no_sample() -> None:
    found = passed_shares([*stats("u", 1.0, None, None), *stats("v", 1.0, 0.0, None)])
    # No prompt has three, and only v has two.
    assert found == {"pass@1": 0.75, "pass@2": 1.0}
    assert passed_shares(stats("u", None, None)) == {}


def test_one_sample_of_each_prompt_says_nothing_new() -> None:
    assert passed_shares([*stats("u", 1.0), *stats("v", 0.0)]) == {}
    assert passed_shares([]) == {}


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"score": 0.5}, True),
        ({"score": 0.0}, False),
        ({"score": -1.0}, False),
        ({"score": 1.0, "reported": {"acc": 0.0}}, False),
        ({"score": 1.0, "reported": {"acc": 1.0}}, True),
        # The rewards of an agent, a user or tools in the place of compute_score.
        ({"score": None, "conversation": {"score": 0.25}}, True),
        ({"score": None, "conversation": {"score": 0.0}}, False),
        ({"score": None}, False),
    ],
)
def test_what_counts_as_a_pass(known: dict[str, Any], expected: bool) -> None:
    assert passes(known) is expected

"""pass@k of a validation, in literal numbers."""

from typing import Any

import pytest

from verl_multiturn.observe.pass_at_k import passed_shares
from verl_multiturn.rows.reward_numbers import ScoreRange


def stats(group: str, *scores: float | None) -> list[dict[str, Any]]:
    """Return conversations of a prompt; None means an invalid one."""
    return [
        {"group": group, "valid": score is not None, "conversation": {"score": score or 0.0}, "reported": {}}
        for score in scores
    ]


def shares(*groups: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Return pass@k, and the number of prompts that have k."""
    found = passed_shares([each for group in groups for each in group], ScoreRange())
    return (
        {name: value for name, value in found.items() if not name.endswith("/prompts")},
        {name: value for name, value in found.items() if name.endswith("/prompts")},
    )


def test_a_validation_with_several_samples() -> None:
    found, prompts = shares(stats("u", 1.0, 0.0, 0.0, 0.0), stats("v", 1.0, 1.0, 0.0, 0.0))
    assert found == {"pass@1": 0.375, "pass@2": pytest.approx((0.5 + 5 / 6) / 2), "pass@4": 1.0}
    assert prompts == {"pass@1/prompts": 2, "pass@2/prompts": 2, "pass@4/prompts": 2}


def test_that_of_all_samples_is_there_too() -> None:
    assert shares(stats("u", 0.0, 0.0, 1.0))[0] == {
        "pass@1": pytest.approx(1 / 3),
        "pass@2": pytest.approx(2 / 3),
        "pass@3": 1.0,
    }


def test_an_invalid_conversation_is_no_sample() -> None:
    found, prompts = shares(stats("u", 1.0, None, None), stats("v", 1.0, 0.0, None))
    # No prompt has three, and only v has two.
    assert found == {"pass@1": 0.75}
    assert prompts == {"pass@1/prompts": 2, "pass@2/prompts": 1, "pass@3/prompts": 0}
    assert shares(stats("u", None, None)) == ({}, {"pass@1/prompts": 0, "pass@2/prompts": 0})


def test_what_few_prompts_have_is_no_figure() -> None:
    # The two prompts that are easy have eight valid ones; each of the others lost one to an outage.
    lost = [stats(f"u{number}", *[0.0] * 7, None) for number in range(98)]
    found, prompts = shares(*lost, stats("v", 1.0, *[0.0] * 7), stats("w", 1.0, *[0.0] * 7))
    assert found == {"pass@1": 0.0025, "pass@2": 0.005, "pass@4": pytest.approx(0.01)}
    assert prompts == {"pass@1/prompts": 100, "pass@2/prompts": 100, "pass@4/prompts": 100, "pass@8/prompts": 2}


@pytest.mark.parametrize(("lost", "is_shown"), [(0, True), (5, True), (6, False)])
def test_the_share_of_prompts_that_must_have_k(lost: int, is_shown: bool) -> None:
    groups = [stats(f"u{number}", 1.0, None if number < lost else 1.0) for number in range(100)]
    found, prompts = shares(*groups)
    assert ("pass@2" in found, prompts["pass@2/prompts"]) == (is_shown, 100 - lost)


def test_one_sample_of_each_prompt_says_nothing_new() -> None:
    assert passed_shares([*stats("u", 1.0), *stats("v", 0.0)], ScoreRange()) == {}
    assert passed_shares([], ScoreRange()) == {}


def test_who_passes_is_decided_by_the_validations_so_far() -> None:
    seen = ScoreRange()
    assert passed_shares(stats("u", 0.1, 0.1), seen)["pass@1"] == 1.0  # a run of one score, above 0
    assert passed_shares(stats("u", 0.1, 1.0), seen)["pass@1"] == 0.5
    assert passed_shares(stats("u", 0.1, 0.1), seen)["pass@1"] == 0.0


def test_what_the_reward_reported_says_who_passes() -> None:
    conversations = stats("u", 1.0, 0.0)
    for each, acc in zip(conversations, (0.0, 1.0), strict=True):
        each["reported"] = {"acc": acc}
    conversations[0]["conversation"]["score"] = 2.0  # the tools' rewards are in it
    assert passed_shares(conversations, ScoreRange())["pass@2"] == 1.0
    assert passed_shares(conversations, ScoreRange())["pass@1"] == 0.5

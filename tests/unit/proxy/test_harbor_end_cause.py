"""Whose it is that a trial of Harbor ended as it did."""

from dataclasses import replace

import pytest

from verl_multiturn.harnesses.ends import HarnessEndKind
from verl_multiturn.harnesses.harbor.trials.end_cause import TrialEvents, end_of

OVER = TrialEvents("over", rewards={"reward": 1.0})
CRASHED = TrialEvents("verifier", error="RewardFileNotFoundError: no reward.txt")


@pytest.mark.parametrize(
    ("story", "kind"),
    [
        (OVER, "reward"),
        (TrialEvents("environment", error="RuntimeError: no image", not_started="RuntimeError: no image"), "unjudged"),
        (TrialEvents("environment", late=True), "unjudged"),
        (TrialEvents("setup", error="RuntimeError: no network"), "unjudged"),
        (TrialEvents("agent", error="AgentTimeoutError", agent_failed=True), "failed"),
        (TrialEvents("agent", late=True, agent_failed=True), "failed"),
        (replace(OVER, agent_failed=True), "failed"),
        (TrialEvents("agent", agent_failed=True, agent_lost="outside"), "unjudged"),
        (replace(OVER, agent_lost="outside"), "unjudged"),
        (replace(OVER, agent_lost="inside"), "failed"),
        (replace(OVER, agent_lost="engine"), "outage"),
        (replace(CRASHED, verifier_lost="engine"), "outage"),
        (replace(CRASHED, verifier_lost="outside"), "unjudged"),
        (replace(CRASHED, not_started="EnvironmentStartTimeoutError"), "unjudged"),
        # A failed agent's state is not read: it failed, whatever the verifier then did.
        (replace(CRASHED, agent_failed=True, not_started="RuntimeError"), "failed"),
    ],
)
def test_whose_it_is(story: TrialEvents, kind: HarnessEndKind) -> None:
    end = end_of(story)
    assert end.kind == kind
    assert not end.needs_control
    assert bool(end.problem) == (kind != "reward")


@pytest.mark.parametrize(
    "story",
    [
        CRASHED,
        TrialEvents("verifier", error="VerifierTimeoutError"),
        replace(CRASHED, verifier_lost="inside"),
        TrialEvents("verifier", late=True),
        replace(OVER, rewards={}),
        replace(OVER, rewards={"speed": 1.0, "size": 0.0}),
        replace(OVER, rewards={"reward": float("nan")}),
        replace(OVER, rewards=None),
    ],
)
def test_what_a_model_can_have_caused_in_a_verifier_needs_a_control(story: TrialEvents) -> None:
    end = end_of(story)
    assert (end.kind, end.needs_control) == ("failed", True)


@pytest.mark.parametrize(
    ("rewards", "reward"), [({"reward": 0.5, "size": 9}, 0.5), ({"pass": 1}, 1.0), ({"reward": -1}, -1.0)]
)
def test_the_reward(rewards: dict[str, float], reward: float) -> None:
    assert end_of(replace(OVER, rewards=rewards)).reward == reward

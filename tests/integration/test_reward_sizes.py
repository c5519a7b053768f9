"""The largest rewards, in verl's own arithmetic of 32 bits; and the fate of a reward function's wrong score."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.utils.torch_functional import masked_whiten

from verl_multiturn.errors import ConfigError, RewardContractError
from verl_multiturn.rows.reward_numbers import LARGEST_REWARD, LARGEST_SCORE
from verl_multiturn.verl_bridge.loops import output as certified_output
from verl_multiturn.verl_bridge.loops.output import CertifiedOutput

pytestmark = pytest.mark.stack

ESTIMATORS: dict[str, Callable[..., Any]] = {
    "grpo": core_algos.compute_grpo_outcome_advantage,
    "grpo_vectorized": core_algos.compute_grpo_vectorized_outcome_advantage,
    "rloo": core_algos.compute_rloo_outcome_advantage,
    "reinforce_plus_plus": lambda rewards, mask, uids: core_algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards, mask, config=AlgoConfig(gamma=1.0)
    ),
    "gae": lambda rewards, mask, uids: core_algos.compute_gae_advantage_return(
        rewards, torch.zeros_like(rewards), mask, torch.tensor(1.0), torch.tensor(1.0)
    ),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("size", [LARGEST_REWARD, LARGEST_SCORE])
def test_the_largest_rewards_have_advantages(name: str, size: float) -> None:
    rewards, mask = torch.zeros(16, 64), torch.ones(16, 64)
    rewards[:8, 3], rewards[8:, 60] = size, -size
    advantages, _ = ESTIMATORS[name](rewards, mask, np.array(["a", "b"] * 8, dtype=object))
    assert bool(advantages.isfinite().all())
    assert bool((advantages[:8, :4] > 0).all())
    assert bool((advantages[8:, :61] < 0).all())


def test_a_batch_of_a_million_tokens_is_whitened() -> None:
    advantages = torch.full((64, 16_384), LARGEST_SCORE)
    advantages[32:] *= -1
    assert masked_whiten(advantages, torch.ones_like(advantages)).abs().sub(1).abs().max() < 1e-3


def output(score: Any, **stats: Any) -> CertifiedOutput:
    made = CertifiedOutput(
        prompt_ids=[1],
        response_ids=[2, 3],
        response_mask=[1, 1],
        response_logprobs=[-1.0, -1.0],
        versions=[0, 0],
        num_turns=2,
        metrics=AgentLoopMetrics(),
        stats=stats,
    )
    made.reward_score = score  # as verl's worker does with the result of a reward function
    return made


@pytest.mark.parametrize("score", [0.5, Decimal("0.5"), np.float32(0.5), np.array(0.5), torch.tensor(0.5)], ids=repr)
def test_a_reward_function_may_return_any_number(score: Any) -> None:
    fields = output(score).as_dict()
    assert fields["rm_scores"].tolist() == [0.0, 0.5]
    assert fields["metrics"]["rollout"]["score"] == 0.5
    assert type(fields["metrics"]["rollout"]["score"]) is float


def test_what_is_no_number_beside_the_score_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(certified_output, "_named", set())
    for reason in ("no answer", "wrong"):
        made = output(0.5)
        numbers: dict[str, Any] = {"acc": torch.tensor(1.0), "tests": np.array([0.2, 0.8]), "odds": math.nan}
        texts = {"reason": reason, "verdicts": "", "turn_values": "", "no": None}
        made.extra_fields["reward_extra_info"] = numbers | texts
        assert made.as_dict()["metrics"]["rollout"]["reported"] == {"acc": 1.0}
    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert said == [
        "the reward function reported 'tests', which is no finite number but ndarray",
        "the reward function reported 'odds', which is no finite number but float",
        "the reward function reported 'reason', which is no finite number but str",
    ]


def test_keys_that_are_made_of_rows_do_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(certified_output, "_named", set())
    made = output(0.5)
    made.extra_fields["reward_extra_info"] = {f"row {number}": "x" for number in range(1_000)}
    made.as_dict()
    assert len(caplog.records) == 16


def test_true_is_a_score_of_one() -> None:
    assert output(True).as_dict()["rm_scores"].tolist() == [0.0, 1.0]
    assert "rm_scores" not in output(None).as_dict()


@pytest.mark.parametrize("score", ["0.5", [0.5], (0.5, {}), np.array([0.5]), torch.tensor([0.5])], ids=repr)
def test_a_score_that_is_no_number_is_named(score: Any) -> None:
    with pytest.raises(ConfigError, match="the reward function must return a number as score, got "):
        output(score).as_dict()


@pytest.mark.parametrize("further", [{}, {"interaction_score": 1.0}])
def test_a_manager_that_judged_without_a_score_is_named(further: dict[str, float]) -> None:
    made = output(None, **further)
    made.extra_fields["reward_extra_info"] = {"acc": None}
    with pytest.raises(RewardContractError, match="the reward function must return a number as score, got None"):
        made.as_dict()


@pytest.mark.parametrize("score", [float("nan"), float("-inf"), 1e39, np.float64(1e300), torch.tensor(torch.inf)])
def test_a_score_that_the_trainer_cannot_hold_is_named(score: Any) -> None:
    with pytest.raises(ConfigError, match=r"the reward of a conversation: .* is no finite number from -1e\+12 to"):
        output(score).as_dict()


def test_so_are_rewards_that_add_up_to_one() -> None:
    with pytest.raises(
        ConfigError, match=r"2000000000000000\.0 is no finite number from -1e\+15 to 1e\+15; let rewards be smaller"
    ):
        output(0.0, tool_score=1e15, interaction_score=1e15).as_dict()
    held = output(0.0, tool_score=5e14, interaction_score=4e14).as_dict()
    assert held["metrics"]["rollout"]["conversation"]["score"] == 9e14

"""Under our settings verl descends the gradient of decoupled PPO; the effects of other settings on it."""

from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

SEEDS = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def compared() -> Any:
    from tests.long.training.decoupled import measure

    return measure(SEEDS)


def test_verls_gradient_is_that_of_equation_5(compared: Any) -> None:
    assert compared.diffs["exact"] <= 1e-12
    assert compared.largest > 0.1
    assert compared.cosines["exact"] == pytest.approx(1.0, abs=1e-12)
    assert all(count > 0 for count in vars(compared.reached).values()), compared.reached


@pytest.mark.long
def test_so_it_is_for_older_and_newer_policies() -> None:
    from tests.long.training.decoupled import run

    assert run(12)["max_grad_diff"] <= 1e-12


def test_naive_ppo_is_equation_2_and_goes_another_way(compared: Any) -> None:
    assert compared.diffs["naive"] <= 1e-12
    assert compared.cosines["naive"] < 0.9


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("algorithm.rollout_correction.rollout_is", None),
        ("algorithm.rollout_correction.rollout_is", "sequence"),
        ("algorithm.rollout_correction.rollout_is_threshold", 2.0),
        ("algorithm.rollout_correction.rollout_is_batch_normalize", True),
        ("algorithm.rollout_correction.bypass_mode", True),
        ("actor_rollout_ref.actor.clip_ratio_c", 3.0),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "gspo"),
    ],
)
def test_each_derived_setting_is_needed(key: str, value: Any) -> None:
    from omegaconf import OmegaConf

    from tests.long.training.decoupled import AGGREGATIONS, configure, draw, equation, verls

    config = configure((), "exact", AGGREGATIONS[0])
    OmegaConf.update(config, key, value)
    worst = 0.0
    for seed in SEEDS:
        drawn = draw(seed, 0.5)
        gradient, rows = verls(config, drawn)
        wanted, _ = equation(drawn, [fields["advantages"].tolist() for fields in rows], AGGREGATIONS[0])
        worst = max(worst, float((gradient - torch.tensor(wanted)).abs().max()))
    assert worst > 1e-3


# By importance weight: the factors of its tokens in the loss, for these quotients of proximal and behaviour policy.
QUOTIENTS = [0.25, 1.0, 2.0, 4.0, 100.0]
WEIGHTS = {"exact": [0.25, 1.0, 2.0, 4.0, 100.0], "truncated": [0.25, 1.0, 2.0, 2.0, 2.0]}


@pytest.mark.parametrize("weight", ["exact", "truncated"])
def test_the_truncated_weight_is_at_most_2(weight: str) -> None:
    from verl.protocol import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    from tests.long.training.decoupled import configure

    old = torch.full((1, 6), -1.0, dtype=torch.float64)
    rollout = old - torch.tensor([[*QUOTIENTS, 1.0]], dtype=torch.float64).log()
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]])
    data = DataProto.from_dict({"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask})
    correction = configure((), weight, "token-mean").algorithm.rollout_correction
    data, _ = compute_rollout_correction_and_add_to_batch(data, correction)
    assert data.batch["rollout_is_weights"][0].tolist() == pytest.approx([*WEIGHTS[weight], 0.0])
    assert data.batch["response_mask"].tolist() == mask.tolist()


# The slopes of the loss in the logprobs of tokens with these ratios. Below 0.8 (advantage -1) and above 1.2 (advantage
# 1) the clip takes the slope away. The dual clip takes it away beyond 3 as well, where the advantage is negative.
RATIOS = [0.5, 1.0, 2.0, 4.0]
SLOPES = {
    ("exact", -1.0): [0.0, 1.0, 2.0, 4.0],
    ("truncated", -1.0): [0.0, 1.0, 2.0, 0.0],
    ("exact", 1.0): [-0.5, -1.0, 0.0, 0.0],
    ("truncated", 1.0): [-0.5, -1.0, 0.0, 0.0],
}


@pytest.mark.parametrize(("weight", "advantage"), list(SLOPES))
def test_the_truncated_weight_leaves_the_dual_clip_on(weight: str, advantage: float) -> None:
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
    from verl.utils.config import omega_conf_to_dataclass

    from tests.long.training.decoupled import configure

    config = omega_conf_to_dataclass(configure((), weight, "token-sum").actor_rollout_ref.actor)
    old = torch.full((1, 4), -1.0, dtype=torch.float64)
    log_prob = (old + torch.tensor([RATIOS], dtype=torch.float64).log()).requires_grad_(True)
    loss, _ = compute_policy_loss_vanilla(
        old, log_prob, torch.full_like(old, advantage), torch.ones_like(old), "token-sum", config
    )
    (slopes,) = torch.autograd.grad(loss, log_prob)
    assert slopes[0].tolist() == pytest.approx(SLOPES[weight, advantage])

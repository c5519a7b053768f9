"""A masked position changes no gradient in verl's losses, in ours and in aggregations; leaky losses are found."""

from typing import Any

import pytest
import torch

from tests.conftest import ROOT

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

# An outcome reward is the sum of a row's token rewards, masked or not: verl puts it on the last token of any kind.
SUMS_ALL_REWARDS = {
    "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline",
}  # fmt: skip


# The importance ratio of these losses has no bound. Where a masked token's old logprob lies some 88 below the new one,
# the ratio is infinite, and 0 times infinity makes the masked token's gradient NaN.
UNBOUNDED_RATIO = {
    "clip_cov/token-mean: old_log_prob",
    "clip_cov/token-sum: old_log_prob",
    "clip_cov/seq-mean-token-sum: old_log_prob",
    "clip_cov/seq-mean-token-sum-norm: old_log_prob",
    "clip_cov/seq-mean-token-mean: old_log_prob",
    "kl_cov/token-mean: old_log_prob",
    "kl_cov/token-sum: old_log_prob",
    "kl_cov/seq-mean-token-sum: old_log_prob",
    "kl_cov/seq-mean-token-sum-norm: old_log_prob",
    "kl_cov/seq-mean-token-mean: old_log_prob",
}


def test_what_leaks_in_verl_is_known_by_name() -> None:
    from tests.long.tokens.masked_gradient import measure

    result = measure()
    assert (result["losses"], result["aggregations"], len(result["terms"])) == (13, 5, 45)
    assert set(result["leaks"]) == UNBOUNDED_RATIO | {f"advantage {name}: rewards" for name in SUMS_ALL_REWARDS}
    # Infinite numbers and NaN in the logits leak through every loss.
    assert all("logits" in leaking for leaking in result["non_finite"].values())


def test_every_kl_penalty_and_preset_of_verl_is_looked_at() -> None:
    from verl.trainer.config import RolloutCorrectionConfig
    from verl.trainer.ppo.core_algos import kl_penalty_forward

    from tests.long.tokens.masked_gradient import BYPASS_PRESETS, KL_PENALTIES

    compared = [name for name in kl_penalty_forward.__code__.co_consts[1:] if isinstance(name, str | tuple)]
    # Among the other constants, "full" has no formula, and one pair names the arguments of torch's clamp.
    assert compared == [("kl", "k1"), "abs", ("mse", "k2"), ("low_var_kl", "k3"), ("min", "max"), "full"]
    assert set(KL_PENALTIES) == {f"{name}{plus}" for name in ("kl", "abs", "mse", "low_var_kl") for plus in ("", "+")}
    presets = {name for name in vars(RolloutCorrectionConfig) if name.startswith("bypass_")}
    assert set(BYPASS_PRESETS) == presets - {"bypass_mode"}


def test_the_recipes_use_none_that_leaks() -> None:
    from verl.workers.config.actor import PolicyLossConfig

    assert PolicyLossConfig().loss_mode == "vanilla"
    programs = [path for path in (ROOT / "recipes").rglob("*") if path.suffix in (".sh", ".py", ".yaml")]
    assert programs
    named = [line.split("#")[0].strip() for path in programs for line in path.read_text().splitlines()]
    # `written` calls verl's own vanilla loss. `dppo_tv` is among the 13 that are measured above, and leaks nothing.
    assert {line for line in named if "loss_mode" in line} <= {
        "loss_mode: written",
        "policy_loss: {loss_mode: dppo_tv}",
    }


@pytest.mark.parametrize(("loss", "leaks"), [("vanilla", False), ("clip_cov", True), ("kl_cov", True)])
def test_an_old_logprob_of_minus_90_is_enough(loss: str, leaks: bool) -> None:
    from tests.long.tokens.masked_gradient import gradient, make_batch, policy_term, with_values

    batch = make_batch(0)
    other = with_values(batch, "old_log_prob", torch.full_like(batch["old_log_prob"], -90.0))
    found = gradient(policy_term(loss), "token-mean", other)
    trained = batch["mask"].bool()
    assert bool(found[~trained].isnan().any()) is leaks
    assert bool(found[trained].isfinite().all())


@pytest.mark.parametrize("leak", ["masked", "logits", "advantages", "old_log_prob", "rollout_is_weights"])
def test_a_leaky_loss_is_found(leak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.long.tokens.masked_gradient import POLICY_LOSS_REGISTRY, leaks_of, policy_term

    def leaky(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, **rest: Any) -> Any:
        loss = (log_prob * advantages * response_mask).sum()
        extra = {
            "masked": log_prob.mean(),
            "logits": loss * log_prob.detach().mean(),
            "advantages": loss * advantages.mean(),
            "old_log_prob": loss * old_log_prob.mean(),
            "rollout_is_weights": loss * rest["rollout_is_weights"].mean(),
        }
        return loss + extra[leak], {}

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "leaky", leaky)
    assert leak in leaks_of(policy_term("leaky"), "token-mean")
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("as_reward", [False, True])
def test_a_leaky_loss_against_a_teacher_is_found(as_reward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over a row of a teacher's log-probs, masked ones included, would be one."""
    from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY

    from tests.long.tokens.distillation_terms import distillation_term
    from tests.long.tokens.masked_gradient import leaks_of

    verls = DISTILLATION_LOSS_REGISTRY["k3"]

    def leaky(**given: Any) -> Any:
        losses, metrics = verls(**given)
        return losses * losses.mean(-1, keepdim=True), metrics

    assert leaks_of(distillation_term("k3", as_reward), "token-mean", range(1)) == []
    monkeypatch.setitem(DISTILLATION_LOSS_REGISTRY, "k3", leaky)
    found = leaks_of(distillation_term("k3", as_reward), "token-mean", range(1))
    assert set(found) >= {"logits", "teacher_logprobs"}


def test_a_leaky_kl_loss_is_found() -> None:
    from tests.long.tokens.masked_gradient import Term, leaks_of

    leaky = Term(
        ("logits", "ref_log_prob"), lambda batch, log_prob, how: (log_prob - batch["ref_log_prob"]).square().mean()
    )
    assert leaks_of(leaky, "token-mean") == ["logits", "masked", "ref_log_prob"]

"""verl's losses and aggregations: a masked position changes no gradient. The check is checked on leaky losses."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.stack

# An outcome reward is the sum of a row's token rewards, masked or not: verl puts it on the last token of any kind.
SUMS_ALL_REWARDS = {
    "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline",
}  # fmt: skip


def test_no_loss_and_no_aggregation_leaks() -> None:
    from benchmarks.masked_gradient import measure

    result = measure()
    assert result["losses"] == 12
    assert result["aggregations"] == 5
    assert set(result["leaks"]) == {f"advantage {name}: rewards" for name in SUMS_ALL_REWARDS}


@pytest.mark.parametrize("leak", ["masked", "logits", "advantages", "old_log_prob", "rollout_is_weights"])
def test_a_leaky_loss_is_found(leak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.masked_gradient import POLICY_LOSS_REGISTRY, leaks_of_loss

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
    assert leak in leaks_of_loss("leaky", "token-mean")
    assert torch.is_grad_enabled()

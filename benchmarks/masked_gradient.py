"""Does anything at a masked position change a gradient? For every policy loss and aggregation that verl registers.

    python -m benchmarks.masked_gradient

For each pair the gradient of the logits is taken twice: with a batch, and with the same batch after logits, old
logprobs, advantages or importance weights at masked positions were replaced. Nothing may differ, and masked positions
must have a gradient of exactly 0.0. For the advantage estimators that need no critic, rewards at masked positions are
replaced, and the advantages at trained positions may not change. Leaks are named; the last line is one JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
INPUTS = ("logits", "old_log_prob", "advantages", "rollout_is_weights")
# They need a critic's values, a baseline rollout or gradient norms, which a trainer has and a table of numbers has not.
ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "reinforce_plus_plus", "gpg",
              "reinforce_plus_plus_baseline")  # fmt: skip
BATCH, LENGTH, VOCABULARY = 6, 12, 7
Batch = dict[str, torch.Tensor]


def make_batch(seed: int) -> Batch:
    """Conversations with observations between their turns, one wholly masked row, and padding at the end."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    mask_BR = torch.zeros(BATCH, LENGTH)
    for row, spans in enumerate(
        [[(0, 3), (6, 9)], [(0, 12)], [(0, 1), (4, 5), (8, 12)], [], [(0, 5)], [(0, 2), (3, 11)]]
    ):
        for start, end in spans:
            mask_BR[row, start:end] = 1
    logits_BRV = normal(BATCH, LENGTH, VOCABULARY)
    tokens_BR = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    log_prob_BR = logits_BRV.log_softmax(-1).gather(-1, tokens_BR[..., None])[..., 0]
    return {
        "logits": logits_BRV,
        "tokens": tokens_BR,
        "mask": mask_BR,
        "old_log_prob": log_prob_BR + 0.1 * normal(BATCH, LENGTH),
        "advantages": normal(BATCH, 1).expand(BATCH, LENGTH).clone(),
        "rollout_is_weights": normal(BATCH, LENGTH).exp(),
    }


def replaced(batch: Batch, name: str, scale: float, seed: int) -> Batch:
    """The batch with other values of `name` at masked positions."""
    generator = torch.Generator().manual_seed(seed)
    noise = scale * torch.randn(batch[name].shape, generator=generator)
    noise = noise.abs() if name == "rollout_is_weights" else -noise.abs() if name == "old_log_prob" else noise
    mask = batch["mask"].bool()
    mask = mask[..., None] if batch[name].dim() == 3 else mask
    return {**batch, name: torch.where(mask, batch[name], noise)}


def gradient(loss_fn: Callable[..., Any], aggregation: str, batch: Batch, config: ActorConfig) -> torch.Tensor:
    """The gradient of the loss with respect to the logits, `[B, R, V]`."""
    logits_BRV = batch["logits"].clone().requires_grad_(True)
    log_prob_BR = logits_BRV.log_softmax(-1).gather(-1, batch["tokens"][..., None])[..., 0]
    torch.manual_seed(0)  # clip_cov draws at random
    loss, _ = loss_fn(
        old_log_prob=batch["old_log_prob"],
        log_prob=log_prob_BR,
        advantages=batch["advantages"],
        response_mask=batch["mask"],
        loss_agg_mode=aggregation,
        config=config,
        rollout_is_weights=batch["rollout_is_weights"],
    )
    (found,) = torch.autograd.grad(loss, logits_BRV)
    return found


def leaks_of_loss(name: str, aggregation: str, seeds: range = range(3)) -> list[str]:
    """The inputs whose masked positions reach the gradient, or `masked` if a masked position has one of its own."""
    loss_fn = POLICY_LOSS_REGISTRY[name]
    policy_loss = PolicyLossConfig(loss_mode=name, dro_beta=0.1)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss)
    found: set[str] = set()
    for seed in seeds:
        batch = make_batch(seed)
        plain = gradient(loss_fn, aggregation, batch, config)
        trained = batch["mask"].bool()
        if bool((plain[~trained] != 0).any()):
            found.add("masked")
        for given in INPUTS:
            for scale in (1.0, 30.0):
                other = gradient(loss_fn, aggregation, replaced(batch, given, scale, seed + 100), config)
                if not torch.equal(other, plain):
                    found.add(given)
    return sorted(found)


def estimator_leaks(name: str, seeds: range = range(3)) -> bool:
    """Whether a reward at a masked position changes an advantage at a trained one."""
    estimator = ADV_ESTIMATOR_REGISTRY[name]
    for seed in seeds:
        batch = make_batch(seed)
        rewards_BR = torch.randn(BATCH, LENGTH, generator=torch.Generator().manual_seed(seed)) * batch["mask"]
        other = replaced({**batch, "rewards": rewards_BR}, "rewards", 1.0, seed + 100)["rewards"]
        index = np.array([0, 0, 0, 1, 1, 1])
        advantages = [
            estimator(
                token_level_rewards=rewards.clone(), response_mask=batch["mask"], index=index, config=AlgoConfig()
            )[0]
            * batch["mask"]
            for rewards in (rewards_BR, other)
        ]
        if not torch.equal(*advantages):
            return True
    return False


def measure() -> dict[str, Any]:
    """`losses`, `aggregations` and `estimators` looked at, and `leaks` by name."""
    leaks = [
        f"{name}/{aggregation}: {given}"
        for name in POLICY_LOSS_REGISTRY
        for aggregation in AGGREGATIONS
        for given in leaks_of_loss(name, aggregation)
    ]
    leaks += [f"advantage {name}: rewards" for name in ESTIMATORS if estimator_leaks(name)]
    return {
        "losses": len(POLICY_LOSS_REGISTRY),
        "aggregations": len(AGGREGATIONS),
        "estimators": len(ESTIMATORS),
        "leaks": leaks,
    }


def main() -> None:
    result = measure()
    table = Table("what leaks", title="gradients that a masked position changes")
    for leak in result["leaks"]:
        table.add_row(leak)
    Console().print(table)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

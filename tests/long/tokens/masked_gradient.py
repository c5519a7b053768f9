"""Does anything at a masked position change a gradient?

    python -m benchmarks.masked_gradient

The benchmark tries every loss and aggregation that verl registers, and our policy loss `mt_gspo`. The losses are the
policy losses, bypass mode with each of verl's presets, the KL loss with every penalty, entropy, and the losses against
a teacher (distillation).

With every aggregation, it computes the gradient of the logits twice: once for a batch, and once for the same batch
after one input was replaced at masked positions by numbers up to some thousands. The two gradients must be equal, and
the gradient at masked positions must be exactly 0.0. For the advantage estimators that need no critic, it replaces the
rewards at masked positions, and the advantages at trained positions must stay the same.

The output names every leak. Infinite numbers and NaN at masked positions are tried too, but reported apart: no batch
has them. The last line is one JSON object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from verl.trainer.config import AlgoConfig, RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, agg_loss, kl_penalty
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

from verl_multiturn.verl_bridge.names import TURN_LOSS

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
# verl's `kl_penalty` compares its argument with these names and lists them nowhere. (k1, k2 and k3 are other names of
# kl, mse and low_var_kl.) With a "+" at the end, the gradient is that of mse.
KL_PENALTIES = ("kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "mse+", "low_var_kl+")
# Constructors of verl's rollout correction.
BYPASS_PRESETS = (
    "bypass_ppo_clip", "bypass_ppo_clip_geo_rs", "bypass_ppo_clip_k3_rs", "bypass_pg_is", "bypass_pg_token_icepop",
    "bypass_pg_geo_rs", "bypass_pg_geo_rs_seq_tis", "bypass_pg_geo_rs_token_tis",
)  # fmt: skip
SCALES = (1.0, 30.0, 1e3)
"""Sizes of the noise at masked positions. With 1e3, a ratio of probabilities there is infinite as float32."""
NON_FINITE = (math.inf, math.nan)
# A logprob is never positive, an importance weight never negative.
NEGATIVE = {"old_log_prob", "ref_log_prob", "teacher_logprobs", "topk_teacher_logprobs"}
POSITIVE = {"rollout_is_weights"}
# verl's other estimators need a critic's values, a baseline rollout or gradient norms. A trainer has these, this table
# of numbers has not.
ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "reinforce_plus_plus", "gpg",
              "reinforce_plus_plus_baseline")  # fmt: skip
BATCH, LENGTH, VOCABULARY = 6, 12, 7
Batch = dict[str, torch.Tensor]


def make_batch(seed: int) -> Batch:
    """Make conversations with observations between their turns, one wholly masked row, and padding at the end."""
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
    batch = {
        "logits": logits_BRV,
        "tokens": tokens_BR,
        "mask": mask_BR,
        "old_log_prob": log_prob_BR + 0.1 * normal(BATCH, LENGTH),
        "ref_log_prob": log_prob_BR + 0.3 * normal(BATCH, LENGTH),
        "advantages": normal(BATCH, 1).expand(BATCH, LENGTH).clone(),
        "rollout_is_weights": normal(BATCH, LENGTH).exp(),
    }
    teacher_BRV = (logits_BRV + 0.3 * normal(BATCH, LENGTH, VOCABULARY)).log_softmax(-1)
    likeliest = teacher_BRV.topk(3)
    return batch | {
        "teacher_ids": tokens_BR[..., None],
        "teacher_logprobs": teacher_BRV.gather(-1, tokens_BR[..., None]),
        "topk_teacher_ids": likeliest.indices,
        "topk_teacher_logprobs": likeliest.values,
    }


@dataclass(frozen=True)
class Term:
    """A part of the loss, as a function of a batch, the log-probabilities of its tokens and an aggregation."""

    inputs: tuple[str, ...]
    """Names of the batch's columns that the term reads."""
    loss: Callable[[Batch, torch.Tensor, str], torch.Tensor]


def policy_term(name: str, rollout_correction: RolloutCorrectionConfig | None = None) -> Term:
    """Return a policy loss as a term, called as verl's `ppo_loss` calls it."""
    correction = rollout_correction or RolloutCorrectionConfig()
    policy_loss = PolicyLossConfig(loss_mode=name, dro_beta=0.1, rollout_correction=correction)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss)

    def loss(batch: Batch, log_prob_BR: torch.Tensor, aggregation: str) -> torch.Tensor:
        torch.manual_seed(0)  # clip_cov draws random numbers
        found: torch.Tensor
        found, _ = POLICY_LOSS_REGISTRY[name](
            old_log_prob=batch["old_log_prob"],
            log_prob=log_prob_BR,
            advantages=batch["advantages"],
            response_mask=batch["mask"].bool(),
            loss_agg_mode=aggregation,
            config=config,
            rollout_is_weights=batch["rollout_is_weights"],
        )
        return found

    return Term(("logits", "old_log_prob", "advantages", "rollout_is_weights"), loss)


def kl_term(penalty: str) -> Term:
    """Return verl's KL loss with one of `KL_PENALTIES` as a term."""

    def loss(batch: Batch, log_prob_BR: torch.Tensor, aggregation: str) -> torch.Tensor:
        kl_BR = kl_penalty(log_prob_BR, batch["ref_log_prob"], penalty)
        found: torch.Tensor = agg_loss(kl_BR, batch["mask"].bool(), aggregation)
        return found

    return Term(("logits", "ref_log_prob"), loss)


def entropy_term() -> Term:
    """Return verl's entropy loss as a term."""

    def loss(batch: Batch, log_prob_BR: torch.Tensor, aggregation: str) -> torch.Tensor:
        found: torch.Tensor = agg_loss(entropy_from_logits(batch["logits"]), batch["mask"].bool(), aggregation)
        return found

    return Term(("logits",), loss)


def verl_losses() -> list[str]:
    """Return the names of verl's own policy losses; a recipe may have registered others in this process."""
    return [name for name, loss in POLICY_LOSS_REGISTRY.items() if loss.__module__.startswith("verl.")]


def policy_losses() -> list[str]:
    """Return the names of the policy losses that are tried: verl's and ours."""
    return [*verl_losses(), TURN_LOSS]


def terms() -> dict[str, Term]:
    """Return every term by its name."""
    presets = {name: getattr(RolloutCorrectionConfig, name)() for name in BYPASS_PRESETS}
    return {
        **{name: policy_term(name) for name in policy_losses()},
        **{name: policy_term("bypass_mode", preset) for name, preset in presets.items()},
        **{f"kl loss {penalty}": kl_term(penalty) for penalty in KL_PENALTIES},
        "entropy": entropy_term(),
    }


def with_values(batch: Batch, name: str, values: torch.Tensor) -> Batch:
    """Return the batch with other values of `name` at masked positions; their signs are made to fit the column."""
    values = values.abs() if name in POSITIVE else -values.abs() if name in NEGATIVE else values
    mask = batch["mask"].bool()
    mask = mask[..., None] if batch[name].dim() == 3 else mask
    return {**batch, name: torch.where(mask, batch[name], values)}


def replaced(batch: Batch, name: str, scale: float, seed: int) -> Batch:
    """Return the batch with noise in place of `name` at masked positions."""
    generator = torch.Generator().manual_seed(seed)
    return with_values(batch, name, scale * torch.randn(batch[name].shape, generator=generator))


def gradient(term: Term, aggregation: str, batch: Batch) -> torch.Tensor:
    """Compute the gradient of the loss with respect to the logits, of shape `[B, R, V]`."""
    logits_BRV = batch["logits"].clone().requires_grad_(True)
    log_prob_BR = logits_BRV.log_softmax(-1).gather(-1, batch["tokens"][..., None])[..., 0]
    (found,) = torch.autograd.grad(term.loss({**batch, "logits": logits_BRV}, log_prob_BR, aggregation), logits_BRV)
    return found


def leaks_of(term: Term, aggregation: str, seeds: Iterable[int] = range(3)) -> list[str]:
    """Find the inputs whose values at masked positions change the gradient.

    Args:
        term: The loss.
        aggregation: Entry of `AGGREGATIONS`.
        seeds: Seeds of the batches to try.

    Returns:
        Sorted names of the inputs. `masked` is among them when the logits at a masked position have a gradient.
    """
    found: set[str] = set()
    for seed in seeds:
        batch = make_batch(seed)
        plain = gradient(term, aggregation, batch)
        trained = batch["mask"].bool()
        if bool((plain[~trained] != 0).any()):
            found.add("masked")
        for given in term.inputs:
            others = [gradient(term, aggregation, replaced(batch, given, scale, seed + 100)) for scale in SCALES]
            if not all(torch.equal(other, plain) for other in others):
                found.add(given)
    return sorted(found)


def non_finite_leaks(term: Term) -> list[str]:
    """Return the inputs whose infinite numbers or NaN at masked positions change the gradient, in any aggregation."""
    batch = make_batch(0)
    found: set[str] = set()
    for aggregation in AGGREGATIONS:
        plain = gradient(term, aggregation, batch)
        for given in term.inputs:
            for value in NON_FINITE:
                other = with_values(batch, given, torch.full_like(batch[given], value))
                if not torch.equal(gradient(term, aggregation, other), plain):
                    found.add(given)
    return sorted(found)


def estimator_leaks(name: str, seeds: range = range(3)) -> bool:
    """Return whether a reward at a masked position changes an advantage at a trained one."""
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
    """Try everything.

    Returns:
        The numbers of losses, aggregations and estimators; `terms`, all names; `leaks`, one text for each leak; and
        `non_finite`, for each term the inputs whose infinite numbers or NaN leak.
    """
    from tests.long.tokens.distillation_terms import distillation_terms  # it imports this module

    known = terms() | distillation_terms()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with tensors this small, threads cost five times the work
    leaks = [
        f"{name}/{aggregation}: {given}"
        for name, term in known.items()
        for aggregation in AGGREGATIONS
        for given in leaks_of(term, aggregation)
    ]
    leaks += [f"advantage {name}: rewards" for name in ESTIMATORS if estimator_leaks(name)]
    non_finite = {name: non_finite_leaks(term) for name, term in known.items()}
    torch.set_num_threads(threads)
    return {
        "losses": len(policy_losses()),
        "aggregations": len(AGGREGATIONS),
        "estimators": len(ESTIMATORS),
        "terms": list(known),
        "leaks": leaks,
        "non_finite": non_finite,
    }


def run() -> dict[str, Any]:
    """Try everything, print the table, and return the figures."""
    result = measure()
    leaks = result["leaks"]
    table = Table("loss", "leaks", "leaks where inf or nan is masked", title="masked positions that reach a gradient")
    for name in result["terms"]:
        found = [leak.removeprefix(f"{name}/") for leak in leaks if leak.startswith(f"{name}/")]
        table.add_row(name, "\n".join(found), ", ".join(result["non_finite"][name]))
    for name in ESTIMATORS:
        table.add_row(f"advantage {name}", "rewards" if f"advantage {name}: rewards" in leaks else "", "not asked")
    Console(width=110).print(table)
    print(f"{len(leaks)} leaks")
    return {name: result[name] for name in ("losses", "aggregations", "leaks")}

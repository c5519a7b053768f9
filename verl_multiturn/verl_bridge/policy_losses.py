"""The policy loss `mt_gspo`: one ratio of probabilities and one clip for each turn, as GSPO has them for a response.

verl calls it for each micro-batch, by `actor.policy_loss.loss_mode=mt_gspo`. It hands over columns of rows and no ids,
so a turn is found in the mask alone: a run of trained tokens in one row, without an untrained token between them.

    s(turn)   = exp(mean over the turn's tokens of log pi_theta - log pi_old)
    s(token)  = stopped s(turn) * pi_theta(token) / stopped pi_theta(token)
    loss      = -min(s(token) * A(token), clip(s(token), 1 - low, 1 + high) * A(token))

The second line is GSPO-token's of https://arxiv.org/abs/2507.18071, section 4.3, with the turn in the response's place:
the value is the turn's ratio, and the gradient goes through the token alone. `docs/reference/policy-losses.md` lists
the cases of turns and all differences from the paper.

Invariants:
- a row's loss depends on no other row, so that it is the same in every split into micro-batches;
- nothing at an untrained token reaches the loss or its gradient, NaN included;
- where all trained tokens of a row are one run, loss, gradient and metrics are those of verl's `gspo`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.utils.torch_functional import masked_mean

from verl_multiturn.verl_bridge.names import TURN_LOSS

_LARGEST_LOG_RATIO = 10.0
"""verl's bound in `gspo`: the exponential of a larger one counts as that of this one, without a gradient."""


def register_policy_losses() -> None:
    """Register our policy losses with verl in this process; `plugin.py` calls it once verl's own are there."""
    register_policy_loss(TURN_LOSS)(turn_loss)


def number_turns(trained: Tensor) -> Tensor:
    """Return for each token the number of its turn in its row, from 1; 0 for an untrained token.

    Args:
        trained: Whether each response token is trained, `(B, R)`, boolean.
    """
    before = torch.nn.functional.pad(trained[:, :-1], (1, 0))
    return (trained & ~before).cumsum(-1) * trained


def turn_means(values: Tensor, trained: Tensor) -> Tensor:
    """Return for each token the mean of its turn's values, `(B, R)`; 0 for an untrained token.

    Turns are summed one after the other: in the order of a row's tokens, as verl sums a whole row, and on a GPU in the
    same order in every run. So the time grows with the largest number of turns in a row.

    Args:
        values: A value for each response token, `(B, R)`; those of untrained tokens are not read.
        trained: Whether each response token is trained, `(B, R)`, boolean.
    """
    turns, means = number_turns(trained), torch.zeros_like(values)
    for number in range(1, int(turns.max()) + 1 if turns.numel() else 1):
        own = turns == number
        mean = torch.where(own, values, 0.0).sum(-1) / own.sum(-1).clamp(min=1)
        means = torch.where(own, mean[:, None], means)
    return means


def turn_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss of a micro-batch, and verl's three metrics of it; verl calls it by the name `mt_gspo`.

    Args:
        old_log_prob: Log-probs under the policy before the update, `(B, R)`, in nats.
        log_prob: Log-probs under the policy that is trained, `(B, R)`, in nats.
        advantages: `(B, R)`.
        response_mask: True for each trained token, `(B, R)`.
        loss_agg_mode: verl's name of the way from tokens to one number.
        config: verl's settings of the actor, with the clip and the counts of the whole batch.
        rollout_is_weights: Weights of verl's rollout correction, `(B, R)`; None without it.
    """
    trained = response_mask.bool()
    limits = config.clip_ratio_low, config.clip_ratio_high
    below, above = (config.clip_ratio if limit is None else limit for limit in limits)
    log_prob = torch.where(trained, log_prob, 0.0)
    change = log_prob.detach() - old_log_prob
    ratio = (turn_means(change, trained) + (log_prob - log_prob.detach())).clamp(max=_LARGEST_LOG_RATIO).exp()
    free, bounded = advantages * ratio, advantages * ratio.clamp(1 - below, 1 + above)
    losses = -torch.minimum(free, bounded)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    losses = torch.where(trained, losses, 0.0)
    loss = agg_loss(losses, trained, loss_agg_mode, **config.global_batch_info)
    metrics = {
        "actor/pg_clipfrac": masked_mean((bounded < free).float(), trained).item(),
        "actor/ppo_kl": masked_mean(-change, trained).item(),
        "actor/pg_clipfrac_lower": 0.0,
    }
    return loss, metrics

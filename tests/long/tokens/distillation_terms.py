"""verl's losses against a teacher as terms of `masked_gradient.py`, computed as its trainer's workers compute them."""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.distillation.losses import DISTILLATION_SETTINGS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, DistillationConfig
from verl.workers.config.distillation import DistillationLossConfig

from tests.long.tokens.masked_gradient import Batch, Term
from verl_multiturn.verl_bridge.trainer.distillation import distillation_loss

NOT_AS_A_LOSS = ("k1",)
"""verl refuses it, unless it is a reward (`use_policy_gradient`)."""


def distillation_term(mode: str, as_reward: bool) -> Term:
    """Return a loss against a teacher as a term.

    Args:
        mode: verl's `loss_mode`.
        as_reward: Whether the loss is the reward of a policy gradient.
    """
    settings = DistillationLossConfig(
        loss_mode=mode, topk=3, use_task_rewards=False, use_policy_gradient=as_reward, loss_max_clamp=None
    )
    distillation = DistillationConfig(distillation_loss=settings)
    with_topk = DISTILLATION_SETTINGS_REGISTRY[mode].use_topk

    def loss(batch: Batch, log_prob_BR: torch.Tensor, aggregation: str) -> torch.Tensor:
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=aggregation
        )  # fmt: skip
        data = _data(batch, "topk_" if with_topk else "")
        output = {"log_probs": _rows(log_prob_BR)}
        if with_topk:
            logits_SV = _rows(batch["logits"]).values().unsqueeze(0)
            columns = distillation_loss(config, distillation, data=data, student_logits=logits_SV)
            output |= {name: _like(each.squeeze(0), output["log_probs"]) for name, each in columns.items()}
        found: torch.Tensor
        found, _ = distillation_loss(config, distillation, output, data)
        return found

    teachers = "topk_teacher_logprobs" if with_topk else "teacher_logprobs"
    return Term(("logits", teachers, *(["old_log_prob"] if as_reward else [])), loss)


def distillation_terms() -> dict[str, Term]:
    """Return every loss against a teacher that verl registers, by itself and as a reward."""
    kinds = [(mode, as_reward) for mode in DISTILLATION_SETTINGS_REGISTRY for as_reward in (False, True)]
    return {
        f"distillation {mode}{' as a reward' if as_reward else ''}": distillation_term(mode, as_reward)
        for mode, as_reward in kinds
        if as_reward or mode not in NOT_AS_A_LOSS
    }


def _rows(column: torch.Tensor) -> torch.Tensor:
    """Return a column of responses, `(B, R, …)`, as verl's of rows with one token of prompt, `(B, 1 + R, …)`, jagged.

    Entry i is about token i + 1, so that the last one is about none.
    """
    whole = torch.cat([column, torch.zeros_like(column[:, :1])], 1)
    begins = torch.arange(len(whole) + 1) * whole.shape[1]
    return torch.nested.nested_tensor_from_jagged(whole.flatten(0, 1), begins)


def _like(values: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, column.offsets())


def _jagged(column: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(column), layout=torch.jagged)


def _data(batch: Batch, prefix: str) -> Any:
    mask = batch["mask"]
    columns = {
        "prompts": _jagged(batch["tokens"][:, :1]),
        "responses": _jagged(batch["tokens"]),
        "response_mask": _jagged(mask.long()),
        "old_log_probs": _jagged(batch["old_log_prob"]),
        "advantages": _jagged(batch["advantages"]),
        "teacher_logprobs": _rows(batch[f"{prefix}teacher_logprobs"]),
        "teacher_ids": _rows(batch[f"{prefix}teacher_ids"]),
    }
    totals = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
    return tu.get_tensordict(columns, totals)

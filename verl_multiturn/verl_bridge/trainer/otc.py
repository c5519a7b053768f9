"""The trainer mixin that scales the score of a correct answer by its tool calls: `custom.multiturn.otc`.

Invariants:
- only the part of the score that `compute_score` gave a correct answer changes. The tools' own rewards in the score
  (`tool_reward.mode=add`) stay, and so do the scores of wrong answers, invalid conversations, rows of other agent loops
  and padding rows;
- it happens only in training, after verl has chosen a batch and before it computes the advantages. Each update of a
  step has its own batch, made of whole groups, and each row is in one batch.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import transfer_queue
from omegaconf import DictConfig
from tensordict import TensorDict

from verl_multiturn.config import OtcSettings
from verl_multiturn.observe.metrics import executed_calls, is_correct
from verl_multiturn.rewards.otc import r_tools
from verl_multiturn.verl_bridge.startup.configuration import settings_of
from verl_multiturn.verl_bridge.trainer.report import PREFIX, fetch_stats


class OtcMixin:
    """Mixin for a trainer class of verl that scales the scores of correct answers; list it before verl's class.

    Its metric is `rollout/otc/r_tool/mean`, the mean over the correct answers of a step.
    """

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self._otc = settings_of(config.actor_rollout_ref.rollout).otc
        self._r_tools: list[float] = []

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        """Run verl's step, and add the mean `r_tool` of its correct answers to `metrics`."""
        self._r_tools = []
        batch = super().step(metrics, timing_raw)  # type: ignore[misc]
        if self._r_tools:
            metrics[f"{PREFIX}otc/r_tool/mean"] = sum(self._r_tools) / len(self._r_tools)
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._r_tools += scale_scores(batch, self._otc)
        return super()._compute_advantage(batch, metrics)  # type: ignore[misc]


def scale_scores(batch: Any, settings: OtcSettings) -> list[float]:
    """Scale the scores of a batch's correct answers in TransferQueue (column `rm_scores`).

    Args:
        batch: verl's batch.
        settings: form and constants; with the form `none` nothing happens.

    Returns:
        The coefficient `r_tool` of each correct answer.
    """
    form = settings.form
    if form == "none":
        return []
    correct = {key: stats for key, stats in fetch_stats(batch).items() if is_correct(stats)}
    if not correct:
        return []
    keys, where = list(correct), batch.partition_id
    data = transfer_queue.kv_batch_get(keys=keys, partition_id=where, select_fields=["uid", "rm_scores"])
    groups: dict[str, list[int]] = defaultdict(list)
    for i, uid in enumerate(data.get("uid").tolist()):
        groups[str(uid)].append(i)
    calls = [executed_calls(stats) for stats in correct.values()]
    r_tool_of: dict[int, float] = {}
    for group in groups.values():
        r_tool_of.update(zip(group, r_tools([calls[i] for i in group], form, settings.c), strict=True))
    scores = [row.clone() for row in data.get("rm_scores").unbind()]
    for i, (row, stats) in enumerate(zip(scores, correct.values(), strict=True)):
        # verl puts the score of `compute_score` on the last token.
        row[-1] += (settings.alpha * r_tool_of[i] - 1) * stats["score"]
    column = torch.nested.as_nested_tensor(scores, layout=torch.jagged)
    fields = TensorDict({"rm_scores": column}, batch_size=len(keys))
    transfer_queue.kv_batch_put(keys=keys, partition_id=where, fields=fields)
    return list(r_tool_of.values())

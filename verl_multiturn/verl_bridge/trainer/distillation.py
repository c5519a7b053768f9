"""`distillation_loss`: verl's loss with a teacher, also for micro-batches of which nothing is trained.

verl 0.9.1 reports the least and the largest loss of each micro-batch's trained tokens, and raises where there are none
("min(): Expected reduction dim"). With several rows for a conversation that is the usual case: verl fills the batch
with rows that are not trained, and conversations may be invalid. verl's trainer sets the loss of its critic on the
workers; ours sets this one of the actor in the same way.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import Metric

_NEUTRAL = {"min": math.inf, "max": -math.inf}
"""Values that count in no aggregate of verl's of this name; of others 0."""


def distillation_loss(
    config: Any, distillation_config: Any, model_output: Any = None, data: Any = None, **given: Any
) -> Any:
    """Return verl's loss of a micro-batch and its metrics; without a trained token the loss 0, with gradients of 0.

    The metrics of such a micro-batch have the names of the others, since verl joins them: a least value is infinite, a
    largest one minus infinity, so that neither counts, and the others are 0, as verl's own of a masked batch. That
    counts in means, which verl takes over micro-batches without weights.

    Args:
        config: verl's settings of the actor.
        distillation_config: verl's settings of the distillation.
        model_output: The columns that the engine has computed.
        data: The micro-batch.
        given: Further arguments of verl's `distillation_ppo_loss`; with `student_logits` it returns columns.
    """
    verls = partial(distillation_ppo_loss, config, distillation_config, **given)
    if given.get("student_logits") is not None or bool(_values(data["response_mask"]).any()):
        return verls(model_output=model_output, data=data)
    loss, metrics = verls(model_output=model_output, data=_with_one(data))
    return loss * 0.0, {name: _nothing(metric) for name, metric in metrics.items()}


def set_loss(workers: Any, config: DictConfig) -> None:
    """Let the actor's workers compute this loss, in a run with a teacher.

    Args:
        workers: verl's worker group of the actor, whose model is there.
        config: verl's whole configuration.
    """
    actor, distillation = (
        omega_conf_to_dataclass(each) for each in (config.actor_rollout_ref.actor, config.distillation)
    )
    workers.set_loss_fn(partial(distillation_loss, config=actor, distillation_config=distillation))


def _values(column: torch.Tensor) -> torch.Tensor:
    return column.values() if column.is_nested else column


def _with_one(data: TensorDict) -> TensorDict:
    """Return a micro-batch as if its first response token were trained."""
    mask = data["response_mask"].clone()
    _values(mask).view(-1)[0] = 1
    return data.copy().update({"response_mask": mask})


def _nothing(metric: Any) -> Any:
    """Return a metric that has no effect on least and largest values and on sums; in a mean it counts as 0."""
    if isinstance(metric, Metric):
        return Metric(metric.aggregation, _NEUTRAL.get(metric.aggregation.value, 0.0))
    return metric * 0.0

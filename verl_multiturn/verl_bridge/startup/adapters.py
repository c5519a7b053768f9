"""The check that refuses LoRA adapters which `rollout.name=sglang_async` would lose.

verl 0.9.1 compares the rollout's name with the literal `sglang` when it wakes an engine that serves adapters
(`engine_workers.py`, `is_sglang`). With our name it would resume weights that SGLang never released.
"""

from __future__ import annotations

from omegaconf import DictConfig

from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.names import ROLLOUT
from verl_multiturn.verl_bridge.settings import adapter_rank

_MODEL = "actor_rollout_ref.model"


def check_adapters(config: DictConfig) -> None:
    """Refuse adapters that are not merged into the weights, when the rollout is `sglang_async`.

    Raises:
        ConfigError: the run has such adapters; the message gives verl's own rollout name as the remedy.
    """
    key, rank = adapter_rank(config)
    if rank > 0 and config.actor_rollout_ref.rollout.name == ROLLOUT:
        raise ConfigError(
            f"{key}={rank!r} with rollout.name='sglang_async': verl 0.9.1 wakes an engine with adapters in another "
            "way unless its name is 'sglang'; set actor_rollout_ref.rollout.name=sglang, whose conversations and "
            f"tools are the same with the agent loop multiturn_agent, or {_MODEL}.lora.merge=True"
        )

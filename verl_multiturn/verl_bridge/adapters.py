"""Refuses LoRA adapters that `rollout.name=sglang_async` would lose.

verl 0.9.1 tells SGLang from vLLM by the literal name `sglang` where it wakes an engine that serves adapters
(`engine_workers.py`, `is_sglang`); under our name it would resume weights that SGLang never released.
"""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.errors import ConfigError

_MODEL = "actor_rollout_ref.model"
# FSDP reads the first, Megatron the second.
_RANKS = (f"{_MODEL}.lora_rank", f"{_MODEL}.lora.rank")


def check_adapters(config: DictConfig) -> None:
    """Refuse adapters that are not merged into the weights, under our name of the rollout.

    Raises:
        ConfigError: with verl's own name as the remedy.
    """
    if config.actor_rollout_ref.rollout.name != "sglang_async" or OmegaConf.select(config, f"{_MODEL}.lora.merge"):
        return
    for key in _RANKS:
        rank = OmegaConf.select(config, key)
        if rank and int(rank) > 0:
            raise ConfigError(
                f"{key}={rank!r} with rollout.name='sglang_async': verl 0.9.1 wakes an engine with adapters in another "
                "way unless its name is 'sglang'; set actor_rollout_ref.rollout.name=sglang, whose conversations and "
                f"tools are the same with the agent loop multiturn_agent, or {_MODEL}.lora.merge=True"
            )

"""The check that refuses LoRA adapters which `rollout.name=sglang_async` would lose.

verl 0.9.1 compares the rollout's name with the literal `sglang` when it wakes an engine that serves adapters
(`engine_workers.py`, `is_sglang`). With our name it would resume weights that SGLang never released.
"""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.startup.agent_loops import ROLLOUT

_MODEL = "actor_rollout_ref.model"
# FSDP reads the first key, Megatron the second.
_RANKS = (f"{_MODEL}.lora_rank", f"{_MODEL}.lora.rank")


def adapter_rank(config: DictConfig) -> tuple[str, int]:
    """Return the key and the rank of adapters that the engine would serve; rank 0 without any or with merged ones."""
    if not OmegaConf.select(config, f"{_MODEL}.lora.merge"):
        for key in _RANKS:
            rank = OmegaConf.select(config, key)
            if isinstance(rank, int) and rank > 0:  # verl itself refuses what is no number
                return key, rank
    return "", 0


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

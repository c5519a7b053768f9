"""The part of the start-up check about asynchronous training: it derives verl's settings from `max_staleness`.

The composed configuration always holds verl's defaults, so that a value which the user wrote cannot be told from one
that nobody wrote. So a value is taken for the user's when it is neither verl's default nor the derived one, and is
refused then.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_multiturn.config import PATH, MultiTurnSettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.names import ROLLOUT
from verl_multiturn.verl_bridge.settings import own_manager
from verl_multiturn.verl_bridge.startup.importance import derive_importance_weights
from verl_multiturn.verl_bridge.startup.our_trainer import our_mode, require_our_trainer

_ROLLOUT = "actor_rollout_ref.rollout"
_SAMPLER = "trainer.v1.sampler"
_BACKEND = f"{_ROLLOUT}.checkpoint_engine.backend"
# verl 0.9.1's defaults (`trainer/config/ppo_trainer.yaml`).
_WARMUP, _THRESHOLD, _STRATEGY = 1, 8, "drop"


def check_staleness(config: DictConfig, settings: MultiTurnSettings) -> None:
    """Check the settings of asynchronous training, and derive verl's settings from `max_staleness` in place.

    Args:
        config: verl's whole configuration.
        settings: our settings in it.

    Raises:
        ConfigError: two settings contradict each other, or the trainer does not keep the bound.
    """
    if our_mode(config) == "separate_async":
        _check_separate(config)
    derive_importance_weights(config, settings.importance_weight, settings.max_staleness)
    if settings.max_staleness is None:
        if settings.staleness_strategy != "reroll":
            raise ConfigError(
                f"{PATH}.staleness_strategy={settings.staleness_strategy!r} has no effect without "
                f"{PATH}.max_staleness; set both, or leave it out"
            )
        return
    given = f"{PATH}.max_staleness={settings.max_staleness}"
    mode = require_our_trainer(config, given, "leave max_staleness out")
    _check_bound(config, settings.max_staleness, given, mode)
    if mode == "sync":
        return
    manager = own_manager(config.actor_rollout_ref.rollout.agent)
    if settings.staleness_strategy == "reroll" and manager is not None:
        raise ConfigError(
            f"{PATH}.staleness_strategy='reroll' cancels groups, which {_ROLLOUT}.agent.agent_loop_manager_class="
            f"{manager!r} need not be able to; leave the manager out, or set staleness_strategy=mask"
        )
    derived = {
        f"trainer.v1.{mode}.num_warmup_batches": (_WARMUP, settings.max_staleness),
        f"{_SAMPLER}.max_off_policy_threshold": (_THRESHOLD, settings.max_staleness + 1),
        # Our replay buffer carries out the strategy. To verl it is `drop`, or one that drops nothing.
        f"{_SAMPLER}.max_off_policy_strategy": (_STRATEGY, "drop" if settings.staleness_strategy == "drop" else "wait"),
    }
    for key, (default, value) in derived.items():
        found = OmegaConf.select(config, key)
        if found not in (default, value):
            raise ConfigError(f"{key}={found!r}: {given} makes it {value!r}; leave it out, or leave out max_staleness")
    with open_dict(config):
        for key, (_, value) in derived.items():
            OmegaConf.update(config, key, value)


def _check_bound(config: DictConfig, eta: int, given: str, mode: str) -> None:
    if mode == "sync" and eta > 0:
        raise ConfigError(
            f"{given}: the trainer 'sync' trains only tokens of the age 0; set trainer.v1.trainer_mode=separate_async "
            "or colocate_async, or leave max_staleness out"
        )
    if (name := config.actor_rollout_ref.rollout.name) != ROLLOUT:
        raise ConfigError(
            f"{given}: {_ROLLOUT}.name={name!r} does not say under which weights each token was sampled; set "
            f"{_ROLLOUT}.name=sglang_async, or leave max_staleness out"
        )
    sampler: Any = OmegaConf.select(config, f"{_SAMPLER}.custom_sampler") or {}
    if sampler.get("path") and sampler.get("name"):
        raise ConfigError(
            f"{given}: {_SAMPLER}.custom_sampler.name={sampler['name']!r} chooses the groups itself, so that the bound "
            "would not hold; leave out one of the two"
        )


def _check_separate(config: DictConfig) -> None:
    """Refuse ways to send weights that the servers of `separate_async` cannot receive."""
    backend = OmegaConf.select(config, _BACKEND)
    if backend == "naive":
        raise ConfigError(
            f"{_BACKEND}='naive' copies weights within one process, and trainer.v1.trainer_mode=separate_async has its "
            f"engines apart; set {_BACKEND}=nccl"
        )
    if backend == "delta_sharded" and config.actor_rollout_ref.rollout.name == ROLLOUT:
        raise ConfigError(
            f"{_BACKEND}='delta_sharded': verl 0.9.1 gives it to the rollout names 'sglang' and 'vllm' only, and "
            f"{_ROLLOUT}.name='sglang_async'; set {_BACKEND}=nccl"
        )

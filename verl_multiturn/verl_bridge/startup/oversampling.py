"""The part of the start-up check about over-sampling: `actor_rollout_ref.rollout.over_sample_rate`."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.names import ROLLOUT
from verl_multiturn.verl_bridge.settings import own_manager
from verl_multiturn.verl_bridge.startup.our_trainer import require_our_trainer

_KEY = "actor_rollout_ref.rollout.over_sample_rate"
_MOST = 0.5


def check_over_sampling(config: DictConfig) -> None:
    """Refuse a rate that is none, and a run in which no sample could be cut.

    Args:
        config: verl's whole configuration.

    Raises:
        ConfigError: the rate is not a number from 0 to 0.5, or another class than ours runs the samples.
    """
    rate = OmegaConf.select(config, _KEY)
    if rate is None:
        return
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= _MOST:
        raise ConfigError(
            f"{_KEY}={rate!r}: expected a number from 0 to {_MOST}, the share of the started samples that is cut; set "
            "0.25, or leave it out"
        )
    if rate == 0:
        return
    rollout = config.actor_rollout_ref.rollout
    given, otherwise = f"{_KEY}={rate!r}", "leave over_sample_rate out"
    if rollout.name != ROLLOUT:
        raise ConfigError(
            f"{given}: with actor_rollout_ref.rollout.name={rollout.name!r} single generations cannot be stopped; set "
            f"it to {ROLLOUT}, or {otherwise}"
        )
    require_our_trainer(config, given, otherwise)
    if (found := own_manager(rollout.agent)) is not None:
        raise ConfigError(
            f"{given}: actor_rollout_ref.rollout.agent.agent_loop_manager_class={found!r} does not cut samples; leave "
            f"it out, or {otherwise}"
        )

"""The part of the start-up check about over-sampling: `actor_rollout_ref.rollout.over_sample_rate`."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.errors import ConfigError

_KEY = "actor_rollout_ref.rollout.over_sample_rate"
_MOST = 0.5


def check_over_sampling(config: DictConfig, mode: str | None, manager: str) -> None:
    """Refuse a rate that is none, and a run in which no sample could be cut.

    Args:
        config: verl's whole configuration.
        mode: verl's name of the trainer that ours extends; None when it is not one that we extend.
        manager: class of our agent-loop manager, with its module.

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
    given, remedy = f"{_KEY}={rate!r}", "or leave over_sample_rate out"
    if rollout.name != "sglang_async":
        raise ConfigError(
            f"{given}: with actor_rollout_ref.rollout.name={rollout.name!r} single generations cannot be stopped; set "
            f"it to sglang_async, {remedy}"
        )
    if mode is None:
        name = OmegaConf.select(config, "trainer.v1.trainer_mode")
        raise ConfigError(
            f"{given}: only verl's own V1 trainers take it, got trainer.use_v1={config.trainer.use_v1!r} and "
            f"trainer.v1.trainer_mode={name!r}; use one of them, {remedy}"
        )
    if (found := rollout.agent.get("agent_loop_manager_class")) not in (None, "", manager):
        raise ConfigError(
            f"{given}: actor_rollout_ref.rollout.agent.agent_loop_manager_class={found!r} does not cut samples; leave "
            f"it out, {remedy}"
        )

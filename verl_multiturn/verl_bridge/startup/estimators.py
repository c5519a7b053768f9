"""The part of the start-up check about our estimators of advantages, filters of groups, and the weights of rows."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.config import PATH, MultiTurnSettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.names import ESTIMATORS
from verl_multiturn.verl_bridge.settings import estimator_of, may_have_several_rows
from verl_multiturn.verl_bridge.startup.our_trainer import require_our_trainer

_KEY = "algorithm.adv_estimator"


def check_estimators(config: DictConfig, settings: MultiTurnSettings) -> None:
    """Check the estimator of a run with our agent loop.

    Args:
        config: verl's whole configuration.
        settings: our settings in it.

    Raises:
        ConfigError: one of our estimators cannot work in this run, or a setting would have no effect.
    """
    estimator = estimator_of(config)
    if estimator in ESTIMATORS:
        _check_ours(config, f"{_KEY}={estimator}")
    elif unread := settings.advantage.model_dump(exclude_defaults=True):
        key, value = next(iter(unread.items()))
        raise ConfigError(
            f"{PATH}.advantage.{key}={value!r} has no effect with {_KEY}={estimator}; set the estimator to one of "
            f"{', '.join(ESTIMATORS)}, or leave it out"
        )
    filtered = OmegaConf.select(config, "algorithm.filter_groups") or {}
    if filtered.get("enable") and filtered.get("metric") == "reward" and may_have_several_rows(config, settings):
        raise ConfigError(
            "algorithm.filter_groups.metric='reward': verl compares the rewards of rows, and conversations have "
            "several here, so that groups with different conversations would be left out; set enable to False, or the "
            "metric to a number that compute_score returns, such as acc"
        )
    context = settings.context
    if context.mode != "append" and OmegaConf.select(config, "critic.enable"):
        raise ConfigError(
            f"{PATH}.context.mode={context.mode} with critic.enable=True: {estimator} uses no critic, and its updates "
            "would be counted in rows; set critic.enable=False"
        )
    if context.weight != "row":
        require_our_trainer(config, f"{PATH}.context.weight={context.weight}", "set the weight to row")


def _check_ours(config: DictConfig, given: str) -> None:
    require_our_trainer(config, given, f"set {_KEY}=grpo")
    if (n := config.actor_rollout_ref.rollout.n) < 2:
        raise ConfigError(
            f"{given} with actor_rollout_ref.rollout.n={n}: it compares conversations of one prompt, and there is only "
            "one; set rollout.n to 2 or more"
        )
    if (gamma := OmegaConf.select(config, "algorithm.gamma")) not in (None, 1.0):
        raise ConfigError(
            f"algorithm.gamma={gamma!r}: {given} discounts turns, not tokens; set {PATH}.advantage.gamma, and leave "
            "algorithm.gamma at 1.0"
        )

"""The part of the start-up check about scores: it refuses settings that would silently drop a reward."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.config import PATH, MultiTurnSettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.startup.our_trainer import is_v1, require_our_trainer


def check_scores(config: DictConfig, settings: MultiTurnSettings) -> None:
    """Check the settings `tool_reward`, `interaction_reward` and `otc`.

    Args:
        config: verl's whole configuration.
        settings: our settings in it.

    Raises:
        ConfigError: one of the settings would have no effect, or nothing to work on.
    """
    for name, mode in _modes(settings).items():
        if mode != "none":
            _check_reward(config, name, mode)
    if settings.otc.form != "none":
        _check_otc(config, settings)


def _modes(settings: MultiTurnSettings) -> dict[str, str]:
    return {name: getattr(settings, name).mode for name in ("tool_reward", "interaction_reward")}


def _check_reward(config: DictConfig, name: str, mode: str) -> None:
    given = f"{PATH}.{name}.mode={mode}"
    if not is_v1(config):
        raise ConfigError(f"{given}: only verl's V1 trainer takes it; set trainer.use_v1=True, or the mode to none")
    if section := colocated_reward_model(config):
        raise ConfigError(
            f"{given}: the scores of {section} without a resource pool of its own replace these rewards; set "
            f"{section}.enable_resource_pool=True, or the mode to none"
        )
    filtered = OmegaConf.select(config, "algorithm.filter_groups") or {}
    if mode == "replace" and filtered.get("enable") and filtered.get("metric") != "reward":
        raise ConfigError(
            f"{given}: compute_score is not called, so that algorithm.filter_groups.metric={filtered.get('metric')!r} "
            "does not exist; set it to reward"
        )


def _check_otc(config: DictConfig, settings: MultiTurnSettings) -> None:
    form = settings.otc.form
    given = f"{PATH}.otc.form={form}"
    require_our_trainer(config, given, "set the form to none")
    for name, mode in (
        ("tool_reward", settings.tool_reward.mode),
        ("interaction_reward", settings.interaction_reward.mode),
    ):
        if mode == "replace":
            raise ConfigError(
                f"{given}: it scales what compute_score gives, which {name}.mode=replace does not call; set the mode "
                "to add or none, or the form to none"
            )
    if section := colocated_reward_model(config):
        raise ConfigError(
            f"{given}: it scales what compute_score gives, and the scores of {section} without a resource pool of its "
            f"own replace that; set {section}.enable_resource_pool=True, or the form to none"
        )
    if form == "grpo" and config.actor_rollout_ref.rollout.n == 1:
        raise ConfigError(
            f"{given}: it compares the answers to one question, and actor_rollout_ref.rollout.n=1; set n to 2 or more, "
            "or the form to ppo"
        )


def colocated_reward_model(config: DictConfig) -> str | None:
    """Return the section of a reward model that runs on the trainer's own devices; None without one.

    The scores of such a model replace all other scores.
    """
    # `reward_model` is verl's older section; the trainer moves it into `reward.reward_model`.
    for section in ("reward.reward_model", "reward_model"):
        model = OmegaConf.select(config, section) or {}
        if model.get("enable") and not model.get("enable_resource_pool"):
            return section
    return None

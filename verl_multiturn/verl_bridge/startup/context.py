"""The part of the start-up check about conversations of several rows."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_multiturn.config import PATH, MultiTurnSettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.names import ESTIMATORS
from verl_multiturn.verl_bridge.settings import estimator_of
from verl_multiturn.verl_bridge.startup.our_trainer import require_our_trainer


def check_context(config: DictConfig, settings: MultiTurnSettings) -> None:
    """Check the settings under which a conversation may have several rows.

    Args:
        config: verl's whole configuration.
        settings: our settings in it.

    Raises:
        ConfigError: several rows do not go together with something else, or a setting would have no effect.
    """
    context = settings.context
    given = f"{PATH}.context.mode={context.mode}"
    if context.mode == "append":
        for key in ("turns", "summary_prompt", "summary_length"):
            if getattr(context, key) != type(context).model_fields[key].default:
                raise ConfigError(
                    f"{PATH}.context.{key}={getattr(context, key)!r} has no effect with {given}; set the mode to "
                    "window or overflow, or leave it out"
                )
        return
    if context.mode == "window" and context.summary_prompt is not None:
        raise ConfigError(
            f"{PATH}.context.summary_prompt={context.summary_prompt!r} has no effect with {given}: nothing "
            "overflows; set the mode to overflow, or leave it out"
        )
    estimator = estimator_of(config)
    if estimator not in ESTIMATORS:
        raise ConfigError(
            f"{given}: conversations have several rows, and algorithm.adv_estimator={estimator} counts each row as a "
            f"conversation; set it to one of {list(ESTIMATORS)}, or the mode to append"
        )
    require_our_trainer(config, given, "set the mode to append")
    if settings.otc.form != "none":
        raise ConfigError(
            f"{given}: {PATH}.otc.form={settings.otc.form} scales the score of a single row; set the form to none, or "
            "the mode to append"
        )
    if config.actor_rollout_ref.rollout.multi_turn.format == "tir":
        raise ConfigError(
            f"{given}: in text mode a conversation is one text, and no turn can be left out; set the mode to append"
        )
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    if multi_turn.max_assistant_turns is None and multi_turn.max_user_turns is None:
        raise ConfigError(
            f"{given}: no length ends a conversation any more, and neither multi_turn.max_assistant_turns nor "
            "max_user_turns does; set one of them"
        )

"""The trainers of verl that ours extend, and whether a run uses one of them."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.describe import did_you_mean
from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.names import OUR_TRAINER

_MODES = ("sync", "colocate_async", "separate_async")


def is_v1(config: DictConfig) -> bool:
    """Tell whether verl's V1 trainer runs.

    verl's fully asynchronous program has a trainer of its own; its configuration has the section `async_training`.
    """
    return bool(config.trainer.use_v1) and "async_training" not in config


def our_mode(config: DictConfig) -> str | None:
    """Return verl's name of the configured trainer if we have one that extends it; None otherwise."""
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode")).removeprefix(OUR_TRAINER)
    return mode if is_v1(config) and mode in _MODES else None


def check_mode(config: DictConfig) -> None:
    """Refuse a misspelt name of a trainer, which verl would find only after Ray has started.

    A name that is like none of verl's may be that of a trainer which only the trainer's own process registers.

    Args:
        config: verl's whole configuration.

    Raises:
        ConfigError: the name is like one of verl's, and no trainer has it.
    """
    name = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
    if not is_v1(config) or our_mode(config) is not None or not (hint := did_you_mean(name, _MODES)):
        return
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    if name not in TRAINER_REGISTRY:
        raise ConfigError(f"trainer.v1.trainer_mode={name!r}: no trainer has this name; {hint}")


def require_our_trainer(config: DictConfig, given: str, otherwise: str) -> str:
    """Return verl's name of the trainer that ours extends.

    Args:
        config: verl's whole configuration.
        given: the setting that only our trainers take, with its value.
        otherwise: what to do instead of using such a trainer, for example "leave it out".

    Raises:
        ConfigError: another trainer is configured.
    """
    mode = our_mode(config)
    if mode is None:
        name = OmegaConf.select(config, "trainer.v1.trainer_mode")
        raise ConfigError(
            f"{given}: only verl's own V1 trainers take it, got trainer.use_v1={config.trainer.use_v1!r} and "
            f"trainer.v1.trainer_mode={name!r}; use one of them, or {otherwise}"
        )
    return mode

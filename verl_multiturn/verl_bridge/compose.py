"""verl's whole configuration, built from command-line flags without starting anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_module

_NAME = "--config-name="


def compose_config(flags: Sequence[str]) -> Any:
    """Return the configuration that `python -m verl.trainer.main_ppo FLAGS` would have.

    Args:
        flags: overrides, and optionally `--config-name=…`; flags for Hydra itself (`hydra.…`) are ignored.

    Raises:
        hydra.errors.HydraException: a flag does not fit the configuration.
    """
    names = [flag.removeprefix(_NAME) for flag in flags if flag.startswith(_NAME)]
    overrides = [flag for flag in flags if not flag.startswith((_NAME, "hydra."))]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(names[-1] if names else "ppo_trainer", overrides=overrides)

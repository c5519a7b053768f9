"""verl's whole configuration for tests, built from overrides without starting anything."""

from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_module


def compose_config(overrides: Sequence[str]) -> Any:
    """Return the configuration that `python -m verl.trainer.main_ppo OVERRIDES` would have, with engines of one GPU."""
    overrides = ["actor_rollout_ref.rollout.tensor_model_parallel_size=1", *overrides]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides)

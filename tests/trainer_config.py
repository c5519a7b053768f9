"""verl's whole configuration for tests, built from overrides without starting anything."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from hydra import compose, initialize_config_module

_PLAIN = re.compile(r"\+{0,2}(?!hydra\.)\w+(\.\w+)+=")


def compose_config(overrides: Sequence[str]) -> Any:
    """Return the configuration that `python -m verl.trainer.main_ppo OVERRIDES` would have, with engines of one GPU.

    Hydra reads verl's thirty files once, where all overrides are of values: these are then applied to a copy, as Hydra
    itself applies them.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser

    overrides = ["actor_rollout_ref.rollout.tensor_model_parallel_size=1", *overrides]
    if not all(map(_PLAIN.match, overrides)):
        return pickle.loads(_composed(tuple(overrides)))
    config = pickle.loads(_composed(()))
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(overrides), config)
    return config


@cache
def _composed(overrides: tuple[str, ...]) -> bytes:
    return pickle.dumps(compose_in_full(overrides))


def compose_in_full(overrides: Sequence[str]) -> Any:
    """Return Hydra's composition of verl's files and all overrides."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))

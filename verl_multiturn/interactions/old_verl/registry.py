"""The names of `verl.interactions.utils.interaction_registry`, for agent loops that were written with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_multiturn.interactions.running.registry import interaction_class, load_interactions


def get_interaction_class(cls_name: str) -> Any:
    """Return the class of a dotted name.

    Args:
        cls_name: The name, `package.module.Class`.

    Raises:
        ConfigError: There is no such class, or it is not an interaction.
    """
    return interaction_class(cls_name, "get_interaction_class")


def initialize_interactions_from_config(interaction_config_file: str | Path) -> dict[str, Any]:
    """Load the interactions of a YAML file by name; those of old classes as objects of these classes.

    Args:
        interaction_config_file: The path of the file.

    Raises:
        ConfigError: The file, or an entry in it, is wrong.
    """
    loaded = load_interactions(interaction_config_file)
    return {name: getattr(interaction, "old", interaction) for name, interaction in loaded.items()}

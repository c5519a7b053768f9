"""The part of the start-up check about interactions: simulated users and environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow.parquet
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_multiturn.chat.template_rules import NO_USER_TURN, Rule
from verl_multiturn.chat.tir import TIR
from verl_multiturn.config import PATH, MultiTurnSettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.base import Interaction
from verl_multiturn.interactions.running.registry import interaction_of_row, load_interactions

_OLD_KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"


def move_old_key(config: DictConfig) -> None:
    """Move verl's old key of the interactions' YAML to ours: verl 0.9.1 does not know it and would raise a TypeError.

    Args:
        config: verl's whole configuration.

    Raises:
        ConfigError: both keys are given, and differ.
    """
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    if "interaction_config_path" not in multi_turn:
        return
    with open_dict(config):
        path = multi_turn.pop("interaction_config_path")
        if path is None:
            return
        key = f"{PATH}.interaction_config_path"
        ours = OmegaConf.select(config, key)
        if ours not in (None, path):
            raise ConfigError(f"{_OLD_KEY}={path!r}, but {key}={ours!r}; leave the first out")
        OmegaConf.update(config, key, path, force_add=True)


def check_interactions(config: DictConfig, settings: MultiTurnSettings) -> None:
    """Check the settings of interactions, and make the path of their YAML absolute.

    Args:
        config: verl's whole configuration.
        settings: our settings in it.

    Raises:
        ConfigError: the YAML, a class in it or a data row cannot be used, or a setting would have no effect.
    """
    path = settings.interaction_config_path
    if path is None:
        if settings.interaction_reward.mode != "none":
            raise ConfigError(
                f"{PATH}.interaction_reward.mode={settings.interaction_reward.mode}, but the run has no interactions; "
                f"set {PATH}.interaction_config_path, or the mode to none"
            )
        return
    if config.actor_rollout_ref.rollout.multi_turn.format == TIR:
        raise ConfigError(
            f"{PATH}.interaction_config_path={path!r}: in text mode (multi_turn.format={TIR}) a conversation is one "
            "text without turns that a user could answer; use another format, or leave the interactions out"
        )
    _check_rows(config, load_interactions(path))
    with open_dict(config):  # workers may have another working directory
        OmegaConf.update(config, f"{PATH}.interaction_config_path", str(Path(path).resolve()))


def _check_rows(config: DictConfig, interactions: Mapping[str, Interaction]) -> None:
    """Refuse data rows whose interaction does not exist, or cannot be called with their kwargs.

    Rows of a data set class of the user's own, and of files that are no local parquet files, are looked at only when
    their conversation begins.
    """
    if OmegaConf.select(config, "data.custom_cls.path"):
        return
    for key in ("train_files", "val_files"):
        listed = OmegaConf.select(config, f"data.{key}")
        for file in [listed] if isinstance(listed, str) else list(listed or []):
            path = Path(str(file)).expanduser()
            if path.suffix != ".parquet" or not path.is_file():
                continue
            has_column = "extra_info" in pyarrow.parquet.read_schema(path).names
            columns = ["extra_info"] if has_column else []
            for index, row in enumerate(pyarrow.parquet.read_table(path, columns=columns).to_pylist()):
                interaction_of_row(row, interactions, f"{path}: row {index}")


def check_user_turns(model: str, rules: Sequence[Rule], settings: MultiTurnSettings) -> None:
    """Refuse interactions with a chat template in which no user turn can follow a turn of the assistant's.

    Args:
        model: folder of the model, for the message.
        rules: the rules that its template keeps or breaks.
        settings: our settings.

    Raises:
        ConfigError: there are interactions, and the template cannot show what they say.
    """
    found = next((rule.found for rule in rules if rule.found.startswith(NO_USER_TURN)), None)
    if found is not None and settings.interaction_config_path is not None:
        raise ConfigError(
            f"{PATH}.interaction_config_path={settings.interaction_config_path!r}: with the chat template of "
            f"{model!r} {found}; use another model, or leave the interactions out"
        )

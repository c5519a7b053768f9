"""The run's file (`schema.RunFile`): the components of a start of a run."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from platform import python_version
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from verl.utils.import_utils import resolve_config_path

from verl_multiturn.calls.loading.yaml_text import read_yaml
from verl_multiturn.describe import describe
from verl_multiturn.records.schema import SCHEMA
from verl_multiturn.records.write.configuration_secrets import without_secrets
from verl_multiturn.records.write.run_file import digest, digest_of_vocabulary
from verl_multiturn.runs.imports import PACKAGE
from verl_multiturn.verl_bridge.settings import settings_of

logger = logging.getLogger(__name__)

_PACKAGES = {"verl_multiturn": "verl-multiturn", "verl": "verl", "sglang": "sglang", "torch": "torch",
             "transformers": "transformers", "ray": "ray"}  # fmt: skip
_REWARD = ("reward.custom_reward_function", "custom_reward_function")
"""Places of the reward function; verl takes the older one where it is set."""


def run_file(
    trainer: Any,
    start: str,
    began: float,
    resumed_from: int | None,
    reference_step: int | None = None,
    schemas: Sequence[Any] = (),
) -> dict[str, Any]:
    """Return the content of the file of a run.

    Args:
        trainer: Our trainer, which is set up.
        start: The start, as file names have it.
        began: When it began.
        resumed_from: Step of the checkpoint that it began with; None: none.
        reference_step: Step whose weights the reference of the KL term has then; None: it is never reset.
        schemas: Schemas of all tools, as far as they are known.
    """
    config: DictConfig = trainer.config
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    rollout = config.actor_rollout_ref.rollout
    settings = settings_of(rollout)
    tools = settings.derived.tool_config_path or OmegaConf.select(rollout, "multi_turn.tool_config_path")
    tokenizer = getattr(trainer, "tokenizer", None)
    return {
        "schema": SCHEMA,
        "start": start,
        "began": began,
        "host": socket.gethostname(),
        "versions": {**dict(_versions()), "python": python_version()},
        "settings": without_secrets(resolved),
        "tools": _yaml(tools),
        "interactions": _yaml(settings.interaction_config_path),
        "schemas": list(schemas),
        "tokenizer": _tokenizer(config, tokenizer),
        "template": _template(config, tokenizer),
        "reward_function": reward_function(config),
        "resumed_from": resumed_from,
        "reference_step": reference_step,
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name, package in _PACKAGES.items():
        try:
            yield name, version(package)
        except PackageNotFoundError:
            continue


def _yaml(path: str | None) -> Any:
    if not path:
        return None
    try:
        found = read_yaml(Path(resolve_config_path(path)).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError) as error:
        logger.warning("the records do not have %s: %s", path, describe(error))
        return None
    return without_secrets(found)


def _tokenizer(config: DictConfig, tokenizer: Any) -> dict[str, Any]:
    path = OmegaConf.select(config, "actor_rollout_ref.model.tokenizer_path") or OmegaConf.select(
        config, "actor_rollout_ref.model.path"
    )
    if tokenizer is None:
        return {"path": path}
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    return {
        "path": path,
        "class": type(tokenizer).__name__,
        "size": len(vocabulary),
        "digest": digest_of_vocabulary(vocabulary),
    }


def _template(config: DictConfig, tokenizer: Any) -> dict[str, Any]:
    text = OmegaConf.select(config, "actor_rollout_ref.model.custom_chat_template") or getattr(
        tokenizer, "chat_template", None
    )
    if isinstance(text, Mapping):  # several templates by name
        text = text.get("default")
    return {"digest": digest(str(text).encode()), "text": str(text)} if text else {}


def reward_function(config: DictConfig) -> dict[str, Any]:
    """Return path, name and digest of the file of the run's reward function; {} for verl's own."""
    for place in reversed(_REWARD):
        path = OmegaConf.select(config, f"{place}.path")
        if not path:
            continue
        found = {"path": str(path), "name": str(OmegaConf.select(config, f"{place}.name"))}
        file = _file_of(str(path))
        return {**found, "digest": digest(file.read_bytes())} if file is not None and file.is_file() else found
    return {}


def _file_of(path: str) -> Path | None:
    """Return the file of a reward function: verl takes a path, and `pkg://` before a module's name."""
    if not path.startswith(PACKAGE):
        return Path(path.removeprefix("file://"))
    spec = find_spec(path.removeprefix(PACKAGE))
    return None if spec is None or spec.origin is None else Path(spec.origin)

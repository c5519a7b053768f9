"""`find_model`: the folder with a model's weights in the form of Hugging Face, whatever the user names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.launch.model_hash import INDEX, WEIGHTS, model_hash


@dataclass(frozen=True)
class FoundModel:
    """A model on this machine."""

    named: str
    """As the user named it."""
    folder: Path
    """Its folder, with weights, tokenizer and config.json."""
    weights: str
    """Hash of its weights."""
    origin: Mapping[str, Any] | None = None
    """File of the run that it comes from (`schema.RunFile`); None: nobody knows it."""


def find_model(named: str) -> FoundModel:
    """Return the model of a folder.

    Args:
        named: A folder in the form of Hugging Face.

    Raises:
        ConfigError: It is none.
    """
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"MODEL {named!r} is no folder; name a run's folder, a checkpoint of verl or a model's folder")
    if not _has_weights(folder):
        raise ConfigError(f"MODEL {named!r} holds no weights in the form of Hugging Face; name a folder that does")
    folder = folder.resolve()
    return FoundModel(named, folder, model_hash(folder))


def _has_weights(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any((folder / name).is_file() for name in (WEIGHTS, INDEX))


def origin_of(run: Path) -> dict[str, Any] | None:
    """Return the file of a run's last start (`schema.RunFile`); None: there is none.

    Args:
        run: The run's folder.
    """
    for path in sorted((run / "records").glob("run-*.json"), reverse=True):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return None

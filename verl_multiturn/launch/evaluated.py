"""`evaluated`: the weights that an evaluation asks, and what is known of the run that they come from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.launch.model_hash import model_hash
from verl_multiturn.launch.models import Model

_EXPORTED = "model"
"""Folder of an evaluation in which a checkpoint is exported."""


@dataclass(frozen=True)
class EvaluatedModel:
    """A model as SGLang loads it."""

    named: str
    """As the user named it."""
    folder: Path
    """Folder in the form of Hugging Face."""
    weights: str
    """Hash of its weights."""
    origin: Mapping[str, Any]
    """What the file of its run says (`schema.RunFile`); of an export, its `schemas` alone; {}: nothing is known."""


def evaluated(named: str, model: Model, out: Path, tell: Callable[[str], None]) -> EvaluatedModel:
    """Return the weights of a model; a checkpoint is exported into the evaluation's folder, once.

    Args:
        named: The model as the user named it.
        model: Where it lies.
        out: Folder of the evaluation.
        tell: Gets a line about each part of an export.

    Raises:
        ConfigError: It cannot be exported, or its weights cannot be read.
        ExportError: The export failed.
    """
    if not model.ranks:
        folder = model.folder.resolve()
        return EvaluatedModel(named, folder, model_hash(folder), _of_export(folder))
    from verl_multiturn.launch.export import export  # it loads torch
    from verl_multiturn.launch.model_card import run_file_of

    folder = (out / _EXPORTED).resolve()
    noted = {"checkpoint": str(model.folder.resolve()), "step": model.step}
    marker = out / f"{_EXPORTED}.json"
    if folder.is_dir():  # whole: an export appears under its name when it is
        there = json.loads(marker.read_text(encoding="utf-8")) if marker.is_file() else None
        if there != noted:
            raise ConfigError(f"{str(out)!r} holds the export of {there}, and not of {noted}; name another --out")
    else:
        out.mkdir(parents=True, exist_ok=True)
        marker.write_text(json.dumps(noted) + "\n", encoding="utf-8")
        export(model, folder, None, tell)
    return EvaluatedModel(named, folder, model_hash(folder), run_file_of(model))


def rows_of_run(model: Model) -> tuple[Path, ...] | None:
    """Return the files of a run's validation rows; None: there is no run, or they are not here any more."""
    listed = model.setting("data.val_files") if model.run is not None else None
    files = [Path(str(each)) for each in ([listed] if isinstance(listed, str) else listed or [])]
    return tuple(files) if files and all(file.is_file() for file in files) else None


def names_of(models: Sequence[Model]) -> list[str]:
    """Return a name for each model's folder, all of them different."""
    found: list[str] = []
    for model in models:
        name = model.folder.name if model.run is None else model.run.name
        name = name if model.step is None else f"{name}-{model.step}"
        found.append(name if name not in found else f"{name}-{len(found)}")
    return found


def _of_export(folder: Path) -> dict[str, Any]:
    try:
        return {"schemas": json.loads((folder / "tools.json").read_text(encoding="utf-8"))}
    except (OSError, ValueError):
        return {}

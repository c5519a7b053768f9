"""`evaluated`: the weights of an evaluation, and the known data of the run that they come from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.models.export_result import TOOLS, is_schema
from verl_multiturn.models.hash import model_hash
from verl_multiturn.models.location import Model, run_of
from verl_multiturn.trust.files import require_plain_folder
from verl_multiturn.trust.rule import UserFiles, is_own, require_trust

_MODEL_CODE = "actor_rollout_ref.model.trust_remote_code"
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
    """Content of its run's file (`schema.RunFile`); of an export, its `schemas` alone; {}: nothing is known."""


def evaluated(
    named: str, model: Model, out: Path, tell: Callable[[str], None], model_code: bool | None = None
) -> EvaluatedModel:
    """Return the weights of a model; a checkpoint is exported into the evaluation's folder, once.

    Args:
        named: The model as the user named it.
        model: Where it lies.
        out: Folder of the evaluation.
        tell: Gets a line about each part of an export.
        model_code: Whether the Python files that come with the model run; None: as in its run.

    Raises:
        ConfigError: It cannot be exported, or its weights cannot be read.
        ExportError: The export failed.
    """
    if not model.ranks:
        folder = model.folder.resolve()
        return EvaluatedModel(named, folder, model_hash(folder), _of_export(folder, tell))
    from transformers.utils import logging

    from verl_multiturn.models.card import run_file_of
    from verl_multiturn.models.export import export

    folder = (out / _EXPORTED).resolve()
    noted = {"checkpoint": str(model.folder.resolve()), "step": model.step}
    marker = out / f"{_EXPORTED}.json"
    if folder.is_dir():  # whole: an export appears under its name when it is
        there = json.loads(marker.read_text(encoding="utf-8")) if marker.is_file() else None
        if there != noted:
            raise ConfigError(f"{str(out)!r} holds the export of {there}, and not of {noted}; name another --out")
        require_plain_folder(folder)
    else:
        out.mkdir(parents=True, exist_ok=True)
        marker.write_text(json.dumps(noted) + "\n", encoding="utf-8")
        logging.disable_progress_bar()
        runs_code = bool(model.setting(_MODEL_CODE)) if model_code is None else model_code
        export(model, folder, None, tell, UserFiles(runs_code))
    return EvaluatedModel(named, folder, model_hash(folder), run_file_of(model))


def require_trusted(command: str, named: Path, is_trusted: bool, recipes_outputs: Path) -> bool:
    """Refuse somebody else's run, of whose configuration a command would use more than data.

    A model without a run is data, and so are its weights and tokenizer; its own Python files are another question
    (`runs_model_code`).

    Args:
        command: Name of the command.
        named: The model as the user named it.
        is_trusted: Whether the user gave `--trust`.
        recipes_outputs: Folder below which `run` puts the runs of the command's recipe.

    Returns:
        Whether `find_model` may follow the paths of a run's configuration.

    Raises:
        ConfigError: The run is not the user's own, and not trusted.
    """
    run = run_of(named)
    if run is None:
        return is_trusted
    model = Model(named, 0, named, run)
    uses = [f"the rows {show(path)}" for path in _row_files(model, "data.val_files")]
    uses += ["the model's own Python files"] if model.setting(_MODEL_CODE) else []
    uses += [f"its base {show(base)}"] if (base := model.setting("actor_rollout_ref.model.path")) else []
    require_trust(named, command, uses or ["the paths of its configuration"], is_trusted, recipes_outputs)
    return is_trusted or is_own(run, recipes_outputs)


def runs_model_code(model: Model, is_trusted: bool, model_code: bool) -> bool | None:
    """Return whether a model's own Python files run; None: it is the user's own model, whose recipe decides.

    Args:
        model: Where the model lies.
        is_trusted: Whether the user gave `--trust`.
        model_code: Whether the user gave `--trust-remote-code`.
    """
    if is_trusted or model_code:
        return True
    return None if model.is_own or is_own(model.folder) else False


def rows_of_run(model: Model, key: str = "data.val_files") -> tuple[Path, ...] | None:
    """Return the files of a run's rows; None: there is no run, or they are not here any more.

    Args:
        model: The model.
        key: Path of the setting that names them.
    """
    files = [Path(path) for path in _row_files(model, key)]
    return tuple(files) if files and all(file.is_file() for file in files) else None


def _row_files(model: Model, key: str) -> list[str]:
    listed = model.setting(key) if model.run is not None else None
    return [str(each) for each in ([listed] if isinstance(listed, str) else listed if isinstance(listed, list) else [])]


def names_of(models: Sequence[Model]) -> list[str]:
    """Return a name for each model's folder, all of them different."""
    found: list[str] = []
    for model in models:
        name = model.folder.name if model.run is None else model.run.name
        name = name if model.step is None else f"{name}-{model.step}"
        found.append(name if name not in found else f"{name}-{len(found)}")
    return found


def _of_export(folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    path = folder / TOOLS
    if not path.is_file():
        return {}
    try:
        schemas = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        schemas = None
    if isinstance(schemas, list) and all(map(is_schema, schemas)):
        return {"schemas": schemas}
    tell(f"{str(path)!r} is no list of tools' schemas, and the recipe's tools are not compared with it")
    return {}

"""The rows of a run: a recipe's script writes them, unless the folder has them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.environment import python
from verl_multiturn.runs.plan import RunPlan
from verl_multiturn.runs.processes import run_watched
from verl_multiturn.runs.progress import say
from verl_multiturn.runs.run_folder import RunFolder


def prepare_data(
    plan: RunPlan, config: Mapping[str, Any], folder: RunFolder, environment: Mapping[str, str], lock: int
) -> int:
    """Run the script that writes the rows unless the folder has them, and return its exit status.

    A smoke run, and a run with data that the user names, always write new rows.
    """
    recipe = config["recipe"]
    if not _takes_rows_of(folder, config):
        return 0
    words = prepare_words(recipe)
    script, tools = Path(recipe["prepare_data"]), recipe["tools"]
    made = {
        "script": f"{script.parent.name}/{script.name} {_digest(script)}",
        "words": words,
        "tools": Path(tools).name if tools else None,
        "smoke": plan.smoke,
        "source": plan.data,
    }
    command = [python(), str(script), "--out", str(folder.path / "data")]
    command += ["--smoke"] if plan.smoke else []
    command += ["--tools", tools] if tools else []
    command += [*words, *(["--source", plan.data] if plan.data is not None else [])]
    with folder.rows_held():
        if folder.has_rows(made):
            return 0
        folder.begin_rows(made)
        status = run_watched(command, environment, lock=lock)
        folder.end_rows(made, complete=status == 0)
    if status == 0:
        say(f"rows: {folder.described_rows()}")
    return status if status >= 0 else 1


def _digest(script: Path) -> str:
    """Return a short digest of a script, and fail clearly if there is none."""
    try:
        return hashlib.sha256(script.read_bytes()).hexdigest()[:12]
    except FileNotFoundError:
        raise ConfigError(
            f"recipe.prepare_data={script}: no such file; write a script that makes the rows, or name finished ones "
            "with data.train_files=… data.val_files=…"
        ) from None


def _takes_rows_of(folder: RunFolder, config: Mapping[str, Any]) -> bool:
    """Return whether the trainer reads rows from the run's folder; the user may have named other files."""
    data = config["data"]
    named = [os.path.realpath(each) for key in ("train_files", "val_files") for each in _listed(data.get(key))]
    rows = os.path.realpath(folder.path / "data")
    return not named or any(each in (f"{rows}/train.parquet", f"{rows}/test.parquet") for each in named)


def _listed(value: Any) -> list[str]:
    return [] if value is None else [str(each) for each in value] if isinstance(value, list) else [str(value)]


def prepare_words(recipe: Mapping[str, Any]) -> list[str]:
    """Return a recipe's own options for its script that writes the rows.

    Example: `{"no-tool": True, "splits": ["a", "b"]}` returns `["--no-tool", "--splits", "a", "b"]`.

    Args:
        recipe: The section `recipe` of the composed configuration. An option in its `prepare` that is None or False is
            omitted.
    """
    words: list[str] = []
    for key, value in recipe["prepare"].items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{key}", *map(str, values)]
    return words

"""Recipes for tests: a module of one, its script's files, the configuration that its trainer gets."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pyarrow.parquet
from click.testing import Result
from omegaconf import OmegaConf
from typer.testing import CliRunner

from tests.conftest import ROOT
from verl_multiturn.cli.main import app
from verl_multiturn.runs.compose import compose_run, resolved
from verl_multiturn.runs.plan import plan_run

RECIPES = ROOT / "recipes"
_PRINT_ARGUMENTS = ROOT / "tests" / "print_arguments.sh"


def script(recipe: str, name: str = "prepare_data") -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{recipe}_{name}", RECIPES / recipe / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepared(recipe: str, folder: Path, *words: str) -> dict[str, list[dict[str, Any]]]:
    """Run the script of a recipe's rows in this process, and return the rows that it wrote."""
    with mock.patch.object(sys, "argv", ["prepare_data.py", "--out", str(folder), *words]):
        script(recipe).main()
    return {split: pyarrow.parquet.read_table(folder / f"{split}.parquet").to_pylist() for split in ("train", "test")}


def composed(recipe: str, *variants: str, overrides: Sequence[str] = (), **options: Any) -> Any:
    """Return the configuration of a recipe, resolved."""
    launch = plan_run(recipe, variants=variants, overrides=overrides, **options)
    return OmegaConf.create(resolved(compose_run(launch)))


def write_run(folder: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write the folder of a run of one step with given records, as a recipe's report reads it."""
    (folder / "records").mkdir()
    (folder / "records" / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    data = {"critic/score/mean": 7.0, "rollout/certificate/violations": 0, "rollout/certificate/rows": 2}
    data |= {"training/rollout_probs_diff_mean": 1e-7, "timing_s/step": 3.0}
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": data}) + "\n")
    (folder / "start_up.json").write_text(json.dumps({"started": 0.0, "seconds": {}, "seed": 5}))


def run_script(script: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    return subprocess.run(["bash", str(script), *words], capture_output=True, text=True, env=environment, check=False)


def run_here(command: str, *words: str, **variables: str) -> Result:
    """Run a shell command that starts a recipe's script; programs of ours that the script starts run in this process.

    A process of its own would import everything again, which takes longer than most tests.

    Args:
        command: The command, for example `bash recipes/torl/run.sh --smoke`.
        words: Further arguments.
        variables: Environment variables.
    """
    environment = {**os.environ, "PYTHON": str(_PRINT_ARGUMENTS)}
    told = subprocess.run(
        ["bash", "-c", f'{command} "$@"', "bash", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        check=True,
        cwd=ROOT,
    )
    module, name, *arguments = told.stdout.split("\0")[:-1]
    assert (module, name) == ("-m", "verl_multiturn.cli")
    return CliRunner().invoke(app, arguments, env={"PYTHON": sys.executable, **variables})

"""Recipes for tests: a module of one, what its script writes, the configuration that its trainer gets."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet
from omegaconf import OmegaConf

from tests.conftest import ROOT
from verl_multiturn.launch.compose import compose_run, resolved
from verl_multiturn.launch.plan import plan_run

RECIPES = ROOT / "recipes"


def script(recipe: str, name: str = "prepare_data") -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{recipe}_{name}", RECIPES / recipe / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepared(recipe: str, folder: Path, *words: str) -> dict[str, list[dict[str, Any]]]:
    command = [sys.executable, str(RECIPES / recipe / "prepare_data.py"), "--out", str(folder), *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return {split: pyarrow.parquet.read_table(folder / f"{split}.parquet").to_pylist() for split in ("train", "test")}


def composed(recipe: str, *variants: str, overrides: Sequence[str] = (), **options: Any) -> Any:
    """Return the configuration of a recipe, resolved."""
    launch = plan_run(recipe, variants=variants, overrides=overrides, **options)
    return OmegaConf.create(resolved(compose_run(launch)))


def run_script(script: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    return subprocess.run(["bash", str(script), *words], capture_output=True, text=True, env=environment, check=False)

"""Recipes' scripts for tests: load a script as a module, run it for its rows, print the flags of `run.sh`."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet

from tests.conftest import ROOT

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


def printed(recipe: str, *words: str) -> list[str]:
    command = ["bash", str(RECIPES / recipe / "run.sh"), "--print", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def last(flags: list[str], key: str) -> str:
    return [flag.partition("=")[2] for flag in flags if flag.startswith(f"{key}=")][-1]

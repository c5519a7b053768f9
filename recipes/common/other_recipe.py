"""The module `prepare_data.py` of another recipe, for recipes that make rows by the code of others."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType


@functools.cache
def recipe(name: str) -> ModuleType:
    """Import another recipe's `prepare_data.py`, and return the module.

    Args:
        name: The recipe's folder.
    """
    path = Path(__file__).resolve().parents[1] / name / "prepare_data.py"
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

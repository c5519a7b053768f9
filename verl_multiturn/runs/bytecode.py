"""Where the processes of a run keep compiled code, on machines whose Python is configured to write none.

Many containers set PYTHONDONTWRITEBYTECODE. Each process of a run would then compile PyTorch, verl and SGLang anew,
which takes as long as their import.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from verl_multiturn.paths import cache_folder


def bytecode_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a run's processes keep compiled code in the user's cache; for `environment_of`.

    There are none where Python writes it as always, where the user names a folder (PYTHONPYCACHEPREFIX), and where the
    installed packages are compiled already. Nothing is written beside them. Python goes on without the folder where it
    cannot be written.

    Args:
        environment: The environment variables of the run's processes.
    """
    if not environment.get("PYTHONDONTWRITEBYTECODE") or environment.get("PYTHONPYCACHEPREFIX") or _is_compiled():
        return {}
    try:
        folder = cache_folder("bytecode", environment)
    except RuntimeError:  # no home folder is known
        return {}
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder)}  # Python takes an empty value for none


def _is_compiled() -> bool:
    """Return whether the largest of the installed packages has compiled code beside it, as pip makes it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    return (Path(found.origin).parent / "__pycache__").is_dir()

"""The recipes that come with this package: `verl-multiturn recipe list` and `recipe copy`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from verl_multiturn.describe import did_you_mean
from verl_multiturn.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent
_SHARED = "common"
_LEFT = shutil.ignore_patterns("__pycache__", "*.pyc")


def shipped_folder() -> Path:
    """Return the folder that holds `recipes/` and `tool_configs/`.

    In a wheel it lies within the package, in a checkout beside the package.

    Raises:
        ConfigError: There is no such folder.
    """
    for folder in (_PACKAGE / "shipped", _PACKAGE.parent):
        if (folder / "recipes" / _SHARED).is_dir():
            return folder
    raise ConfigError(f"no recipes beside {str(_PACKAGE)!r}; install the package from its wheel or a checkout")


def is_in_wheel(folder: Path) -> bool:
    """Return whether a folder is that of the recipes within the installed package, where no run may write."""
    return folder == _PACKAGE / "shipped"


def list_recipes() -> dict[str, str]:
    """Return the names of the recipes, each with the first line of its README.

    Raises:
        ConfigError: The package has no recipes beside it.
    """
    found = {}
    for script in sorted((shipped_folder() / "recipes").glob("*/run.sh")):
        readme = script.with_name("README.md")
        first = readme.read_text(encoding="utf-8").splitlines()[0] if readme.is_file() else ""
        found[script.parent.name] = re.sub(r"^#+\s*", "", first)
    return found


def copy_recipe(name: str, target: Path) -> Path:
    """Copy a recipe into a folder, with `tool_configs` and all other recipes, from which it may take some of its parts.

    A file that exists already stays as it is: the user may have changed it.

    Args:
        name: Name of the recipe.
        target: The folder.

    Returns:
        Folder of the copied recipe.

    Raises:
        ConfigError: There is no such recipe, or the folder cannot be written to.
    """
    known = list_recipes()
    if name not in known:
        hint = did_you_mean(name, known)
        raise ConfigError(f"unknown recipe {name!r}; {hint and hint + ' '}known are {', '.join(known)}")
    source = shipped_folder()
    if target.resolve().is_relative_to(source / "recipes") or target.resolve().is_relative_to(source / "tool_configs"):
        raise ConfigError(f"{str(target)!r} lies within the recipes themselves; name a folder outside of them")
    try:
        for folder in ("recipes", "tool_configs"):
            shutil.copytree(
                source / folder, target / folder, ignore=_LEFT, copy_function=_copy_if_missing, dirs_exist_ok=True
            )
    except (OSError, shutil.Error) as error:
        raise ConfigError(f"cannot copy the recipes into {str(target)!r}: {error}") from None
    return target / "recipes" / name


def _copy_if_missing(source: str, target: str) -> str:
    if not Path(target).exists():
        shutil.copy2(source, f"{target}.part")
        Path(f"{target}.part").replace(target)  # a copy that is interrupted leaves no half of a file
    return target

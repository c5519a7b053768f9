"""The recipes of this package and of installed ones: `verl-multiturn recipe list`, `recipe copy` and `recipe new`.

Another package gives a recipe by an entry point (`calls/loading/entry_points.py`). Its folder lies below one named
`recipes`, with `recipes/common` beside it, as `recipe new` makes them.
"""

from __future__ import annotations

import keyword
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_multiturn.calls.loading.entry_points import (
    FOLDERS,
    folder_of,
    installed_entries,
    is_reference,
    is_same_reference,
)
from verl_multiturn.describe import did_you_mean, printable
from verl_multiturn.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent
_MOST_TITLE = 200
"""Most characters of a title that are read."""
_SHARED = "common"
_SKELETON = "recipes/common/skeleton"
_PLACEHOLDER = re.compile(r"\bNAME\b")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", "skeleton")
_READ = (".yaml", ".py", ".sh")
_COMMENT = re.compile(r"(?m)(^|\s)#.*$")
_RECIPE = re.compile(r"(?:\brecipes[/.]|\.\./|[\"'])([a-z]\w*)\b")
_TOOLS = re.compile(r"\btool_configs/([a-z]\w*)\.yaml")


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


def outputs_of(root: Path) -> Path:
    """Return the folder below which `run` puts runs by itself; `trust` takes runs there for the user's own.

    Args:
        root: Folder that contains `recipes/`.
    """
    return (Path.cwd() if is_in_wheel(root) else root) / "outputs"


def list_recipes() -> dict[str, str]:
    """Return the names of the recipes, each with the first line of its README.

    Raises:
        ConfigError: The package has no recipes beside it.
    """
    scripts = sorted((shipped_folder() / "recipes").glob("*/run.sh"))
    return {script.parent.name: _title(script.parent) for script in scripts}


def installed_recipes() -> dict[str, str]:
    """Return the references of the recipes of other packages, each with its README's first line and its package.

    One that cannot be used has its fault in the place of the README's line.
    """
    found = {}
    for entry in installed_entries().entries:
        if entry.group == FOLDERS:
            try:
                title = _title(folder_of(entry.name, "recipe list"))
            except ConfigError as error:
                title = str(error)
            found[entry.name] = f"{title} ({entry.source})"
    return found


def _title(folder: Path) -> str:
    """Return the first line of a recipe's README, "" without one. It may be a stranger's file."""
    readme = folder / "README.md"
    if not readme.is_file():
        return ""
    with readme.open(encoding="utf-8", errors="replace") as file:
        return printable(re.sub(r"^#+\s*", "", file.readline(_MOST_TITLE).rstrip("\n")))


def installed_folder(name: str) -> Path | None:
    """Return the folder of an installed package's recipe; None for any other name.

    Args:
        name: Name, reference or path of a recipe, as a user gives it.

    Raises:
        ConfigError: It is a reference that cannot be used, or a folder, too.
    """
    if not is_reference(name) or name.startswith("."):
        return None
    is_folder = (Path(name) / "config.yaml").is_file()
    known = [entry.name for entry in installed_entries().entries if entry.group == FOLDERS]
    if not any(is_same_reference(each, name) for each in known):
        return None  # the path of a folder, or unknown
    folder = folder_of(name, f"recipe {name!r}")
    if is_folder:
        raise ConfigError(f"recipe {name!r} is a folder, and {str(folder)!r}, too; write ./{name} for the folder")
    root = root_of(folder)
    for needed in (folder / "config.yaml", root / "recipes" / _SHARED):
        if not needed.exists():
            raise ConfigError(
                f"recipe {name!r}: {str(needed)!r} is not there; package everything that `recipe new` makes"
            )
    return folder


def root_of(folder: Path) -> Path:
    """Return the folder that contains `recipes/`. A recipe may be a folder inside another recipe.

    Args:
        folder: Folder of the recipe, as an absolute path.

    Raises:
        ConfigError: It does not lie below a folder `recipes`.
    """
    for parent in folder.parents:
        if parent.name == "recipes":
            return parent.parent
    raise ConfigError(
        f"{str(folder)!r} does not lie under a folder named 'recipes'; `verl-multiturn recipe copy` makes one"
    )


def copy_recipe(name: str, target: Path) -> Path:
    """Copy a recipe into a folder, with the other recipes and the tool YAML files that its own files name.

    A file that exists already stays as it is: the user may have changed it.

    Args:
        name: Name of the recipe, or the reference of an installed package's.
        target: The folder.

    Returns:
        Folder of the copied recipe.

    Raises:
        ConfigError: There is no such recipe, or the folder cannot be written to.
    """
    if is_reference(name):
        folder = folder_of(name, "recipe copy")
        place = folder.relative_to(root_of(folder)).as_posix()
        _copy(root_of(folder), required_paths(root_of(folder), place), target)
        return target / place
    known = list_recipes()
    if name not in known:
        hint = did_you_mean(name, known)
        raise ConfigError(f"unknown recipe {name!r}; {hint and hint + ' '}known are {', '.join(known)}")
    source = shipped_folder()
    _copy(source, required_paths(source, f"recipes/{name}"), target)
    return target / "recipes" / name


def make_recipe(name: str, target: Path) -> Path:
    """Make a recipe of the user's own from a skeleton: tool, rows, reward, configuration, test and README.

    The files of the shipped recipes that the skeleton needs are copied beside it. Nothing is replaced.

    Args:
        name: Name of the recipe, and of its Python package.
        target: The folder in which `recipes/NAME` is made.

    Returns:
        Folder of the recipe.

    Raises:
        ConfigError: The name is not a Python package's, or is a shipped recipe's; the recipe exists
            already; or the folder cannot be written to.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(f"{name!r}: expected a name for a Python package, such as 'my_task'; choose one")
    made = target / "recipes" / name
    if name in (*list_recipes(), _SHARED):
        raise ConfigError(f"{name!r} is a recipe that comes with this package; choose another name, or copy that one")
    if made.exists():
        raise ConfigError(f"{str(made)!r} exists already; choose another name, or remove it")
    source = shipped_folder()
    _copy(source, required_paths(source, _SKELETON), target, {_SKELETON: f"recipes/{name}"})
    for path in sorted(made.rglob("*")):
        if path.is_file():
            path.write_text(_PLACEHOLDER.sub(name, path.read_text(encoding="utf-8")), encoding="utf-8")
    return made


def required_paths(source: Path, start: str) -> list[str]:
    """Return a folder and everything under `recipes/` and `tool_configs/` that its files name, directly or not.

    A comment and a README name nothing that is needed.

    Example: `["recipes/common", "recipes/gsm8k_multiturn", "tool_configs/gsm8k.yaml"]`.

    Args:
        source: Folder that holds `recipes/` and `tool_configs/`.
        start: The folder, relative to `source`.
    """
    found: set[str] = set()
    waiting = [start]
    while waiting:
        place = waiting.pop()
        if place in found or not (source / place).exists():
            continue
        found.add(place)
        for path in [source / place, *(source / place).rglob("*")]:
            if path.suffix in _READ and (start == _SKELETON or _SKELETON not in path.as_posix()):
                waiting += _named(path.read_text(encoding="utf-8"))
    return sorted(found)


def _named(text: str) -> list[str]:
    """Return the recipes and the tool YAML files that a file names outside its comments."""
    code = _COMMENT.sub("", text)
    recipes = [f"recipes/{name}" for name in _RECIPE.findall(code) if name != "recipes"]
    return recipes + [f"tool_configs/{name}.yaml" for name in _TOOLS.findall(code)]


def _copy(source: Path, places: Sequence[str], target: Path, moves: Mapping[str, str] | None = None) -> None:
    """Copy files and folders of `source` to the same places below `target`, or to those that `moves` names."""
    if any(target.resolve().is_relative_to(source / folder) for folder in ("recipes", "tool_configs")):
        raise ConfigError(f"{str(target)!r} lies within the recipes themselves; name a folder outside of them")
    try:
        for place in places:
            to = target / (moves or {}).get(place, place)
            if (source / place).is_dir():
                shutil.copytree(source / place, to, ignore=_IGNORED, copy_function=_copy_if_missing, dirs_exist_ok=True)
            else:
                to.parent.mkdir(parents=True, exist_ok=True)
                _copy_if_missing(str(source / place), str(to))
    except (OSError, shutil.Error) as error:
        raise ConfigError(f"cannot copy the recipes into {str(target)!r}: {error}") from None


def _copy_if_missing(source: str, target: str) -> str:
    if not Path(target).exists():
        shutil.copy2(source, f"{target}.part")
        Path(f"{target}.part").replace(target)  # a copy that is interrupted leaves no half of a file
    return target

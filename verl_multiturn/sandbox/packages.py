"""Which installed packages a sandbox shows, and the programs that they install.

With names, a sandbox shows these distributions and their requirements, and nothing else that is installed. A
distribution's own list of files names its parts.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import sysconfig
from collections.abc import Iterable
from importlib.metadata import Distribution

from packaging.requirements import InvalidRequirement, Requirement

from verl_multiturn.errors import ConfigError

_Tree = dict[str, "_Tree"]
_SCRIPT = """#!{python}
import os, sys
from importlib import import_module
module, _, name = {programs!r}[os.path.basename(sys.argv[0])].partition(":")
found = import_module(module)
for part in name.split("."):
    found = getattr(found, part)
sys.exit(found())
"""


def package_folders() -> list[str]:
    """Return the site-packages folders of the running Python."""
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(os.path.realpath(paths[kind]) for kind in ("purelib", "platlib")))


@functools.cache
def files_of(names: tuple[str, ...]) -> dict[str, str]:
    """Return the files and folders of distributions and of their requirements.

    A folder is returned in the place of its files where no other has files in it.

    Args:
        names: Names of distributions, as pip knows them.

    Returns:
        For each file or folder its real path, by `FOLDER/NAME`: the number of its folder in `package_folders`, and its
        name seen from there.

    Raises:
        ConfigError: A distribution is not installed, or not by copies of its files.
    """
    folders = package_folders()
    trees: list[_Tree] = [{} for _ in folders]
    for distribution in _required(names):
        where = os.path.realpath(str(distribution.locate_file("")))
        if where not in folders:
            raise _unusable(distribution, f"it lies in {where!r}, and not in {folders}")
        if any(re.fullmatch(r"__editable__.*|.*\.egg-link", file.name) for file in distribution.files or ()):
            raise _unusable(distribution, "it is installed as an editable one")
        if distribution.files is None:
            raise _unusable(distribution, "it has no list of its files")
        for file in distribution.files:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                _plant(trees[folders.index(where)], file.parts)
    found: dict[str, str] = {}
    for number, (tree, folder) in enumerate(zip(trees, folders, strict=True)):
        _collect(tree, folder, str(number), found)
    return found


def script(packages: bool | tuple[str, ...], python: str) -> tuple[list[str], str]:
    """Return the names of the programs that packages install, and one script that is all of them by its name.

    Args:
        packages: The setting `packages` of the sandbox.
        python: Path of Python in the sandbox.
    """
    programs = {
        entry.name: entry.value.partition("[")[0].strip()
        for distribution in _shown(packages)
        for entry in distribution.entry_points
        if entry.group == "console_scripts" and re.fullmatch(r"[\w.-]+", entry.name) and ":" in entry.value
    }
    return sorted(programs), _SCRIPT.format(python=python, programs=programs)


@functools.cache
def modules_of(packages: bool | tuple[str, ...]) -> frozenset[str]:
    """Return the names that imports from packages begin with.

    Args:
        packages: The setting `packages` of the sandbox.

    Raises:
        ConfigError: A distribution is not installed.
    """
    files = (file for distribution in _shown(packages) for file in distribution.files or ())
    names = {file.parts[0].partition(".")[0] for file in files if file.suffix in (".py", ".so")}
    return frozenset(filter(str.isidentifier, names))


def _shown(packages: bool | tuple[str, ...]) -> Iterable[Distribution]:
    if isinstance(packages, tuple):
        return _required(packages)
    return importlib.metadata.distributions() if packages else ()


def _required(names: tuple[str, ...]) -> list[Distribution]:
    """Return distributions and their requirements here; a requirement that is not installed is omitted."""
    found: dict[str, Distribution] = {}
    for name in names:
        try:
            _add(importlib.metadata.distribution(name), found)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(
                f"packages: {name!r} is not installed; install it, or write a name that `pip list` shows"
            ) from None
    return list(found.values())


def _add(distribution: Distribution, found: dict[str, Distribution]) -> None:
    waiting = [distribution]
    while waiting:
        distribution = waiting.pop()
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        if name in found:
            continue
        found[name] = distribution
        for text in distribution.requires or ():
            try:
                requirement = Requirement(text)
            except InvalidRequirement:  # of an old package: pip installs nothing for it either
                continue
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                try:
                    waiting.append(importlib.metadata.distribution(requirement.name))
                except importlib.metadata.PackageNotFoundError:  # as after `pip install --no-deps`
                    continue


def _unusable(distribution: Distribution, reason: str) -> ConfigError:
    name = distribution.metadata["Name"]
    return ConfigError(f"packages: {name!r} cannot be shown alone: {reason}; install it anew, or set packages: true")


def _plant(tree: _Tree, parts: tuple[str, ...]) -> None:
    for part in parts:
        tree = tree.setdefault(part, {})


def _collect(tree: _Tree, folder: str, name: str, found: dict[str, str]) -> None:
    """Add the tree below a folder: a folder as one where it holds no other package's files, otherwise its contents."""
    for part, below in tree.items():
        path = os.path.join(folder, part)
        if not os.path.exists(path):
            continue
        may_be_shared = below and os.path.isdir(path) and not part.endswith(".dist-info")
        if may_be_shared and not _is_own(below, path):
            _collect(below, path, f"{name}/{part}", found)
        else:
            found[f"{name}/{part}"] = path


def _is_own(tree: _Tree, folder: str) -> bool:
    """Return whether a folder holds the files of a tree, and no other folder.

    Unlisted files are the package's own, written later, if the folder is a package of it. In a folder that
    several distributions share, they belong to somebody else.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == "__pycache__":
                continue
            if entry.name not in tree and (entry.is_dir() or "__init__.py" not in tree):
                return False
            if entry.is_dir() and not _is_own(tree[entry.name], entry.path):
                return False
    return True

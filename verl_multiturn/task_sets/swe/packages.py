"""Installed packages that ship their tests: the files of one, and which tests are near which module.

Invariants:
- a package is read from its installed distribution and from nowhere else; nothing of it is imported;
- only packages in plain Python are taken: a mutation of a compiled file cannot be made, nor repaired.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

from verl_multiturn.errors import ConfigError

_TEST_FOLDERS = {"test", "tests"}
_TEST_FILE = re.compile(r"(test_.*|.*_test|conftest)\.py")
_COMPILED = {".so", ".pyd", ".dll", ".dylib"}
_LEFT_OUT = {".pyc", ".pyo", ".pth"}
_METADATA = "METADATA"
"""The one file of the `.dist-info` folder that is kept, so that code which asks for its own version finds it."""
_MOST_NEAR = 30
"""Test files of a folder that are all near a module; of more, only those named after it are."""


@dataclass(frozen=True)
class Package:
    """An installed package with its tests."""

    name: str
    version: str
    files: Mapping[str, bytes]
    """Its files in UTF-8 by their paths below the folder that Python imports from."""

    @cached_property
    def sources(self) -> dict[str, bytes]:
        """The Python files that are not tests."""
        return {path: text for path, text in self.files.items() if path.endswith(".py") and not is_test(path)}

    @cached_property
    def tests(self) -> list[str]:
        """Paths of the files with tests, sorted."""
        return sorted(path for path in self.files if is_test(path) and _is_test_file(path))

    def beside(self, tests: Iterable[str]) -> dict[str, bytes]:
        """Return the files that some test files may need: all test files of their folders, and every `conftest.py`."""
        folders = {PurePosixPath(test).parent for test in tests}
        return {
            path: text
            for path, text in self.files.items()
            if is_test(path) and (PurePosixPath(path).name == "conftest.py" or not folders.isdisjoint(_parents(path)))
        }

    def near_tests(self, path: str) -> tuple[str, ...]:
        """Return the test files that are run for a mutation of a module.

        They are those in the nearest folder with tests: beside the module, or beside a folder around it. Where there
        are many, only those whose names have the module's name in them.

        Args:
            path: Path of the module.

        Returns:
            Paths, sorted; empty if there are none.
        """
        for folder in PurePosixPath(path).parents:
            names = {str(folder / each) for each in _TEST_FOLDERS}
            near = [test for test in self.tests if str(PurePosixPath(test).parent) in names]
            if len(near) > _MOST_NEAR:
                stem = PurePosixPath(path).stem.strip("_")
                near = [test for test in near if stem in PurePosixPath(test).stem]
            if near:
                return tuple(near)
        return ()


def read_package(name: str) -> Package:
    """Read an installed package.

    Args:
        name: Name of its distribution, such as `toolz`.

    Raises:
        ConfigError: It is not installed, it has compiled files, or it ships no tests.
    """
    try:
        found = distribution(name)
    except (PackageNotFoundError, ValueError):
        raise ConfigError(
            f"the package {name!r} is not installed, expected one that ships its tests; pip install {name}"
        ) from None
    package = Package(found.metadata["Name"], found.version, _files_of(found))
    if compiled := [str(path) for path in found.files or [] if path.suffix in _COMPILED]:
        raise ConfigError(
            f"the package {name!r} has compiled files ({compiled[0]!r}), expected one in plain Python; name another one"
        )
    if not package.tests or not package.sources:
        raise ConfigError(
            f"the package {name!r} {package.version} ships no tests, expected files such as tests/test_NAME.py in it; "
            "name another one"
        )
    return package


def is_test(path: str) -> bool:
    """Return whether a file of a package belongs to its tests, by its path."""
    parts = PurePosixPath(path).parts
    return not _TEST_FOLDERS.isdisjoint(parts[:-1]) or _TEST_FILE.fullmatch(parts[-1]) is not None


def _parents(path: str) -> tuple[PurePosixPath, ...]:
    return tuple(PurePosixPath(path).parents)


def _is_test_file(path: str) -> bool:
    name = PurePosixPath(path).name
    return name != "conftest.py" and _TEST_FILE.fullmatch(name) is not None


def _files_of(found: Distribution) -> dict[str, bytes]:
    files = {}
    for each in found.files or []:
        is_about = each.parts[0].endswith(".dist-info") and each.name != _METADATA
        if is_about or each.suffix in _LEFT_OUT or ".." in each.parts:
            continue
        path = Path(str(each.locate()))
        if path.is_file():
            text = path.read_bytes()
            with contextlib.suppress(UnicodeDecodeError):  # data of a test; tests that need it are not part of a task
                text.decode()
                files[each.as_posix()] = text
    return files

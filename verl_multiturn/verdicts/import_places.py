"""Report which changes of a tree would decide the imports of tests, so that they never count. The one rule, over names.

`changes.py` uses it for an agent's work in a workspace. Tasks whose repositories are in images get a copy of this file,
and run it for the agent's patch: `git apply --summary PATCH | python3 import_places.py NAMES`, started in the
repository before the patch is applied, prints an option `--exclude=PATH` for each change that does not count. NAMES is
JSON: `modules`, `runners` and `never` as in `ImportNames`. A patch does not show where the hidden tests are: there any
folder may have tests below it.

Invariants:
- an image may have an old Python, so this file needs 3.6, and the standard library alone;
- a change does not count by which a name of the tests, of their configuration, of a runner, or of a module that tests
  may import would be found in another place than before: a package in the place of a module, a module where imports
  begin, and an `__init__.py` made or deleted so that they begin elsewhere.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Set
from typing import NamedTuple

_CHANGED = re.compile(r" (create|delete) mode \d+ (.+)")
_LONGEST_NAME = 200
_OF_PATTERNS = re.compile(r"([*?\[\\])")


class ImportNames(NamedTuple):
    """Names in a tree, found once: a model may leave thousands of files.

    Attributes:
        may_change: Returns whether a path may be changed at all.
        never: For each reason, which paths never count: see `patterns`.
        runners: Modules of test runners, in whatever case.
        taken: Modules that are found elsewhere, and that tests may import.
        files: Paths of the files.
        folders: Paths of the folders, also of those that imports begin in and that are not there yet.
        modules: Paths that an import may mean: see `modules`.
        roots: Folders that imports begin in, also where they are packages; `.` for the tree itself.
        tests: Paths of the files whose tests count.
        above_tests: Folders that tests lie below; the tree itself is "".
        begun: Those of them in which imports begin before the change.
    """

    may_change: "Callable[[str], bool]"
    never: "Mapping[str, re.Pattern[str]]"
    runners: "Set[str]"
    taken: "Set[str]"
    files: "Set[str]"
    folders: "Set[str]"
    modules: "Set[str]"
    roots: "Set[str]"
    tests: "Set[str]"
    above_tests: "Set[str]"
    begun: "Set[str]"

    def is_taken(self, module: str) -> bool:
        """Return whether tests may import a module of this name that is found elsewhere."""
        return module.lower() in self.runners or module in self.taken

    def why_by_name(self, path: str) -> str:
        """Return why a change of a path of this name never counts; empty if it may count."""
        return next((reason for reason, pattern in self.never.items() if pattern.search(path.lower())), "")


def patterns(never: "Mapping[str, Collection[str]]") -> "dict[str, re.Pattern[str]]":
    """Return globs of names, wherever they are in a path in lower case, as one pattern for each reason.

    Args:
        never: The globs, by their reason.
    """
    return {
        reason: re.compile("(?:^|/)(?:" + "|".join(map(re.escape, globs)).replace(r"\*", "[^/]*") + r")(?:/|\Z)")
        for reason, globs in never.items()
    }


def why_never(path: str, names: ImportNames) -> str:
    """Return why a change of a path never counts, by itself; empty if it may count.

    Args:
        path: The path.
        names: Those in the tree.
    """
    reason = names.why_by_name(path) or ("a test" if path in names.tests else "")
    if not reason and path not in names.files:
        reason = _why_replacing(path, names) or _why_shadowing(path, names)
    if not reason and any(len(part.encode("utf-8", "replace")) > _LONGEST_NAME for part in path.split("/")):
        return "its name is too long"
    return reason


def exposing(counted: "Mapping[str, bytes | None]", names: ImportNames) -> "list[tuple[str, str]]":
    """Return the changes of an `__init__.py` by which pytest would begin imports beside modules of others' names.

    pytest begins them in the innermost folder above a test that has no `__init__.py`. So a folder becomes one of these
    if its `__init__.py` is deleted, or if one is made in the folders below it that lead to a test.

    Args:
        counted: New content of each file that was changed or made; None for one that was deleted.
        names: Those in the tree.

    Returns:
        The path of each such file, and the reason.
    """
    there = {path for path in names.files | counted.keys() if counted.get(path, b"") is not None}
    shadows = {}  # type: dict[str, str]  # by folder, one of its modules that could be the agent's and is found elsewhere
    for path in sorted(path for path in there if path.endswith(".py")):
        module = module_of(path)
        if names.is_taken(os.path.basename(module)) and path not in names.tests and not names.why_by_name(path):
            shadows.setdefault(os.path.dirname(module), module)
    changed = [path for path in counted if ("/" + path).endswith("/__init__.py")]
    changed = [path for path in changed if os.path.dirname(path) in names.above_tests]
    found = []  # type: list[tuple[str, str]]

    def is_refused(path: str, root: str) -> bool:
        if root in names.begun or root not in shadows:
            return False
        found.append((path, f"{shadows[root]!r} would shadow the module {os.path.basename(shadows[root])!r}"))
        return True

    # From within: a package that stays one is a module of the folder above.
    for path in sorted((path for path in changed if counted[path] is None), key=_depth, reverse=True):
        package = os.path.dirname(path)
        if is_refused(path, package):
            there.add(path)
            if names.is_taken(os.path.basename(package)):
                shadows.setdefault(os.path.dirname(package), package)
    # From without: where imports begin depends on the folders above.
    for path in sorted((path for path in changed if path in there and path not in names.files), key=_depth):
        if is_refused(path, first_root(os.path.dirname(path), there)):
            there.discard(path)
    return found


def modules(files: "Collection[str]") -> "set[str]":
    """Return the paths that an import may mean: of each file `.py` without ending, of an `__init__.py` its folder's.

    A folder without an `__init__.py` takes the place of no module that is found elsewhere.

    Args:
        files: Paths of the files.
    """
    return {module_of(path) for path in files if path.endswith(".py")}


def module_of(path: str) -> str:
    """Return a path's name in imports: without `.py` and without `/__init__`.

    Args:
        path: The path.
    """
    for ending in (".py", "/__init__"):
        path = path[: -len(ending)] if path.endswith(ending) else path
    return path


def first_root(folder: str, files: "Set[str]") -> str:
    """Return the folder in which pytest begins imports for a test in a folder; "" is the tree, `..` is outside.

    Args:
        folder: The folder.
        files: Paths of the files.
    """
    while os.path.join(folder, "__init__.py") in files:
        if not folder:
            return ".."
        folder = os.path.dirname(folder)
    return folder


def above(paths: "Collection[str]") -> "set[str]":
    """Return all folders above paths.

    Args:
        paths: The paths.
    """
    return {path[:end] for path in paths for end, sign in enumerate(path) if sign == "/"}


def _why_replacing(path: str, names: ImportNames) -> str:
    """Return why a new file may not be found before another one that lies beside it; empty if it may.

    Python looks for a package first, then for a module, then for a folder without `__init__.py`. So a new package
    counts as a module of its name would, whether that is there or not: names of tests are drawn. Packages of such names
    that the tree has, for example `load_test`, may be changed.
    """
    module = module_of(path)
    if path.endswith("/__init__.py"):
        beside = module + ".py"
        reason = names.why_by_name(beside) or ("a test" if beside in names.tests else "")
        if not reason and beside in names.files and not names.may_change(beside):
            return f"it would take the place of {beside!r}, which the task does not allow"
        return reason
    if path.endswith(".py") and module in names.above_tests:
        return f"it would take the place of the tests' folder {module!r}"
    return ""


def _why_shadowing(path: str, names: ImportNames) -> str:
    """Return why a new file would take the place of another module in imports; empty if it would not."""
    folders = path.split("/")
    for depth, part in enumerate(folders):  # from the outermost folder to the file itself
        place = "/".join(folders[:depth])
        beside = place + "/" if place else ""
        is_new_folder = depth < len(folders) - 1 and beside + part not in names.folders
        becomes_package = folders[depth + 1 :] == ["__init__.py"]
        module = part[: -len(".py")] if part.endswith(".py") else part
        if is_new_folder or becomes_package or module != part:
            is_root = (place or ".") in names.roots or beside + "__init__.py" not in names.files
            if is_root and names.is_taken(module) and beside + module not in names.modules:
                return f"it would shadow the module {module!r}"
        if is_new_folder:
            return ""  # nothing imports from below it but by its own name
    return ""


def _depth(path: str) -> int:
    return path.count("/")


def _in_folder() -> "tuple[set[str], set[str]]":
    """Return the files and the folders of the current folder, without git's own."""
    files, folders = set(), set()  # type: set[str], set[str]
    for place, inner, names in os.walk("."):
        inner[:] = [name for name in inner if name != ".git"]
        files.update(os.path.normpath(os.path.join(place, name)) for name in names)
        for folder in (os.path.normpath(os.path.join(place, name)) for name in inner):
            folders.add(folder)
            if os.path.islink(folder) and os.path.isfile(os.path.join(folder, "__init__.py")):  # is not walked into
                files.add(os.path.join(folder, "__init__.py"))
    return files, folders


def main(given: str) -> None:
    """Print the options for the changes of a patch, which the standard input names.

    Args:
        given: Path of NAMES.
    """
    with open(given, encoding="utf-8") as file:
        read = json.load(file)
    files, folders = _in_folder()
    names = ImportNames(
        may_change=lambda path: True,
        never=patterns(read["never"]),
        runners=set(read["runners"]),
        taken=set(read["modules"]),
        files=files,
        folders=folders,
        modules=modules(files),
        roots={"."},
        tests=set(),
        above_tests=folders | {""},
        begun={""},
    )
    counted, excluded = {}, set()
    for found in filter(None, map(_CHANGED.fullmatch, sys.stdin.read().split("\n"))):
        path = found.group(2)
        if why_never(path, names):
            excluded.add(path)
        else:
            counted[path] = b"" if found.group(1) == "create" else None
    excluded.update(path for path, _ in exposing(counted, names))
    for path in sorted(excluded):
        print("--exclude=" + _OF_PATTERNS.sub(r"\\\1", path))


if __name__ == "__main__":
    main(sys.argv[1])

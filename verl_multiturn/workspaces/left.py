"""What an agent has left, as data: which of its changes count.

    the agent's workspace → its processes end → a tar, read on the host → changes to the row's tree

Invariants:
- a change counts only if the row allows its path, and never one that could decide what a test sees before it runs:
  tests, configuration of test runners, start-up files, compiled files, git's files, links;
- nor one by which a name of the tests, of their configuration, of a runner, or of what tests may import would be found
  in another place than before: a package in the place of a module, a module where imports begin, and an `__init__.py`
  made or deleted so that they begin elsewhere;
- whatever a model leaves there are changes, or words that say why there are none. Only a failure of ours raises.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from verl_multiturn.errors import UnjudgedError
from verl_multiturn.sandbox.launch import SandboxError
from verl_multiturn.sandbox.packages import modules_of
from verl_multiturn.workspaces.globs import Globs
from verl_multiturn.workspaces.tars import TarFiles, read_tar, write_tar
from verl_multiturn.workspaces.task import PytestVerdict, ScriptVerdict, Task
from verl_multiturn.workspaces.workspace import Workspace, WorkspaceError

NEVER = {
    "a test": ("test_*.py", "*_test.py", "tests.py", "test", "tests", "testing"),
    "configuration of tests": (
        *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
        *("pyproject.toml", "noxfile.py", "unittest.cfg", ".coveragerc", "manage.py"),
    ),
    "a start-up file": (
        *("sitecustomize.py", "usercustomize.py", "*.pth", "*.egg-link", "pyvenv.cfg", "*._pth", "sitecustomize"),
        *("usercustomize", "__editable__*", ".bashrc", ".bash_profile", ".profile", ".bash_login", ".inputrc"),
    ),
    "a compiled file": ("*.pyc", "*.pyo", "*.so", "*.so.*", "*.pyd", "*.dll", "*.dylib", "*.o", "*.a", "__pycache__"),
    "a file of git": (".git*",),
    "an installed package's": ("*.dist-info", "*.egg-info", "*.egg", "site-packages", "dist-packages"),
}
"""Names that are never taken, wherever they stand in a path, in whatever case."""
_NEVER_PATTERNS = {
    reason: re.compile("(?:^|/)(?:" + "|".join(map(re.escape, names)).replace(r"\*", "[^/]*") + r")(?:/|\Z)")
    for reason, names in NEVER.items()
}
RUNNERS = frozenset(
    {"pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "hypothesis", "nose", "coverage"}
)
"""Modules of test runners: a new file of such a name is not taken."""
_OF_TESTS = ("a test", "configuration of tests")
_MOST_ENTRIES = 20_000
_MOST_TAR_BYTES = 64 * 2**20
_FOLDER_BYTES = 512
"""Bytes of a folder in a tar."""
_LONGEST_NAME = 200


@dataclass(frozen=True)
class Names:
    """Names in a row's tree with its hidden tests, found once: a model may leave thousands of files.

    Attributes:
        files: Paths of the files.
        folders: Paths of the folders, also of those that imports begin in and that are not there yet.
        modules: What an import may mean: the path of each file `.py` without its ending, and that of each folder with
            an `__init__.py`. Another folder takes the place of no module that is found elsewhere.
        roots: Folders that imports begin in, also where they are packages; `.` for the tree itself.
        taken: Modules that are found elsewhere, and that tests may import.
        tests: Paths of the hidden files, and of the files whose tests are judged.
        above_tests: Folders that tests lie below; the tree itself is "". A script may run those of the tree.
        begun: Those of them in which imports begin before the agent's work: roots, and what pytest adds for the tests.
    """

    files: Collection[str]
    folders: frozenset[str]
    modules: frozenset[str]
    roots: frozenset[str]
    taken: frozenset[str]
    tests: frozenset[str]
    above_tests: frozenset[str]
    begun: frozenset[str]

    @classmethod
    def of(cls, task: Task, tree: Mapping[str, bytes], packages: bool | tuple[str, ...]) -> Names:
        """Return the names in a tree.

        Args:
            task: The task.
            tree: Its tree.
            packages: Installed packages that its tests may import.

        Raises:
            ConfigError: A package is not installed.
        """
        verdict = task.verdict
        roots = {os.path.normpath(root) for root in ((".",) if isinstance(verdict, ScriptVerdict) else verdict.roots)}
        hidden: Mapping[str, str] = {}
        plugins: tuple[str, ...] = ()
        named, own = set[str](), set[str]()
        if isinstance(verdict, PytestVerdict):
            hidden, plugins = verdict.files, verdict.plugins
            named = {name.partition("::")[0] for name in (*verdict.tests, *verdict.kept)}
        elif isinstance(verdict, ScriptVerdict):
            own = {path for path in tree if _why_by_name(path) in _OF_TESTS}
        files = tree.keys() | hidden.keys()  # pytest begins imports in the folders of hidden tests
        tests = {path for path in {*hidden, *named, *own} if path.endswith(".py")}
        return cls(
            files=files,
            folders=frozenset(_above(files | {f"{root}/" for root in roots})),
            modules=frozenset(_modules(files)),
            roots=frozenset({".", *roots}),
            taken=modules_of(packages) | {name.partition(".")[0] for name in plugins} | sys.stdlib_module_names,
            tests=frozenset({*hidden, *named}),
            above_tests=frozenset({"", *_above(tests)} if tests else ()),
            begun=frozenset({"" if root == "." else root for root in roots})
            | {_first_root(os.path.dirname(path), files) for path in named},
        )

    def is_taken(self, module: str) -> bool:
        """Tell whether tests may import a module of this name that is found elsewhere."""
        return module.lower() in RUNNERS or module in self.taken


@dataclass(frozen=True)
class Left:
    """What of an agent's work counts.

    Attributes:
        changes: New content of each file that it changed or made; None for one that it deleted.
        executable: Which of them may be executed.
        left_out: Changes that do not count, with the reason.
        problem: Why nothing counts, in words; None otherwise.
    """

    changes: Mapping[str, bytes | None] = field(default_factory=dict)
    executable: frozenset[str] = frozenset()
    left_out: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None


async def collect(task: Task, workspace: Workspace, packages: bool | tuple[str, ...]) -> Left:
    """End what still runs in an agent's workspace, and return what it left.

    Args:
        task: The task; its tree was put into the workspace's folder.
        workspace: The workspace.
        packages: Installed packages that the tests may import.

    Raises:
        UnjudgedError: The workspace was lost for a cause of ours.
        ConfigError: The row's tree cannot be read, or a package is not installed.
    """
    try:
        await workspace.end_processes()
        tar = await workspace.get(*_places(task), max_bytes=_MOST_TAR_BYTES)
    except WorkspaceError as error:  # the model ended it, or left too much
        return Left(problem=str(error))
    except SandboxError as error:
        raise UnjudgedError(f"task {task.name!r}: what was left cannot be read: {error}") from error
    # In a thread: a model decides how much there is to read, and others wait for the event loop.
    return await asyncio.to_thread(
        lambda: changes(task, read_tar(tar, max_entries=_MOST_ENTRIES, max_bytes=_MOST_TAR_BYTES), packages)
    )


def why_uncollected(task: Task, tree: Mapping[str, bytes]) -> str:
    """Return why `collect` could not take a tree if an agent left it; empty if it could.

    Args:
        task: The task.
        tree: The tree.
    """
    places = _places(task)
    files = {
        path: content
        for path, content in tree.items()
        if any(place in (".", path) or path.startswith(f"{place}/") for place in places)
    }
    folders = _above(files)
    entries, size = len(files) + len(folders), len(write_tar(files)) + _FOLDER_BYTES * len(folders)
    if entries <= _MOST_ENTRIES and size <= _MOST_TAR_BYTES:
        return ""
    return (
        f"what lies where 'allowed' {list(task.allowed)} may match has {entries} files and folders and is a tar of "
        f"{size} bytes; at most {_MOST_ENTRIES} and {_MOST_TAR_BYTES} can be read"
    )


def changes(task: Task, found: TarFiles, packages: bool | tuple[str, ...]) -> Left:
    """Return the changes that count.

    Args:
        task: The task.
        found: All files at the places that may be changed, as they are now.
        packages: Installed packages that the tests may import.
    """
    if found.problem is not None:
        return Left(problem=f"the files that were left cannot be taken: {found.problem}")
    original, was_executable = task.tree()
    names = Names.of(task, original, packages)
    allowed = Globs(task.allowed)
    left_out = dict(found.left_out)
    counted: dict[str, bytes | None] = {}
    for path, content in found.files.items():
        if original.get(path) == content and (path in was_executable) == (path in found.executable):
            continue
        reason = "" if allowed.match(path) else "the task does not allow it"
        if reason := reason or why_never(task, path, names):
            left_out[path] = reason
        else:
            counted[path] = content
    for path in original.keys() - found.files.keys():
        # A file in whose place there is a link, or something else that is not taken, is gone as well.
        if allowed.match(path) and not why_never(task, path, names):
            counted[path] = None
    size = sum(len(content) for content in counted.values() if content is not None)
    if len(counted) > task.most_files or size > task.most_bytes:
        return Left(
            left_out=left_out,
            problem=f"{len(counted)} changed files of {size} bytes were left; at most {task.most_files} of "
            f"{task.most_bytes} bytes together are judged",
        )
    for path, reason in exposing(counted, names):
        left_out[path] = reason
        del counted[path]
    there = {path for path in original if counted.get(path, b"") is not None}
    folders = _above(there)
    for path in sorted(path for path, content in counted.items() if content is not None):
        # Changes cannot meet each other so: they were in one tree.
        if path in folders or not there.isdisjoint(_above([path])):
            left_out[path] = "there is a folder in the place of a file, or a file in that of a folder"
            del counted[path]
    return Left(counted, frozenset(found.executable & counted.keys()), left_out)


def why_never(task: Task, path: str, names: Names) -> str:
    """Return why a change of a path never counts, whatever the row allows; empty if it may count.

    Args:
        task: The task.
        path: The path.
        names: Those in the row's tree.
    """
    reason = _why_by_name(path) or ("a test" if path in names.tests else "")
    if not reason and path not in names.files:
        reason = _why_replacing(task, path, names)
    if reason:
        return reason
    if any(len(part.encode()) > _LONGEST_NAME for part in path.lower().split("/")):
        return "its name is too long"
    return _shadowed(path, names)


def exposing(counted: Mapping[str, bytes | None], names: Names) -> list[tuple[str, str]]:
    """Return the changes of an `__init__.py` by which pytest would begin imports beside modules of others' names.

    pytest begins them in the innermost folder above a test that has no `__init__.py`. So a folder becomes one of these
    if its `__init__.py` is deleted, or if one is made in the folders below it that lead to a test.

    Args:
        counted: New content of each file that was changed or made; None for one that was deleted.
        names: Those in the row's tree.

    Returns:
        The path of each such file, and the reason.
    """
    there = {path for path in names.files | counted.keys() if counted.get(path, b"") is not None}
    shadows: dict[str, str] = {}  # by folder, one of its modules that could be the agent's and is found elsewhere
    for path in sorted(path for path in there if path.endswith(".py")):
        module = _module(path)
        if names.is_taken(os.path.basename(module)) and path not in names.tests and not _why_by_name(path):
            shadows.setdefault(os.path.dirname(module), module)
    changed = [path for path in counted if f"/{path}".endswith("/__init__.py")]
    changed = [path for path in changed if os.path.dirname(path) in names.above_tests]
    found: list[tuple[str, str]] = []

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
        if is_refused(path, _first_root(os.path.dirname(path), there)):
            there.discard(path)
    return found


def _why_by_name(path: str) -> str:
    """Return why a change of a path of this name never counts; empty if it may count."""
    return next((reason for reason, pattern in _NEVER_PATTERNS.items() if pattern.search(path.lower())), "")


def _why_replacing(task: Task, path: str, names: Names) -> str:
    """Return why a new file may not be found before another one that lies beside it; empty if it may.

    Python looks for a package first, then for a module, then for a folder without `__init__.py`. So a new package
    counts as a module of its name would, whether that is there or not: names of tests are drawn. Packages of such names
    that the row has, for example `load_test`, may be changed.
    """
    if path.endswith("/__init__.py"):
        module = f"{_module(path)}.py"
        if reason := _why_by_name(module) or ("a test" if module in names.tests else ""):
            return reason
        if module in names.files and not Globs(task.allowed).match(module):
            return f"it would take the place of {module!r}, which the task does not allow"
    elif path.endswith(".py") and _module(path) in names.above_tests:
        return f"it would take the place of the tests' folder {_module(path)!r}"
    return ""


def _shadowed(path: str, names: Names) -> str:
    """Return why a new file would take the place of another module in imports; empty if it would not."""
    if path in names.files:
        return ""
    folders = path.split("/")
    for depth, part in enumerate(folders):  # from the outermost folder to the file itself
        place = "/".join(folders[:depth])
        above = f"{place}/" if place else ""
        is_new_folder = depth < len(folders) - 1 and f"{above}{part}" not in names.folders
        becomes_package = folders[depth + 1 :] == ["__init__.py"]
        module = part.removesuffix(".py")
        if is_new_folder or becomes_package or module != part:
            is_root = (place or ".") in names.roots or f"{above}__init__.py" not in names.files
            if is_root and names.is_taken(module) and f"{above}{module}" not in names.modules:
                return f"it would shadow the module {module!r}"
        if is_new_folder:
            return ""  # nothing imports from below it but by its own name
    return ""


def _modules(paths: Collection[str]) -> set[str]:
    """Return what an import may mean: see `Names.modules`."""
    return {_module(path) for path in paths if path.endswith(".py")}


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__")


def _first_root(folder: str, files: Collection[str]) -> str:
    """Return the folder in which pytest begins imports for a test in a folder; "" is the tree, `..` is outside."""
    while os.path.join(folder, "__init__.py") in files:
        if not folder:
            return ".."
        folder = os.path.dirname(folder)
    return folder


def _above(paths: Collection[str]) -> set[str]:
    """Return all folders above paths."""
    return {path[:end] for path in paths for end, sign in enumerate(path) if sign == "/"}


def _depth(path: str) -> int:
    return path.count("/")


def _places(task: Task) -> list[str]:
    """Return the folders and files below which everything lies that may be changed."""
    places = set()
    for glob in task.allowed:
        parts = glob.split("/")
        fixed = next((index for index, part in enumerate(parts) if any(sign in part for sign in "*?")), len(parts))
        places.add("/".join(parts[:fixed]) or ".")
    return ["."] if "." in places else sorted(places)

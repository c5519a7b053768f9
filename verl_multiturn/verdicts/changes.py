"""An agent's work as data: which of its changes count.

    the agent's workspace → its processes end → a tar, read on the host → changes to the row's tree

Invariants:
- a change counts only if the row allows its path, and never one that could decide what a test sees before it runs:
  tests, configuration of test runners, start-up files, compiled files, git's files, links;
- nor one by which tests would import something in another place than before: `import_places.py` has the rule;
- any work of a model there becomes changes, or a reason why there are none. Only a failure of ours raises.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from verl_multiturn.errors import UnjudgedError
from verl_multiturn.sandbox.launch import SandboxError
from verl_multiturn.sandbox.packages import modules_of
from verl_multiturn.verdicts.globs import Globs
from verl_multiturn.verdicts.import_places import ImportNames, above, exposing, first_root, modules, patterns, why_never
from verl_multiturn.verdicts.task import PytestVerdict, ScriptVerdict, Task
from verl_multiturn.workspaces.tars import TarFiles, read_tar, write_tar
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
"""Names that are never taken, wherever they are in a path, in whatever case."""
RUNNERS = frozenset(
    {"pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "hypothesis", "nose", "coverage"}
)
"""Modules of test runners: a new file of such a name is not taken."""
_NEVER_PATTERNS = patterns(NEVER)
_OF_TESTS = ("a test", "configuration of tests")
_MOST_ENTRIES = 20_000
_MOST_TAR_BYTES = 64 * 2**20
_FOLDER_BYTES = 512
"""Bytes of a folder in a tar."""


@dataclass(frozen=True)
class WorkChanges:
    """The part of an agent's work that counts.

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


async def collect(task: Task, workspace: Workspace, packages: bool | tuple[str, ...]) -> WorkChanges:
    """End the processes in an agent's workspace, and return its work.

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
    except WorkspaceError as error:  # the model ended it, or wrote too much
        return WorkChanges(problem=str(error))
    except SandboxError as error:
        raise UnjudgedError(f"task {task.name!r}: what was left cannot be read: {error}") from error
    # In a thread: a model decides how much there is to read, and others wait for the event loop.
    return await asyncio.to_thread(
        lambda: changes(task, read_tar(tar, max_entries=_MOST_ENTRIES, max_bytes=_MOST_TAR_BYTES), packages)
    )


def why_uncollected(task: Task, tree: Mapping[str, bytes]) -> str:
    """Return why `collect` could not take a tree as an agent's work; empty if it could.

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
    folders = above(files)
    entries, size = len(files) + len(folders), len(write_tar(files)) + _FOLDER_BYTES * len(folders)
    if entries <= _MOST_ENTRIES and size <= _MOST_TAR_BYTES:
        return ""
    return (
        f"what lies where 'allowed' {list(task.allowed)} may match has {entries} files and folders and is a tar of "
        f"{size} bytes; at most {_MOST_ENTRIES} and {_MOST_TAR_BYTES} can be read"
    )


def changes(task: Task, found: TarFiles, packages: bool | tuple[str, ...]) -> WorkChanges:
    """Return the changes that count.

    Args:
        task: The task.
        found: All files at the places that may be changed, as they are now.
        packages: Installed packages that the tests may import.
    """
    if found.problem is not None:
        return WorkChanges(problem=f"the files that were left cannot be taken: {found.problem}")
    original, was_executable = task.tree()
    names = names_of(task, original, packages)
    allowed = Globs(task.allowed)
    left_out = dict(found.left_out)
    counted: dict[str, bytes | None] = {}
    for path, content in found.files.items():
        if original.get(path) == content and (path in was_executable) == (path in found.executable):
            continue
        reason = "" if allowed.match(path) else "the task does not allow it"
        if reason := reason or why_never(path, names):
            left_out[path] = reason
        else:
            counted[path] = content
    for path in original.keys() - found.files.keys():
        # A file in whose place there is a link, or something else that is not taken, is gone as well.
        if allowed.match(path) and not why_never(path, names):
            counted[path] = None
    size = sum(len(content) for content in counted.values() if content is not None)
    if len(counted) > task.most_files or size > task.most_bytes:
        return WorkChanges(
            left_out=left_out,
            problem=f"{len(counted)} changed files of {size} bytes were left; at most {task.most_files} of "
            f"{task.most_bytes} bytes together are judged",
        )
    for path, reason in exposing(counted, names):
        left_out[path] = reason
        del counted[path]
    there = {path for path in original if counted.get(path, b"") is not None}
    folders = above(there)
    for path in sorted(path for path, content in counted.items() if content is not None):
        # Changes cannot meet each other so: they were in one tree.
        if path in folders or not there.isdisjoint(above([path])):
            left_out[path] = "there is a folder in the place of a file, or a file in that of a folder"
            del counted[path]
    return WorkChanges(counted, frozenset(found.executable & counted.keys()), left_out)


def names_of(task: Task, tree: Mapping[str, bytes], packages: bool | tuple[str, ...]) -> ImportNames:
    """Return the names in a row's tree with its hidden tests.

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
    elif isinstance(verdict, ScriptVerdict):  # a script may run the tests of the tree
        own = {path for path in tree if any(_NEVER_PATTERNS[reason].search(path.lower()) for reason in _OF_TESTS)}
    files = tree.keys() | hidden.keys()  # pytest begins imports in the folders of hidden tests
    tests = {path for path in {*hidden, *named, *own} if path.endswith(".py")}
    return ImportNames(
        may_change=Globs(task.allowed).match,
        never=_NEVER_PATTERNS,
        runners=RUNNERS,
        taken=modules_of(packages) | {name.partition(".")[0] for name in plugins} | sys.stdlib_module_names,
        files=files,
        folders=above(files | {f"{root}/" for root in roots}),
        modules=modules(files),
        roots={".", *roots},
        tests={*hidden, *named},
        above_tests={"", *above(tests)} if tests else set(),
        begun={"" if root == "." else root for root in roots}
        | {first_root(os.path.dirname(path), files) for path in named},
    )


def _places(task: Task) -> list[str]:
    """Return the folders and files below which everything lies that may be changed."""
    places = set()
    for glob in task.allowed:
        parts = glob.split("/")
        fixed = next((index for index, part in enumerate(parts) if any(sign in part for sign in "*?")), len(parts))
        places.add("/".join(parts[:fixed]) or ".")
    return ["."] if "." in places else sorted(places)

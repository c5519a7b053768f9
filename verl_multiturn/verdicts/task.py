"""`Task`: a repository to work on, its files that may be changed, and how the result is scored; one row of a data set.

Invariants:
- nothing of a task but its `files` and `folder` is ever put where the model's commands run;
- a task names the few paths that may be changed. Everything else of the fresh tree is the row's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator

from verl_multiturn.config import read_model
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.verdicts.calls import free_names
from verl_multiturn.verdicts.globs import Globs
from verl_multiturn.workspaces.tars import write_tar
from verl_multiturn.workspaces.workspace import not_variables

_PLACE = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
_SKIPPED = (".git", "__pycache__")
"""Folders of a task's `folder` that are not part of its tree."""
_MOST_TREE_BYTES = 64 * 2**20


def _checked_path(path: str) -> str:
    try:
        write_tar({path: b""})
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if os.path.normpath(path) != path:
        raise ValueError(f"the path {path!r} is not in its shortest form; write {os.path.normpath(path)!r}")
    return path


FilePath = Annotated[str, BeforeValidator(lambda path: _checked_path(str(path)))]


class UnguardedError(ConfigError):
    """A row whose tests pay code that knows nothing, and which does not set `unguarded: true`."""


class _TaskPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CallsVerdict(_TaskPart):
    """Functions are called from outside, and their values are compared outside (`calls.py`). No attack is paid."""

    kind: Literal["calls"]

    functions: dict[str, Annotated[str, Field(pattern=_PLACE)]] = Field(min_length=1)
    """Where each function is, by the name that the tests use: `{"add": "calc.ops:add"}`."""

    tests: tuple[str, ...] = Field(min_length=1)
    """Code of each test: `assert add(1, 2) == 3`. It imports nothing of the repository; all of them must pass."""

    roots: tuple[str, ...] = (".",)
    """Folders that imports begin in."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for test in self.tests:
            try:
                names = free_names(test)
            except (SyntaxError, ValueError) as error:
                raise ValueError(f"the test {test[:200]!r} is no Python: {error}") from None
            if not set(names) & set(self.functions):
                raise ValueError(f"the test {test[:200]!r} calls none of {sorted(self.functions)}")
        return self


class PytestVerdict(_TaskPart):
    """Hidden tests are run by pytest, beside tests of which we know that they must fail (`canaries.py`)."""

    kind: Literal["pytest"]

    files: dict[FilePath, str] = Field(min_length=1)
    """Hidden files, by their path in the tree: the tests, and what they need. They replace files there."""

    tests: tuple[str, ...] = Field(min_length=1)
    """Names of the tests that must pass, and that fail before the repair: `tests/test_ops.py::test_add`."""

    kept: tuple[str, ...] = ()
    """Names of tests that pass before the repair, and must still pass after it."""

    twins: tuple[str, ...] = ()
    """Those of `tests` and `kept` whose copy with changed values must fail; `check_task` finds them."""

    canaries: int = Field(8, ge=2, le=200)
    """Number of tests of our own beside these, half of which must fail."""

    unguarded: StrictBool = False
    """Whether the row is taken although none of `tests` has a twin. Then code is paid that equals everything."""

    plugins: tuple[str, ...] = ()
    """Plugins of pytest that the tests need, by module; no other one is loaded."""

    roots: tuple[str, ...] = (".",)
    """Folders that imports begin in."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in (*self.tests, *self.kept):
            path, colons, _ = name.partition("::")
            if not colons or not path.endswith(".py"):
                raise ValueError(f"{name!r} is no name of a test; write it as 'path/test_x.py::test_name'")
        if strange := set(self.twins) - set(self.tests) - set(self.kept):
            raise ValueError(f"twins: {sorted(strange)[0]!r} is no test of 'tests' or 'kept'")
        if both := set(self.tests) & set(self.kept):
            raise ValueError(f"{sorted(both)[0]!r} is in 'tests' and in 'kept'; before the repair it fails or passes")
        return self


class ScriptVerdict(_TaskPart):
    """A script writes the reward, as in Harbor: `/tests/test.sh` writes `/logs/verifier/reward.txt` or `….json`."""

    kind: Literal["script"]

    files: dict[FilePath, str]
    """Files of the folder `/tests`; `test.sh` is one of them."""

    twins: bool = False
    """Whether the script pays the repair less where its Python tests have changed values; `check_task` finds it."""

    reads_only: bool = False
    """Whether the script starts nothing that may be changed; `check_task` finds it (`script_canary.py`)."""

    unguarded: StrictBool = False
    """Whether the row is taken with neither `twins` nor `reads_only`. Then the script's children write the reward."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "test.sh" not in self.files:
            raise ValueError(f"files: there is no 'test.sh' among {sorted(self.files)[:20]}; it writes the reward")
        return self


class Task(_TaskPart):
    """A repository, a gold repair, and a verdict."""

    name: str = Field(min_length=1)
    """The task's name, for errors."""

    files: dict[FilePath, str] = {}
    """The tree, as texts by path; they lie over those of `folder`."""

    folder: str | None = None
    """A folder of the host whose regular files are the tree; not its `.git`, and no compiled file."""

    places: dict[str, str] | None = None
    """Where files and folders of `folder` lie in the tree, as by `COPY` of a Dockerfile: `{"words.txt": "a.txt", "src":
    "."}`. Null: all of `folder` lies as it is."""

    variables: dict[str, str] = {}
    """Environment variables of the model's commands, and of the tests of a `script`."""

    allowed: tuple[str, ...] = Field(min_length=1)
    """Globs of the paths that may be changed, made or deleted, such as `calc/**/*.py`. See `changes.py` for those that
    are never taken."""

    gold: dict[FilePath, str | None] = {}
    """A repair: the text of each file that it changes, null for one that it deletes. Only `check_task` needs it."""

    verdict: Annotated[CallsVerdict | PytestVerdict | ScriptVerdict, Field(discriminator="kind")]

    timeout_s: float = Field(120.0, gt=0, allow_inf_nan=False)
    """Seconds for one run of the tests."""

    most_files: int = Field(200, ge=1)
    """Most files that may be changed."""

    most_bytes: int = Field(2 * 2**20, ge=1)
    """Most bytes of the changed files together."""

    @model_validator(mode="before")
    @classmethod
    def _without_image(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping) and "image" in raw:
            raise ValueError(
                f"image: {show(raw['image'], 100)} is a container's image, and this sandbox has none; run the task "
                "behind an environment that has containers, or give its 'files' or 'folder'"
            )
        return raw

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.files and self.folder is None:
            raise ValueError("the task has no tree; give 'files' or 'folder'")
        if problem := not_variables(self.variables):
            raise ValueError(f"variables: {problem}")
        allowed = Globs(self.allowed)
        for path in self.gold:
            if not allowed.match(path):
                raise ValueError(f"gold: {path!r} is not among the allowed paths {list(self.allowed)}")
        return self

    @property
    def guard(self) -> str:
        """Return in words which of its tests no code is paid for that knows nothing; empty if there are none."""
        match self.verdict:
            case CallsVerdict(tests=tests):
                return f"guarded {len(tests)} of {len(tests)} tests"
            case PytestVerdict(tests=tests, kept=kept, twins=twins) if set(tests) & set(twins):
                return f"guarded {len(twins)} of {len(tests) + len(kept)} tests"
            case ScriptVerdict(twins=True):
                return "guarded by twins"
            case ScriptVerdict(reads_only=True):
                return "reads files only"
        return ""

    def why_unguarded(self) -> str:
        """Return why this row must not give a reward; empty if it has a guard, or sets `unguarded: true`."""
        if self.guard or isinstance(self.verdict, CallsVerdict) or self.verdict.unguarded:
            return ""
        if isinstance(self.verdict, PytestVerdict):
            return (
                "none of its 'tests' has a twin, so code is paid that equals everything: a test needs a literal that "
                "neither its arguments (as most sums of them are) nor the test's other values give away; compare with "
                "such literals, take the verdict 'calls', or write 'unguarded: true' into the verdict"
            )
        return (
            "its script has no twins, and it is not known to read files only, so what it starts can write the reward; "
            "compare with literals in a Python test, or write 'unguarded: true' into the verdict"
        )

    def check_guard(self) -> None:
        """Check that the row has a guard.

        Raises:
            UnguardedError: It has none, and does not declare that. `check_task` finds the guard of a row, and returns
                it.
        """
        if why := self.why_unguarded():
            raise UnguardedError(
                f"task {self.name!r}: {why}; use what check_task returns, where the row was never checked"
            )

    def tree(self) -> tuple[dict[str, bytes], set[str]]:
        """Return the files of the tree, and which of them may be executed.

        Raises:
            ConfigError: `folder` is not a folder, too large, or cannot be read.
        """
        try:
            return self._tree()
        except OSError as error:
            raise ConfigError(f"task {self.name!r}: folder {self.folder!r} cannot be read: {error}; mend it") from None

    def _tree(self) -> tuple[dict[str, bytes], set[str]]:
        found: dict[str, bytes] = {}
        executable: set[str] = set()
        if self.folder is not None:
            if not os.path.isdir(self.folder):
                raise ConfigError(f"task {self.name!r}: folder {self.folder!r} is no folder; mend the row")
            size = 0
            for name, path in _placed(Path(self.folder), self.places):
                size += path.stat().st_size  # before it is read: it may be larger than this machine's memory
                if size > _MOST_TREE_BYTES:
                    raise ConfigError(
                        f"task {self.name!r}: folder {self.folder!r} has more than {_MOST_TREE_BYTES} bytes; leave "
                        "out what the task does not need"
                    )
                found[name] = path.read_bytes()
                if os.access(path, os.X_OK):
                    executable.add(name)
        found |= {name: text.encode() for name, text in self.files.items()}
        return found, executable

    def tar(self) -> bytes:
        """Return the tree as a tar, for `Workspace.put`."""
        files, executable = self.tree()
        return write_tar(files, executable)


def read_task(raw: Mapping[str, Any], where: str) -> Task:
    """Read a task from a row.

    Args:
        raw: The task, as JSON has it.
        where: Its place, which errors name.

    Raises:
        ConfigError: It cannot work: an unknown verdict, an image, a key that is misspelt.
    """
    return read_model(Task, raw, where)


def _placed(folder: Path, places: Mapping[str, str] | None) -> list[tuple[str, Path]]:
    """Return the files of a folder, each with its path in the tree."""
    found = []
    for source, place in ({".": "."} if places is None else places).items():
        path = folder / source
        if path.is_file():
            found.append((os.path.normpath(place), path))
            continue
        below = ((each.relative_to(path).as_posix(), each) for each in _files_below(path))
        found += [(os.path.normpath(os.path.join(place, name)), each) for name, each in below]
    return found


def _files_below(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> NoReturn:
        raise error  # `walk` would leave the folder out

    found = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        paths = (Path(place, name) for name in sorted(names) if not name.endswith((".pyc", ".pyo")))
        found += [path for path in paths if path.is_file() and not path.is_symlink()]
    return found

"""Tasks of a package: a mutated tree, the tests that notice it, and the original text as its repair.

The rows of `recipes/swe` have them, and its agent reads them back. `draw.py` draws them.

Invariants:
- a row names the package, its version and the mutation; the tree is made from the installed package. Another version
  than the row's is refused.
"""

from __future__ import annotations

import functools

from pydantic import BaseModel, ConfigDict

from verl_multiturn.errors import ConfigError
from verl_multiturn.task_sets.swe.mutations import Mutation
from verl_multiturn.task_sets.swe.packages import is_test, read_package
from verl_multiturn.verdicts.task import Task, read_task

installed = functools.cache(read_package)
"""Read a package once."""


class SweTask(BaseModel):
    """One task, as a row has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    package: str
    version: str
    mutation: Mutation
    failing: tuple[str, ...]
    """Names in pytest of the tests that the repair has to mend."""
    passing: tuple[str, ...]
    """The other tests of their files, which passed before and have to pass on."""
    statement: str
    """The problem, in words for the model."""
    twins: tuple[str, ...] = ()
    """As `PytestVerdict.twins`; `check_task` finds them."""

    @property
    def tests(self) -> int:
        """Return the number of its tests; as many as its `twins` are guarded."""
        return len(self.failing) + len(self.passing)

    def task(self, hide_tests: bool = False) -> Task:
        """Return the task as the verdict knows it, with the mutated tree and the hidden tests.

        Args:
            hide_tests: Whether the model's tree is without the package's tests.

        Raises:
            ConfigError: Another version of the package is installed, or its files are not the row's.
        """
        package, path = installed(self.package), self.mutation.path
        if package.version != self.version:
            raise ConfigError(
                f"the row is about {self.package} {self.version!r}, and {package.version!r} is installed; install the "
                "row's version, or prepare the rows again"
            )
        try:
            mutated = self.mutation.apply(package.files[path])
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"the files of {self.package} {self.version} are not those of the row ({error}), expected the "
                "package as it was published; install it anew, or prepare the rows again"
            ) from None
        tree = {name: text for name, text in package.files.items() if not (hide_tests and is_test(name))}
        named = sorted({name.partition("::")[0] for name in (*self.failing, *self.passing)})
        raw = {
            "name": f"{self.package} {path}:{self.mutation.line} {self.mutation.kind}",
            "files": {name: text.decode() for name, text in {**tree, path: mutated}.items()},
            "allowed": sorted({_glob_of(name) for name in package.sources}),
            "gold": {path: package.files[path].decode()},
            "verdict": {
                "kind": "pytest",
                "files": {name: text.decode() for name, text in package.beside(named).items()},
                "tests": self.failing,
                "kept": self.passing,
                "twins": self.twins,
            },
        }
        return read_task(raw, f"a row about {self.package}")


def _glob_of(path: str) -> str:
    top, slash, _ = path.partition("/")
    return f"{top}/**/*.py" if slash else path

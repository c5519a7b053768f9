"""Drawing tasks: which mutations of a package its tests notice, and which of these have a verdict.

`recipes/swe/prepare_data.py` and `benchmarks.swe_packages` call `draw_tasks`.

Invariants:
- the tests that a task names passed twice on the original;
- every task was checked by the judge: its untouched tree is not paid, and its repair is, twice the same;
- of the tests that its mutation breaks, at least one has a twin;
- a repair may not break the other tests of the files in which a test fails, as in SWE-bench: so a verdict
  takes a second, not the minutes of a whole suite;
- the same package, version and seed give the same candidates in the same order.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.task_sets.swe.mutations import Mutation, drawn_mutations
from verl_multiturn.task_sets.swe.packages import Package
from verl_multiturn.task_sets.swe.tasks import SweTask, installed
from verl_multiturn.task_sets.swe.trials import TrialOutcome, needed_packages, run_tests
from verl_multiturn.verdicts.judge import Judge
from verl_multiturn.verdicts.task import PytestVerdict, UnguardedError
from verl_multiturn.verdicts.task_check import check_task
from verl_multiturn.workspaces.settings import WorkspaceSettings
from verl_multiturn.workspaces.workspace import WorkspacePool

MOST_FAILING = 10
"""Tests that a mutation may break. One that breaks more, such as an import, is found at once."""
_TRIAL_S = 60.0
_MOST_TESTS = 5
_MOST_CHARACTERS = 300
"""Tests that a statement shows, and characters of one test's message."""


def settings_for(package: str) -> WorkspaceSettings:
    """Return the settings of workspaces in which a package is worked on, or its tests are run.

    They show pytest and the package's requirements, and not the package itself, whose original is installed.

    Args:
        package: Name of the package.

    Raises:
        ConfigError: It is not installed.
    """
    return WorkspaceSettings(packages=needed_packages(package))


async def draw_tasks(package: str, count: int, seed: int) -> tuple[list[SweTask], Counter[str]]:
    """Draw tasks of a package, and return them with the outcomes of the mutations that were tried.

    Args:
        package: Name of the package.
        count: Number of tasks.
        seed: Seed of the draw.

    Returns:
        The tasks; and as `Draw.became`.

    Raises:
        ConfigError: The package is not installed, cannot be used, or does not have so many tasks.
    """
    read = installed(package)
    tasks: list[SweTask] = []
    async with WorkspacePool(settings_for(package)) as pool:
        judge = Judge(settings_for(package))
        try:
            draw = Draw(read, seed, pool, judge)
            async with aclosing(draw.tasks()) as drawn:
                async for task in drawn:
                    tasks.append(task)
                    if len(tasks) == count:
                        return tasks, draw.became
        finally:
            await judge.aclose()
    raise ConfigError(
        f"the package {package!r} has {len(tasks)} tasks, and {count} are asked for ({dict(draw.became)}); ask for less"
    )


class Draw:
    """Draws tasks of a package.

    Args:
        package: The package.
        seed: Seed of the order of the mutations.
        pool: Workspaces for the tests.
        judge: Checks the tasks.
        at_once: How many mutations are tried at the same time.

    Attributes:
        became: Outcome of each mutation that was tried: `task`, `unnoticed`, `too_many` (tests fail), `late` (the
            tests did not end), `untested` (no tests are near), `unguarded` (no test that it breaks has a twin) or
            `refused` (by the judge for another reason).
    """

    def __init__(
        self, package: Package, seed: int, pool: WorkspacePool, judge: Judge, at_once: int | None = None
    ) -> None:
        self.became: Counter[str] = Counter()
        self._package = package
        self._seed = seed
        self._pool = pool
        self._judge = judge
        self._at_once = at_once or max(2, os.cpu_count() or 1)
        self._originals: dict[tuple[str, ...], asyncio.Future[set[str]]] = {}

    async def tasks(self) -> AsyncGenerator[SweTask, None]:
        """Yield tasks in the order of their mutations, until all mutations have been tried."""
        drawn = drawn_mutations(self._package.sources, self._seed)
        trials: list[asyncio.Task[tuple[str, SweTask | None]]] = []
        try:
            while True:
                while len(trials) < self._at_once and (mutation := next(drawn, None)) is not None:
                    trials.append(asyncio.create_task(self._try(mutation)))
                if not trials:
                    return
                fate, task = await trials[0]
                del trials[0]
                self.became[fate] += 1
                if task is not None:
                    yield task
        finally:
            left: list[asyncio.Future[Any]] = [*trials, *self._originals.values()]
            for each in left:
                each.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _try(self, mutation: Mutation) -> tuple[str, SweTask | None]:
        """Return the outcome of a mutation, and the task that it gives."""
        near = self._package.near_tests(mutation.path)
        passing = await self._passing(near) if near else set()
        if not passing:
            return "untested", None
        files = self._package.files
        tree = {**files, mutation.path: mutation.apply(files[mutation.path])}
        found = await self._run(tree, near)
        if found is None:
            return "late", None
        failing = sorted(name for name in passing if name not in found or found[name].kind != "passed")
        if not failing or len(failing) > MOST_FAILING:
            return "too_many" if failing else "unnoticed", None
        # A file that cannot be imported fails as a whole, under its own name.
        fails = {name: found.get(name) or found.get(name.partition("::")[0]) for name in failing}
        messages = {name: outcome.message if outcome else "" for name, outcome in fails.items()}
        touched = {name.partition("::")[0] for name in failing}
        beside = (name for name in passing.difference(failing) if name.partition("::")[0] in touched)
        task = SweTask(
            package=self._package.name,
            version=self._package.version,
            mutation=mutation,
            failing=tuple(failing),
            passing=tuple(sorted(beside)),
            statement=statement_of(self._package.name, self._package.version, messages),
        )
        try:
            checked = await check_task(task.task(), self._judge)
        except UnguardedError:
            return "unguarded", None
        except ConfigError:  # the judge refuses the row
            return "refused", None
        assert isinstance(checked.verdict, PytestVerdict)
        return "task", task.model_copy(update={"twins": checked.verdict.twins})

    async def _passing(self, near: tuple[str, ...]) -> set[str]:
        """Return the tests that pass on the original, twice; each selection of files is run once."""
        if near not in self._originals:
            self._originals[near] = asyncio.ensure_future(self._pass_twice(near))
        return await asyncio.shield(self._originals[near])

    async def _pass_twice(self, near: tuple[str, ...]) -> set[str]:
        runs = [await self._run(self._package.files, near) or {} for _ in range(2)]
        return {name for name in runs[0] if all(name in run and run[name].kind == "passed" for run in runs)}

    async def _run(self, tree: Mapping[str, bytes], tests: Sequence[str]) -> dict[str, TrialOutcome] | None:
        async with await self._pool.open() as workspace:
            return await run_tests(workspace, tree, tests, _TRIAL_S)


def statement_of(package: str, version: str, messages: Mapping[str, str]) -> str:
    """Return the problem statement of a mutated package: the messages of its tests, without the place of the mistake.

    Args:
        package: Name of the package.
        version: Its version.
        messages: The message of each failing test, by its name in pytest.
    """
    shown = list(messages.items())[:_MOST_TESTS]
    listed = "\n".join(f"- {name}\n{_indented(said)}" for name, said in shown)
    left = len(messages) - len(shown)
    more = f"\nand {left} more." if left else ""
    number = "A test fails" if len(messages) == 1 else f"{len(messages)} tests fail"
    return (
        f"{number} in this copy of the Python package {package} ({version}):\n\n{listed}{more}\n\n"
        "The tests are right, and one place of the package is wrong. Find it and correct it, so that these tests pass "
        "and no other one fails. Changes of tests and of configuration do not count."
    )


def _indented(said: str) -> str:
    short = said if len(said) <= _MOST_CHARACTERS else said[:_MOST_CHARACTERS] + "…"
    return "\n".join(f"  {line}" for line in short.splitlines())

"""Drawing tasks of a package: a made one in real workspaces, and the fate of each mutation."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from verl_multiturn.errors import ConfigError
from verl_multiturn.task_sets.swe import draw, tasks
from verl_multiturn.task_sets.swe.draw import Draw, draw_tasks, settings_for
from verl_multiturn.task_sets.swe.packages import Package
from verl_multiturn.task_sets.swe.tasks import SweTask
from verl_multiturn.task_sets.swe.trials import TrialOutcome
from verl_multiturn.verdicts.judge import Judge
from verl_multiturn.verdicts.task import Task, UnguardedError
from verl_multiturn.workspaces.settings import WorkspaceSettings
from verl_multiturn.workspaces.workspace import WorkspacePool

pytestmark = pytest.mark.slow

CORE = b"""def clamp(value, low, high):
    if value < low:
        return low
    return min(value, high)


def total(values):
    found = 0
    for value in values:
        found += value
    return found
"""
TESTS = b"""import random
import pytest
from small import clamp, total

@pytest.mark.parametrize("value, wanted", [(5, 3), (-5, 1), (2, 2)])
def test_clamp(value, wanted):
    assert clamp(value, 1, 3) == wanted

def test_total():
    assert total(range(20)) == 190

def test_of_nothing():
    assert total([]) == 0

def test_that_fails_anyhow():
    assert total([1]) == 7

@pytest.mark.skip
def test_that_is_skipped():
    assert total([1]) == 7
"""
SMALL = Package(
    "small",
    "1.0",
    {
        "small/__init__.py": b"from small.core import clamp, total\n",
        "small/core.py": CORE,
        "small/tests/__init__.py": b"",
        "small/tests/test_core.py": TESTS,
    },
)


async def drawn(package: Package, monkeypatch: pytest.MonkeyPatch) -> tuple[list[SweTask], dict[str, int]]:
    """Return all tasks of a package, and the fates of its mutations."""
    monkeypatch.setattr(tasks, "installed", lambda name: package)
    settings = WorkspaceSettings(packages=("pytest",))
    judge = Judge(settings)
    async with WorkspacePool(settings) as pool:
        try:
            made = Draw(package, 0, pool, judge)
            return [task async for task in made.tasks()], dict(made.became)
        finally:
            await judge.aclose()


async def test_what_the_tests_notice_becomes_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    found, became = await drawn(SMALL, monkeypatch)
    assert became == {"task": 2, "unnoticed": 2}  # no value tells `<=` from `<` in `clamp`, nor `min(high, value)`
    by_kind = {(task.mutation.function, task.mutation.kind): task for task in found}
    assert set(by_kind) == {("total", "constant"), ("total", "arithmetic")}
    wrong_start = by_kind["total", "constant"]
    assert wrong_start.failing == ("small/tests/test_core.py::test_of_nothing", "small/tests/test_core.py::test_total")
    assert "test_that_fails_anyhow" not in "".join((*wrong_start.failing, *wrong_start.passing))
    assert len(wrong_start.passing) == 3
    assert "small/core.py" not in wrong_start.statement
    assert "assert 191 == 190" in wrong_start.statement
    assert wrong_start.twins


@pytest.mark.parametrize(("error", "fate"), [(ConfigError("no"), "refused"), (UnguardedError("no"), "unguarded")])
async def test_what_becomes_of_a_mutation(error: ConfigError, fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcomes are prepared here: by the number that the mutated function returns."""
    names = [f"t_test.py::test_{number}" for number in range(12)]
    failing = {3: [], 1: names[:11]}
    package = Package("small", "1.0", {"small.py": b"def f():\n    return 2, 8\n", "tests/test_a.py": b""})

    class Prepared(Draw):
        async def _run(self, tree: Mapping[str, bytes], tests: Sequence[str]) -> dict[str, TrialOutcome] | None:
            first, second = tree["small.py"].decode().split("return ")[1].split(", ")
            if int(second) == 9:
                return None
            broken = failing[int(first)] if int(first) != 2 else [] if int(second) == 8 else names[:2]
            return {name: TrialOutcome("failed" if name in broken else "passed", "said") for name in names}

    async def refuses(task: Task, judge: Judge) -> Task:
        raise error

    monkeypatch.setattr(draw, "check_task", refuses)
    monkeypatch.setattr(tasks, "installed", lambda name: package)
    made = Prepared(package, 0, WorkspacePool(WorkspaceSettings()), Judge())
    assert [task async for task in made.tasks()] == []
    assert made.became == {"unnoticed": 1, "too_many": 1, "late": 1, fate: 1}


async def test_a_package_without_so_many_tasks_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(draw, "installed", lambda name: Package("toolz", "1", {"a.py": b"def f():\n    return 1\n"}))
    with pytest.raises(ConfigError, match=r"'toolz' has 0 tasks, and 3 are asked for \(\{'untested': 2\}\)"):
        await draw_tasks("toolz", 3, 0)


def test_workspaces_show_what_a_package_needs_and_not_the_package() -> None:
    assert settings_for("toolz").packages == ("pytest",)

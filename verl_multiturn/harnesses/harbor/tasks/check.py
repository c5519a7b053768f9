"""`check_folders`: which task folders can be used: the untouched tree is not paid, and the result of `solve.sh` is.

A folder whose tests have no guard is refused as any other row (`check_task`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path

from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.harbor.tasks.folder import HarborFolder, for_tests, read_folder
from verl_multiturn.verdicts.changes import WorkChanges, collect
from verl_multiturn.verdicts.judge import Judge
from verl_multiturn.verdicts.task import Task
from verl_multiturn.verdicts.task_check import check_task
from verl_multiturn.workspaces.settings import WorkspaceSettings
from verl_multiturn.workspaces.tars import write_tar
from verl_multiturn.workspaces.workspace import WorkspaceError, WorkspacePool

_SOLUTION = "solution"
_AT_ONCE = 2


async def check_folders(
    folders: Sequence[Path], settings: WorkspaceSettings, bases: Collection[str] = ()
) -> tuple[dict[Path, tuple[HarborFolder, Task]], dict[Path, str]]:
    """Read and check task folders.

    Args:
        folders: The folders.
        settings: Those of the workspaces in which a model will work.
        bases: As for `read_folder`.

    Returns:
        Each folder that can be used, with its task, which has the guard that `check_task` found; and why each other one
        cannot be.

    Raises:
        OutageError: No sandbox could be started.
    """
    checked: dict[Path, tuple[HarborFolder, Task]] = {}
    refused: dict[Path, str] = {}
    slots = asyncio.Semaphore(_AT_ONCE)
    settings = for_tests(settings)
    played = settings.model_copy(update={"folders": (*settings.folders, _SOLUTION)})
    async with WorkspacePool(played) as pool:
        judge = Judge(settings, at_once=_AT_ONCE)

        async def check(path: Path) -> None:
            async with slots:
                try:
                    folder = read_folder(path, bases)
                    checked[path] = folder, await check_folder(folder, pool, judge)
                except ConfigError as error:
                    refused[path] = str(error)

        try:
            await asyncio.gather(*map(check, folders))
        finally:
            await judge.aclose()
    return {path: checked[path] for path in folders if path in checked}, refused


async def check_folder(folder: HarborFolder, pool: WorkspacePool, judge: Judge) -> Task:
    """Play a folder's solution, and return its task with its guard.

    Args:
        folder: The folder.
        pool: Workspaces that have a folder `solution`.
        judge: Scores the result of the solution.

    Raises:
        ConfigError: It has no solution, this is not paid 1, or `check_task` refuses the task.
        OutageError: No sandbox could be started.
    """
    if "solve.sh" not in folder.solution:
        raise ConfigError(
            f"the task {str(folder.path)!r} has no solution/solve.sh, so nobody knows whether its tests can pass; "
            "leave it out, or write one"
        )
    return await check_task(folder.task, judge, await _play(folder, pool, judge.packages))


async def _play(folder: HarborFolder, pool: WorkspacePool, packages: bool | tuple[str, ...]) -> WorkChanges:
    """Return the solution's result."""
    async with await pool.open() as workspace:
        try:
            await workspace.put(folder.task.tar())
            await workspace.put(write_tar(folder.solution), f"/tmp/{_SOLUTION}")
            command = f"bash /{_SOLUTION}/solve.sh"
            result = await workspace.run(command, timeout_s=folder.task.timeout_s, env=folder.task.variables)
        except WorkspaceError as error:
            raise ConfigError(f"the task {str(folder.path)!r}: its solution cannot be played: {error}") from None
        left = await collect(folder.task, workspace, packages)
    if result.exit_code != 0 or left.problem:
        why = left.problem or f"exit status {result.exit_code}: {result.output[-500:]}"
        raise ConfigError(f"the task {str(folder.path)!r}: its solution fails: {why}; leave it out, or mend it")
    return left

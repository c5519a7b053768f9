"""Tasks of an installed package: does a repair always earn, and the untouched tree never?

    python -m benchmarks.swe_packages [--package toolz] [--count 40] [--seed 0]

It draws tasks as `recipes/swe/prepare_data.py` does. Then each task is scored like an agent's work: its tree is put
into a workspace and stays there, once unchanged and once with the repair, each of them twice. The package has to be
installed (`requirements/tasks.lock` has toolz). The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from verl_multiturn.task_sets.swe.draw import draw_tasks, settings_for
from verl_multiturn.task_sets.swe.tasks import SweTask
from verl_multiturn.verdicts.judge import Judge
from verl_multiturn.verdicts.task import Task
from verl_multiturn.workspaces.tars import write_tar
from verl_multiturn.workspaces.workspace import WorkspacePool

AT_ONCE = 2
"""Trees that are scored at the same time."""


async def earned(task: Task, repair: Mapping[str, bytes], pool: WorkspacePool, judge: Judge) -> tuple[float, float]:
    """Return the reward of a tree in a workspace, twice; print why a repair is not paid.

    Args:
        task: The task.
        repair: Files that are written over those of the tree.
        pool: Workspaces.
        judge: Judges them.
    """
    rewards = []
    for _ in range(2):
        async with await pool.open() as workspace:
            await workspace.put(task.tar())
            await workspace.put(write_tar(repair))
            verdict = await judge.judge(task, workspace)
        if repair and verdict.reward < 1:
            print(f"{task.name}: {verdict.why}; left out: {dict(verdict.left_out)}", flush=True)
        rewards.append(verdict.reward)
    return rewards[0], rewards[1]


async def judge_all(package: str, tasks: Sequence[SweTask]) -> list[dict[str, tuple[float, float]]]:
    """Return for each task the rewards of the repair and the unchanged tree."""
    slots = asyncio.Semaphore(AT_ONCE)
    judge = Judge(settings_for(package), AT_ONCE)

    async def one(task: Task) -> dict[str, tuple[float, float]]:
        async with slots:
            gold = {path: text.encode() for path, text in task.gold.items() if text is not None}
            return {
                "gold": await earned(task, gold, pool, judge),
                "untouched": await earned(task, {}, pool, judge),
            }

    async with WorkspacePool(settings_for(package)) as pool:
        try:
            return list(await asyncio.gather(*(one(task.task()) for task in tasks)))
        finally:
            await judge.aclose()


def measure(package: str, count: int, seed: int) -> dict[str, Any]:
    """Draw tasks and judge them; return the figures.

    Args:
        package: Name of the package.
        count: Number of tasks.
        seed: Seed of the draw.
    """
    started = time.perf_counter()
    tasks, became = asyncio.run(draw_tasks(package, count, seed))
    drawn_s = time.perf_counter() - started
    judged = asyncio.run(judge_all(package, tasks))
    return {
        "package": package,
        "tasks": len(tasks),
        "tried": sum(became.values()),
        "became": dict(became),
        "functions": len({(task.mutation.path, task.mutation.function) for task in tasks}),
        "failing_median": statistics.median(len(task.failing) for task in tasks),
        "tests": sum(task.tests for task in tasks),
        "guarded": sum(len(task.twins) for task in tasks),
        "gold_paid": statistics.mean(reward for each in judged for reward in each["gold"]),
        "untouched_paid": statistics.mean(reward for each in judged for reward in each["untouched"]),
        "different": sum(first != second for each in judged for first, second in each.values()),
        "places_told": sum(task.mutation.path in task.statement for task in tasks),
        "drawn_s": round(drawn_s, 1),
        "seconds": round(time.perf_counter() - started, 1),
    }


def holds(found: Mapping[str, Any]) -> bool:
    """Return whether each repair was paid, no untouched tree was, and both twice alike."""
    keys = ("gold_paid", "untouched_paid", "different", "places_told")
    return tuple(found[key] for key in keys) == (1.0, 0.0, 0, 0)

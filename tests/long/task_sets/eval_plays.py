"""Ten tasks of BFCL, τ²-bench and the recipe terminal, played with their solutions and with nothing done."""

from __future__ import annotations

import asyncio
import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from tests.recipe_scripts import RECIPES, script

_PLAYED = 10


def dialogues_played() -> dict[str, Any]:
    """Return the rewards of BFCL's dialogues by `all`, as the protocol has it."""
    from tests.long.task_sets.bfcl import gold_turns, ours
    from verl_multiturn.task_sets.bfcl.package import CATEGORIES, dialogues

    chosen = [each for category in CATEGORIES for each in list(dialogues(category).values())[::70]][:_PLAYED]
    gold = [ours(each, gold_turns(each)).score("all") for each in chosen]
    silent = [ours(each, [[] for _ in each.turns]).score("all") for each in chosen]
    return _played(gold, silent)


def customers_played() -> dict[str, Any]:
    """Return the rewards of τ²'s customers of the airline, of tasks in which doing nothing is not right."""
    return asyncio.run(_customers("airline"))


async def _customers(domain: str) -> dict[str, Any]:
    from tests.long.task_sets.tau2 import plans_of, play
    from verl_multiturn.task_sets.tau2.package import tasks_of
    from verl_multiturn.task_sets.tau2.worlds import World, close_worlds, worlds_of

    rewards: dict[str, list[float]] = {"gold": [], "nothing": []}
    try:
        for task_id, task in tasks_of(domain).items():
            scored = {}
            for way in ("nothing", "gold"):
                calls, texts = plans_of(task)[way]
                world = World(worlds_of(domain))
                await play(world, calls)
                scored[way] = (await world.judge(task_id, texts)).reward
                await world.close()
                if scored["nothing"]:
                    break
            if not scored["nothing"]:
                rewards = {way: [*there, scored[way]] for way, there in rewards.items()}
            if len(rewards["gold"]) == _PLAYED:
                break
    finally:
        await close_worlds(domain)
    return _played(rewards["gold"], rewards["nothing"])


def shell_tasks_played() -> dict[str, Any]:
    """Return the rewards of made tasks in workspaces: each one's solution, and its untouched tree."""
    from verl_multiturn.harnesses.harbor.tasks.check import check_folders

    with mock.patch.object(sys, "path", [str(RECIPES / "terminal"), *sys.path]):
        made, terminal = importlib.import_module("made_tasks"), script("terminal")
    bash = terminal.bash_of(RECIPES / "terminal" / "tools.yaml")
    with tempfile.TemporaryDirectory(prefix="verl-multiturn-eval-sets-") as folder:
        folders = made.write_tasks(Path(folder), made.draw_tasks(_PLAYED, 0))
        good, refused = asyncio.run(check_folders(folders, bash.workspaces, []))
    # A folder is good where its solution is paid, and its untouched tree is not.
    return _played([1.0] * len(good) + [0.0] * len(refused), [0.0] * len(good))


def _played(right: list[float], nothing: list[float]) -> dict[str, Any]:
    return {
        "rows": len(right),
        "reference": round(sum(right) / len(right), 6),
        "empty": round(sum(nothing) / len(nothing), 6),
    }


PLAYED = {"bfcl": dialogues_played, "tau2": customers_played, "terminal": shell_tasks_played}
"""How the tasks of each benchmark with a recipe of its own are played."""

"""The agent of `recipes/swe`: mini-swe-agent in a workspace with the task's tree, and the verdict on its work.

It runs in a thread behind the endpoint. A row names its task (`extra_info.task`, a `SweTask` as JSON) and the agent's
settings.
"""

from __future__ import annotations

from typing import Any

from verl_multiturn.harnesses.mini_swe import MiniSettings, check_installed, solve
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.task_sets.swe.draw import settings_for
from verl_multiturn.task_sets.swe.tasks import SweTask
from verl_multiturn.verdicts.thread_judge import judge_workspace
from verl_multiturn.workspaces.threads import open_workspace

check_installed()  # the start-up check imports this file; later, a missing package would make every session invalid
_COMMIT = "git init -q && git add -A && git commit -qm 'The package as it is'"


def run(row: dict[str, Any], session: SessionAddress) -> float:
    """Let mini-swe-agent work at a row's task, and return the reward of its work: 1 or 0.

    Args:
        row: The row.
        session: Where the agent finds the model.

    Raises:
        ConfigError: mini-swe-agent or the row's package is not installed as the row needs it, or none of its tests has
            a twin.
        OutageError: There is no sandbox.
        UnjudgedError: The work cannot be scored, for a cause of ours.
    """
    info = row["extra_info"]
    swe = SweTask.model_validate_json(info["task"])
    task = swe.task(hide_tests=info["hide_tests"])
    task.check_guard()
    shown = settings_for(swe.package)
    with open_workspace(shown) as workspace:
        workspace.put(task.tar())
        workspace.run(_COMMIT)
        solve(row["messages"][-1]["content"], workspace.run, session, MiniSettings(**info["agent"]))
        return judge_workspace(task, workspace, shown).reward

"""`judge_workspace`: a verdict for code that runs in a thread and knows no event loop, such as an agent."""

from __future__ import annotations

from verl_multiturn.verdicts.judge import Judge, Verdict
from verl_multiturn.verdicts.task import Task
from verl_multiturn.workspaces.settings import WorkspaceSettings
from verl_multiturn.workspaces.threads import ThreadWorkspace


def judge_workspace(task: Task, workspace: ThreadWorkspace, settings: WorkspaceSettings | None = None) -> Verdict:
    """Return the verdict on an agent's work in its workspace, as `Judge.judge` does.

    Args:
        task: The task; `task.tar()` was put into the workspace.
        workspace: The workspace, of `open_workspace`.
        settings: Those of the workspaces in which tests run; None: the defaults, with pytest. Equal settings share a
            judge.

    Raises:
        UnjudgedError: It cannot be scored, for a cause of ours.
        OutageError: No sandbox could be started.
    """
    return workspace.keeper.wait(_judged(task, workspace, settings))


async def _judged(task: Task, workspace: ThreadWorkspace, settings: WorkspaceSettings | None) -> Verdict:
    judge = workspace.keeper.kept(("judge", settings), lambda: Judge(settings))
    return await judge.judge(task, workspace.inner)

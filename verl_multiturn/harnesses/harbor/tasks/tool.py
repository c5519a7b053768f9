"""`TaskBash`: the tool `bash` in the tree of a row's task, whose reward is the verdict on the result there.

    tools:
      - class_name: verl_multiturn.harnesses.harbor.tasks.tool.TaskBash
        config: {timeout_s: 120, packages: [pytest]}     # as for BashTool
        limits: {timeout_s: 7500}                        # above wait_s and verdict_s together

Rows name the task in `extra_info.tools_kwargs.bash.create_kwargs.task`, a `Task` as JSON. Set
`tool_reward.mode=replace`.

Invariants:
- tests never run where the model worked, and the model's workspace has nothing of them;
- a task that has no guard, and does not declare that, is refused before the model works;
- a result that cannot be scored for a cause of ours makes the conversation invalid, and is not a reward of 0.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from verl_multiturn.config import read_model
from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.harbor.tasks.folder import for_tests
from verl_multiturn.tools.bash import BashTool
from verl_multiturn.tools.schema import ToolSchema
from verl_multiturn.verdicts.judge import Judge
from verl_multiturn.verdicts.task import Task, read_task
from verl_multiturn.workspaces.settings import WorkspaceSettings


class TaskBashSettings(WorkspaceSettings):
    """Settings of the tool: those of a workspace, and two more. The tests run in workspaces of the same settings."""

    verdict_s: float = Field(default=3_600.0, gt=0, allow_inf_nan=False)
    """Seconds for a verdict from its beginning. Later the conversation is unjudged: the machine has too much to do.
    Steps that a model can delay end before, by the task's own seconds."""

    wait_s: float = Field(default=3_600.0, gt=0, allow_inf_nan=False)
    """Seconds that a verdict may wait for others. Later the conversation is unjudged, too."""


class TaskBash(BashTool):
    """The tool `bash(command, timeout_s)` in a task's tree.

    Args:
        config: The fields of `TaskBashSettings`.
        tool_schema: As in `BashTool`.

    Raises:
        ConfigError: As in `BashTool`.
    """

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        settings = read_model(TaskBashSettings, config, "config")
        ours = TaskBashSettings.model_fields.keys() - WorkspaceSettings.model_fields.keys()
        super().__init__({name: value for name, value in config.items() if name not in ours}, tool_schema)
        self._judge = Judge(
            for_tests(self.workspaces), max(2, os.cpu_count() or 1), settings.wait_s, settings.verdict_s
        )
        self._tasks: dict[str, Task] = {}

    async def create(self, instance_id: str, *, task: str | None = None, **kwargs: Any) -> None:
        """Open the conversation's workspace with the task's tree.

        Args:
            instance_id: Id of the conversation.
            task: The task, as JSON.
            kwargs: Not used.

        Raises:
            ConfigError: The row names no task, one without a guard, or its tree cannot be read.
            SandboxError: No workspace could be started.
        """
        read = _read_task(task)
        self._tasks[instance_id] = read
        await self._open(instance_id, [await asyncio.to_thread(read.tar)])

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the verdict on the work that remains: from 0 to 1.

        Raises:
            UnjudgedError: There is none, for a cause of ours.
            OutageError: No sandbox could be started.
        """
        return (await self._judge.judge(self._tasks[instance_id], self._workspaces[instance_id])).reward

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End the conversation's workspace, and wait until no process of it remains."""
        self._tasks.pop(instance_id, None)
        await super().release(instance_id)

    async def aclose(self) -> None:
        """End all workspaces; a later call would start new ones."""
        await self._judge.aclose()
        await super().aclose()

    def _variables(self, instance_id: str) -> Mapping[str, str]:
        return self._tasks[instance_id].variables


@functools.lru_cache(256)  # the conversations of a group have one task
def _read_task(text: str | None) -> Task:
    try:
        raw = json.loads(text or "")
    except ValueError:
        raise ConfigError(f"create_kwargs.task: {text!r:.200}, expected a Task as JSON; prepare the rows") from None
    task = read_task(raw, "create_kwargs.task")
    task.check_guard()
    return task

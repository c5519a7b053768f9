"""A task set of verifiers whose environment does not end: it waits for ever, or holds up its event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any, Literal

import verifiers.v1 as vf


class OddTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Any task."""


class OddConfig(vf.TasksetConfig):
    """Settings of the task set."""

    how: Literal["waits", "holds"] = "waits"


class OddTaskset(vf.Taskset[OddTask, OddConfig]):
    """One task."""

    def load(self) -> Iterator[OddTask]:
        """Yield it."""
        yield OddTask(vf.TaskData(name=self.config.how, prompt="Wait."), self.config.task)


class OddEnvConfig(vf.EnvConfig):
    """Its only seat."""

    agent: vf.AgentConfig = vf.AgentConfig()


class OddEnv(vf.Env[OddEnvConfig]):
    """Never ends."""

    async def run(self, task: Any, agents: Any) -> None:
        """Wait."""
        if self.config.taskset.how == "holds":
            time.sleep(3_600)  # noqa: ASYNC251 - this is its fault
        await asyncio.sleep(3_600)


__all__ = ["OddEnv", "OddTaskset"]

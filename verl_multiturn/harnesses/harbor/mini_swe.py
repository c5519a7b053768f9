"""mini-swe-agent as a harness of Harbor whose loop stays outside of the environment. Runs in Harbor's Python.

Harbor's own `mini-swe-agent` installs itself into the environment, which needs a network there, and the session's key.
Here the environment is given commands only, so it may be our workspace, or a container without a network. A command
runs in the folder and as the user of the task; `harnesses/mini_swe.py` has the rest.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from verl_multiturn.harnesses.mini_swe import MiniSettings, client_of, package, play
from verl_multiturn.workspaces.workspace import CommandResult

os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", "/nonexistent")  # a user's own settings are not for a trial


class MiniSweAgent(BaseAgent):
    """The harness; name it by `harness: verl_multiturn.harnesses.harbor.mini_swe:MiniSweAgent`."""

    def __init__(self, *args: Any, command_s: float = 60.0, step_limit: int = 0, **kwargs: Any) -> None:
        """Take Harbor's arguments.

        Args:
            args: Harbor's.
            command_s: Seconds of a command.
            step_limit: The most turns; 0 for no limit.
            kwargs: Harbor's.
        """
        super().__init__(*args, **kwargs)
        self._settings = MiniSettings(step_limit=step_limit, timeout_s=command_s)

    @staticmethod
    def name() -> str:
        """Return the harness's name."""
        return "mini-swe-agent-outside"

    def version(self) -> str:
        """Return the version of mini-swe-agent."""
        return str(package().version)

    async def setup(self, environment: BaseEnvironment) -> None:
        """Do nothing: nothing is installed."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Run the loop in a thread; its commands run in the environment, on this event loop."""
        inside = _Inside(environment, asyncio.get_running_loop())
        with client_of(self._get_env("OPENAI_BASE_URL"), self._get_env("OPENAI_API_KEY")) as client:
            try:
                await asyncio.to_thread(play, instruction, inside.run, client, self._settings)
            finally:
                inside.is_over = True


class _Inside:
    """The commands of the loop, from its thread, in the environment of Harbor."""

    def __init__(self, environment: BaseEnvironment, loop: asyncio.AbstractEventLoop) -> None:
        self._environment, self._loop = environment, loop
        self.is_over = False

    def run(self, command: str, *, timeout_s: float, env: Mapping[str, str]) -> CommandResult:
        """Run a command.

        Raises:
            RuntimeError: The agent's time is over.
            Exception: Harbor's, of an environment that has ended.
        """
        if self.is_over:
            raise RuntimeError("the agent's time is over")
        call = self._environment.exec(command, env=dict(env), timeout_sec=int(timeout_s))
        began = time.monotonic()
        try:
            result = asyncio.run_coroutine_threadsafe(call, self._loop).result()
        except CancelledError:
            raise
        except Exception:  # a late command fails in as many ways as Harbor has environments
            if time.monotonic() - began < int(timeout_s):  # not late: the environment itself has ended
                raise
            return CommandResult("", None, timed_out=True)
        return CommandResult((result.stdout or "") + (result.stderr or ""), result.return_code)

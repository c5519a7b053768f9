"""mini-swe-agent as a harness of Harbor whose loop stays outside of the environment. Runs in Harbor's Python.

Harbor's own `mini-swe-agent` installs itself into the environment, which needs a network there, and the session's key.
Here the environment is given commands only, so it may be our workspace, or a container without a network. The loop and
the model are mini-swe-agent's own, with its `mini.yaml`; a command runs in the folder and as the user of the task.
"""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", "/nonexistent")  # what a user set for himself is not for a trial

import minisweagent
import yaml
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from litellm.exceptions import ContextWindowExceededError
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.exceptions import LimitsExceeded
from minisweagent.models.litellm_model import LitellmModel

_CONFIG = Path(minisweagent.__file__).parent / "config" / "mini.yaml"


class MiniSweAgent(BaseAgent):
    """The harness; name it by `harness: verl_multiturn.proxy.agents.harbor.mini_swe:MiniSweAgent`."""

    def __init__(self, *args: Any, command_s: float = 60.0, step_limit: int = 0, **kwargs: Any) -> None:
        """Take Harbor's arguments.

        Args:
            args: Harbor's.
            command_s: Seconds of a command.
            step_limit: The most turns; 0 for no limit.
            kwargs: Harbor's.
        """
        super().__init__(*args, **kwargs)
        self._command_s, self._step_limit = command_s, step_limit

    @staticmethod
    def name() -> str:
        """Return the harness's name."""
        return "mini-swe-agent-outside"

    def version(self) -> str:
        """Return the version of mini-swe-agent."""
        return str(minisweagent.__version__)

    async def setup(self, environment: BaseEnvironment) -> None:
        """Do nothing: nothing is installed."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Run the loop in a thread; its commands run in the environment, on this event loop."""
        config = yaml.safe_load(_CONFIG.read_text(encoding="utf-8"))
        address, key = self._get_env("OPENAI_BASE_URL"), self._get_env("OPENAI_API_KEY")
        model = _Model(
            model_name=self.model_name,
            cost_tracking="ignore_errors",
            model_kwargs={**config["model"].pop("model_kwargs", {}), "api_base": address, "api_key": key},
            **config["model"],
        )
        inside = _Inside(environment, asyncio.get_running_loop(), self._command_s, config["environment"].get("env"))
        templates = {name: config["agent"][name] for name in ("system_template", "instance_template")}
        agent = DefaultAgent(model, inside, step_limit=self._step_limit, cost_limit=0, **templates)
        try:
            await asyncio.to_thread(agent.run, instruction)
        finally:
            inside.is_over = True


class _Model(LitellmModel):
    """mini-swe-agent's model, for which a full context is a limit like the most turns: what is left is judged."""

    def query(self, messages: list[dict[str, str]], **kwargs: Any) -> dict[str, Any]:
        """Return the model's next turn.

        Raises:
            LimitsExceeded: The conversation no longer fits.
        """
        try:
            turn: dict[str, Any] = super().query(messages, **kwargs)
        except ContextWindowExceededError as error:
            ended = {"exit_status": "LimitsExceeded", "submission": ""}
            raise LimitsExceeded({"role": "exit", "content": str(error), "extra": ended}) from None
        return turn


class _Inside(LocalEnvironment):
    """The environment of Harbor as mini-swe-agent calls one, from its thread."""

    def __init__(
        self,
        environment: BaseEnvironment,
        loop: asyncio.AbstractEventLoop,
        command_s: float,
        variables: dict[str, str] | None,
    ) -> None:
        super().__init__(env=variables or {}, timeout=int(command_s))
        self._environment, self._loop = environment, loop
        self.is_over = False

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run the command of an action, and return what the loop shows the model."""
        if self.is_over:
            raise RuntimeError("the agent's time is over")
        seconds = timeout or self.config.timeout
        call = self._environment.exec(
            action.get("command", ""), cwd=cwd or None, env=self.config.env, timeout_sec=seconds
        )
        began = time.monotonic()
        try:
            result = asyncio.run_coroutine_threadsafe(call, self._loop).result()
        except CancelledError:
            raise
        except Exception as error:  # a late command fails in as many ways as Harbor has environments
            if time.monotonic() - began < seconds:  # not late: the environment itself has ended
                raise
            output = {"output": "", "returncode": -1, "exception_info": f"An error occurred: {error}"}
        else:
            said = (result.stdout or "") + (result.stderr or "")
            output = {"output": said, "returncode": result.return_code, "exception_info": ""}
        self._check_finished(output)
        return output

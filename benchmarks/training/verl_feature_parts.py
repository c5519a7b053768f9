"""A tool, a router and a callback for the runs of `benchmarks.verl_features`, in whose processes they are imported."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from verl_multiturn.tools.base import ToolResponse
from verl_multiturn.tools.calculator import CalculatorTool


class SleepingCalculator(CalculatorTool):
    """A calculator that sleeps for its config's `seconds` first."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self._seconds: float = config["seconds"]

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        """Sleep, and return the value of the expression."""
        await asyncio.sleep(self._seconds)
        return await super().execute(instance_id, parameters, **kwargs)


class WritingRouter(GlobalRequestLoadBalancer):
    """A router that looks at the prompt, as one that knows caches does, and writes down whom it names.

    Its config, the YAML of `rollout.router_config_path`, has `journal`: a file that gets a line for each request, with
    its `server` and the number of `ids` of its prompt.
    """

    def __init__(self, servers: dict[str, Any], config: dict[str, Any]) -> None:
        super().__init__(servers)
        self._journal = Path(config["journal"])

    def require_acquire_fields(self) -> list[str]:
        """Ask for the prompts."""
        return ["prompt_ids"]

    def acquire_server(self, request_id: str, prompt_ids: Sequence[int] = ()) -> tuple[str, Any]:
        """Name a server as verl's own router does."""
        server_id, server = super().acquire_server(request_id)
        with self._journal.open("a") as file:  # a short line
            file.write(json.dumps({"server": server_id, "ids": len(prompt_ids)}) + "\n")
        return server_id, server


class RaisingCallback(CheckpointCallback):
    """A checkpoint callback that fails."""

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **kwargs: Any) -> None:
        """Raise.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"the callback fails after {checkpoint_dir}")

"""`AgentRunner`: runs the agents of one worker, each in a thread or a process, and reports how each ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.agents.end import AgentEnd


class AgentRunner(Protocol):
    """Runs the agents of one worker, all on one event loop."""

    @property
    def stuck(self) -> int:
        """Number of threads that were abandoned and still run."""

    async def run(
        self,
        row: Mapping[str, Any],
        address: SessionAddress,
        time_up: asyncio.Event,
        returned: Callable[[], None] | None = None,
    ) -> AgentEnd:
        """Run the agent for one session, and return how it ended.

        When the call is cancelled, the agent's process is killed or its thread abandoned, at once.

        Args:
            row: The data row, as `agent.agent_row` returns it.
            address: Where the agent finds the model.
            time_up: Set when the session's time is up and nothing is answered any more. The call then returns within
                9 seconds.
            returned: Is called as soon as the agent has returned or ended, which may be before all that it started is
                gone. No request from then on counts.

        Raises:
            AgentContractError: The agent returned something that is not a reward.
            ConfigError: The agent cannot be imported, or there is no such command.
        """

    async def aclose(self) -> None:
        """End all that remains."""

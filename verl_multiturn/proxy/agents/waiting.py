"""`WaitingRunner`: in the place of a runner, for agents that somebody starts elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.agents.end import AgentEnd


class WaitingRunner:
    """Runs nothing: a session lasts until its time is up, or its end is set. `serve` and the gateway use it.

    Args:
        begun: Called with the address of each session, and with the event that ends it.
    """

    stuck = 0

    def __init__(self, begun: Callable[[SessionAddress, asyncio.Event], None]) -> None:
        self._begun = begun

    async def run(
        self,
        row: Mapping[str, Any],
        address: SessionAddress,
        time_up: asyncio.Event,
        returned: Callable[[], None] | None = None,
    ) -> AgentEnd:
        """Hand the address over, and wait."""
        over = asyncio.Event()
        self._begun(address, over)
        waits = [asyncio.ensure_future(each.wait()) for each in (over, time_up)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        return AgentEnd("returned")

    async def aclose(self) -> None:
        """Do nothing."""

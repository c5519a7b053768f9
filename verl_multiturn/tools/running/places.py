"""Places of which a conversation needs one for a tool's whole life, such as those of MCP servers (`mcp.most`).

Invariants:
- a conversation takes its places before the first `create`, in one order, so that no two wait for each other;
- waiting for one is not run time of `create`; it counts in the conversation's time, as waiting for a slot does;
- a conversation that gets none within `queue_timeout_s` ends as in an outage: no model could change that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from verl_multiturn.calls.invocation import BusyError
from verl_multiturn.calls.outages.process import OutageEndError
from verl_multiturn.calls.timeline import during
from verl_multiturn.tools.running.gate import Gate


class Places(Protocol):
    """Places that tools share, as their attribute `places`.

    Attributes:
        order: Its place in the order in which conversations take places.
    """

    order: int

    async def reserve(self, conversation: str, wait_s: float) -> None:
        """Wait for a place for a conversation.

        Args:
            conversation: Its id.
            wait_s: Seconds to wait at most.

        Raises:
            BusyError: None was free in time.
        """

    def leave(self, conversation: str) -> None:
        """Give back a place that no tool of the conversation uses."""


class ConversationPlaces:
    """Places of one conversation.

    Args:
        conversation: Its id.
        gates: The state of its tools.

    Attributes:
        waited_s: Seconds for which it waited for them; None: it needs none.
    """

    def __init__(self, conversation: str, gates: Iterable[Gate]) -> None:
        self._conversation = conversation
        needed: dict[int, tuple[Places, Gate]] = {}
        for gate in gates:
            if gate.places is not None:
                needed.setdefault(gate.places.order, (gate.places, gate))
        self._needed = [needed[order] for order in sorted(needed)]
        self.waited_s: float | None = 0.0 if needed else None

    async def take(self) -> None:
        """Wait for all places.

        Raises:
            OutageEndError: One was not free in time.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            for places, gate in self._needed:
                with during("wait", gate.name):
                    await places.reserve(self._conversation, gate.limits.queue_timeout_s)
        except BusyError as error:
            raise OutageEndError(f"tool {gate.name!r}: {error}") from None
        finally:
            if self.waited_s is not None:
                self.waited_s = loop.time() - started

    def give_back(self) -> None:
        """Give back the places that no tool has used."""
        for places, _ in self._needed:
            places.leave(self._conversation)

"""A calculator with slow calls, and an author's mistake in some conversations: for `benchmarks.fates`."""

from __future__ import annotations

import asyncio
import hashlib
import math
from statistics import NormalDist
from typing import Any

from verl_multiturn.tools.base import ToolResponse
from verl_multiturn.tools.calculator import CalculatorTool

SIGMA, LONGEST_S = 1.2, 30.0


def drawn(instance_id: str, what: str) -> float:
    """Return a number from 0 to 1, the same for the same conversation and purpose."""
    return int.from_bytes(hashlib.sha256(f"{what} {instance_id}".encode()).digest()[:6]) / 2**48


class MistakenCalculator(CalculatorTool):
    """A calculator whose `config` has `mistakes`, a share of conversations, and `median_s`, the time of a call.

    In these conversations it returns a wrong type, which raises into verl.
    """

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self._mistakes, self._median_s = float(config["mistakes"]), float(config["median_s"])

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        """Sleep, and return the value of the expression, or a wrong type.

        Raises:
            ValueError: As the calculator.
        """
        deviation = NormalDist().inv_cdf(max(1e-9, drawn(instance_id, "time")))
        await asyncio.sleep(min(LONGEST_S, self._median_s * math.exp(SIGMA * deviation)))
        if drawn(instance_id, "mistake") < self._mistakes:
            return 5  # type: ignore[return-value]  # the mistake
        return await super().execute(instance_id, parameters, **kwargs)

"""The quickstart's calculator with a long-tailed latency, which is the same in every run.

A call's latency follows from its row, its sample and its number alone, so that the trainer modes can be compared. All
calls of a run are written to a journal, from which `benchmarks.async_speed` reads when each turn began and ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections import Counter
from pathlib import Path
from statistics import NormalDist
from typing import Any

from verl_multiturn.tools.base import ToolResponse
from verl_multiturn.tools.calculator import CalculatorTool

MEDIAN_S, SIGMA, LONGEST_S = 1.0, 1.2, 30.0


def latency_s(row: int, sample: int, call: int) -> float:
    """Return the seconds that a call takes: lognormal, cut at `LONGEST_S`.

    Args:
        row: Number of the data row.
        sample: Number of the conversation in its group.
        call: Number of the call in its conversation.
    """
    digest = hashlib.sha256(f"{row}/{sample}/{call}".encode()).digest()
    uniform = (int.from_bytes(digest[:6]) + 0.5) / 2**48
    return min(LONGEST_S, MEDIAN_S * math.exp(SIGMA * NormalDist().inv_cdf(uniform)))


class SlowCalculator(CalculatorTool):
    """A calculator that sleeps; its `config` has `samples`, the size of a group, and `journal`, a file.

    A tool does not know which sample of its group it serves. So the conversations of a row are numbered in the order in
    which they begin. A group that is begun anew has the same latencies again. One process must have all conversations.

    Each line of the journal is a conversation: `id`, `row`, `sample`, and the times (`time.time`) of its `create`, of
    the begin and the end of each of its `calls`, and of its `release`.
    """

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self._samples: int = config["samples"]
        self._journal = Path(config["journal"])
        self._begun: Counter[int] = Counter()
        self._conversations: dict[str, dict[str, Any]] = {}

    async def create(self, instance_id: str, *, row: int, **kwargs: Any) -> None:
        """Give a conversation its number in its group."""
        sample, self._begun[row] = self._begun[row] % self._samples, self._begun[row] + 1
        known = {"id": instance_id, "row": row, "sample": sample, "create": time.time(), "calls": []}
        self._conversations[instance_id] = known

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        """Sleep for the call's latency, and return the value of the expression.

        Raises:
            ValueError: As the calculator.
        """
        known = self._conversations[instance_id]
        latency = latency_s(known["row"], known["sample"], len(known["calls"]))
        times = [time.time()]
        known["calls"].append(times)
        await asyncio.sleep(latency)
        times.append(time.time())
        return await super().execute(instance_id, parameters, **kwargs)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Write the conversation into the journal."""
        line = json.dumps(self._conversations.pop(instance_id) | {"release": time.time()})
        with self._journal.open("a") as file:  # a short line
            file.write(f"{line}\n")

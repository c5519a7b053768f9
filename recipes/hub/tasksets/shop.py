"""A task set of verifiers: look up two prices with a tool, and say their sum.

The tool set belongs to the task set, not to a task: it is one process for all sessions of an environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

PRICES = {"apple": 3, "pear": 5, "plum": 8, "fig": 2, "kiwi": 7}
SYSTEM = "Look up each price with the tool price, one call a turn. Then say the sum, a number alone."


class PriceTools(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    """The list of prices."""

    TOOL_PREFIX = None

    @vf.tool
    async def price(self, name: str) -> str:
        """Return the price of a fruit."""
        return str(PRICES.get(name, "no such fruit"))


class ShopData(vf.TaskData):
    """A question and its answer."""

    answer: int = 0


class ShopTask(vf.Task[ShopData, vf.State, vf.TaskConfig]):
    """A question, and how an answer is scored."""

    @vf.reward
    async def right(self, trace: Any) -> float:
        """Return 1 for the right sum, half for a reply with any number, else 0."""
        found = re.findall(r"\d+", trace.last_reply or "")
        return (1.0 if int(found[-1]) == self.data.answer else 0.5) if found else 0.0


class ShopConfig(vf.TasksetConfig):
    """Settings of the task set."""

    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class ShopTaskset(vf.Taskset[ShopTask, ShopConfig]):
    """Each pair of fruits is a task."""

    def load(self) -> Iterator[ShopTask]:
        """Yield the tasks."""
        pairs = [(one, other) for one in PRICES for other in PRICES if one != other]
        for one, other in pairs:
            data = ShopData(
                name=f"{one}+{other}",
                prompt=f"What do a {one} and a {other} cost together?",
                system_prompt=SYSTEM,
                answer=PRICES[one] + PRICES[other],
            )
            yield ShopTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: ShopConfig) -> list[vf.Toolset]:
        """Return the list of prices, which all tasks share."""
        return [PriceTools(config.tools)]


__all__ = ["ShopTaskset"]

if __name__ == "__main__":
    PriceTools.run()

"""A task set of verifiers with two seats: a buyer and a seller agree on a price, or on none.

The seller speaks first. Who accepts ends it. The gain between the seller's cost and the buyer's limit is shared: each
seat is rewarded with its part of it, and with 0 without a deal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

ROUNDS = 3
FORM = "Each turn say one whole number, your price, or the word deal, which accepts the other's last price."


class HaggleData(vf.TaskData):
    """The numbers that only one side knows."""

    cost: int = 0
    limit: int = 0


class HaggleTask(vf.Task[HaggleData, vf.State, vf.TaskConfig]):
    """One bargain."""


class HaggleConfig(vf.TasksetConfig):
    """Settings of the task set: none of its own."""


class HaggleTaskset(vf.Taskset[HaggleTask, HaggleConfig]):
    """Bargains with a gain of 6 to 21."""

    def load(self) -> Iterator[HaggleTask]:
        """Yield the tasks."""
        for number in range(16):
            cost = 10 + 3 * number
            data = HaggleData(name=f"bargain-{number}", prompt="A vase.", cost=cost, limit=cost + 6 + number)
            yield HaggleTask(data, self.config.task)


class HaggleEnvConfig(vf.EnvConfig):
    """The seats."""

    buyer: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    seller: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class HaggleEnv(vf.Env[HaggleEnvConfig]):
    """Lets the two speak in turn, and gives each its part."""

    async def run(self, task: Any, agents: Any) -> None:
        """Play one bargain."""
        sides = {
            "seller": f"You sell a vase that cost you {task.data.cost}. {FORM}",
            "buyer": f"You buy a vase, for at most {task.data.limit}. {FORM}",
        }
        alone = {name: vf.Task(vf.TaskData(prompt=None, system_prompt=text)) for name, text in sides.items()}
        price: int | None = None
        deal = False
        async with (
            agents.seller.interaction(alone["seller"]) as seller,
            agents.buyer.interaction(alone["buyer"]) as buyer,
        ):
            said = "What is your price?"
            for turn in range(2 * ROUNDS):
                segment = await (buyer if turn % 2 else seller).turn(said)
                if segment.terminated:
                    break
                said = segment.last_reply.strip() or "…"
                if "deal" in said.lower():
                    deal = price is not None
                    break
                if found := re.findall(r"\d+", said):
                    price = int(found[-1])
        gain = task.data.limit - task.data.cost
        part = min(max((price or 0) - task.data.cost, 0), gain) / gain if deal else 0.0
        seller.trace.record_reward("part", part)
        buyer.trace.record_reward("part", 1.0 - part if deal else 0.0)


__all__ = ["HaggleEnv", "HaggleTaskset"]

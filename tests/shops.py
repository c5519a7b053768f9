"""An environment and a tool that share its world, as docs/write/interactions.md describes."""

from __future__ import annotations

from typing import Any

from verl_multiturn import BaseTool, Interaction, Reply
from verl_multiturn.tools.schema import ToolSchema

BASKETS: dict[str, list[str]] = {}
"""The basket of each conversation that has begun and not ended."""
MOST: list[int] = [0]
"""Largest number of baskets so far."""


class Shop(Interaction):
    """A shop, in which each conversation has a basket."""

    async def start(self, instance_id: str, *, goods: list[str], stock: int = 1) -> None:  # type: ignore[override]
        if not goods:
            raise RuntimeError("the shop is empty")
        BASKETS[instance_id] = []
        MOST[0] = max(MOST[0], len(BASKETS))

    async def reply(self, instance_id: str, messages: Any, **kwargs: Any) -> Reply:
        return Reply(str(BASKETS[instance_id]), done=True)

    async def close(self, instance_id: str) -> None:
        BASKETS.pop(instance_id, None)


class Basket(BaseTool):
    """Puts something into the basket."""

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)

    def get_schema(self) -> ToolSchema:
        """Return the schema."""
        what = {"type": "string", "description": "What to take."}
        parameters = {"type": "object", "properties": {"what": what}, "required": ["what"]}
        function = {"name": "take", "description": "Take something.", "parameters": parameters}
        return ToolSchema.read({"type": "function", "function": function}, "Basket")

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        BASKETS[instance_id].append(parameters["what"])
        return f"{len(BASKETS[instance_id])} things"


class Named(Basket):
    """A basket under an id of its own, as tools of older verl return one."""

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self.names: dict[str, str] = {}

    async def create(self, instance_id: str, **kwargs: Any) -> str:  # type: ignore[override]
        self.names[f"own {instance_id}"] = instance_id
        return f"own {instance_id}"

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        return await super().execute(self.names[instance_id], parameters)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.names.pop(instance_id, None)

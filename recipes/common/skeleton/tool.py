"""The tool: a stock of articles, which each data row brings."""

from __future__ import annotations

from typing import Any

from verl_multiturn import BaseTool, ToolResponse


class Stock(BaseTool):
    """A tool that looks an article up.

    All conversations of a process share this object, so state is kept under `instance_id`.
    """

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self.pieces: dict[str, dict[str, int]] = {}

    async def create(self, instance_id: str, pieces: dict[str, int]) -> None:
        """Keep the row's stock. It is called once, before the first call."""
        self.pieces[instance_id] = pieces

    async def execute(self, instance_id: str, parameters: dict[str, Any]) -> ToolResponse:
        """Answer a call. Its arguments fit the schema.

        Raises:
            ValueError: There is no such article; the model reads it.
        """
        article, pieces = parameters["article"], self.pieces[instance_id]
        if article not in pieces:
            raise ValueError(f"no article {article[:40]!r}; there are {', '.join(pieces)}")
        return ToolResponse(str(pieces[article]))

    async def release(self, instance_id: str) -> None:
        """Forget the stock. It is called once for each `create`."""
        self.pieces.pop(instance_id, None)

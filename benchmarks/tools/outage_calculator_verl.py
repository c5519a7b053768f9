"""The calculator behind HTTP for verl's ToolAgentLoop: for `benchmarks.outage`."""

from __future__ import annotations

from typing import Any

import httpx
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from benchmarks.outage_calculator import FAILURE


class VerlCalculator(BaseTool):  # type: ignore[misc]
    """A tool of verl's that asks the service at `url`, and gives the model the texts of `HttpCalculator`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        self._address = f"{config['url']}/evaluate"

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Return the value of the expression as text.

        Raises:
            RuntimeError: The service is not there; verl makes it a text for the model.
        """
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=30.0) as client:
                response = await client.post(self._address, json={"expression": parameters.get("expression")})
        except httpx.HTTPError:
            raise RuntimeError(f"{FAILURE}cannot be reached") from None
        if response.status_code != httpx.codes.OK:
            raise RuntimeError(f"{FAILURE}failed (HTTP {response.status_code})")
        answer = response.json()
        return ToolResponse(text=answer.get("value") or answer["mistake"]), 0.0, {}

"""The calculator for verl's ToolAgentLoop: for `benchmarks.beside_verl`."""

from __future__ import annotations

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

from verl_multiturn.tools.calculator import evaluate


class VerlCalculator(BaseTool):  # type: ignore[misc]
    """A tool of verl's that gives the model the value of an expression, or its mistake."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Return the value of the expression as text."""
        try:
            text = str(evaluate(str(parameters.get("expression"))))
        except Exception as error:  # the model is shown its mistake, as by our own calculator
            text = f"error: {error}"
        return ToolResponse(text=text), 0.0, {}

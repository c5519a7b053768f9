"""`FinishTool`: the model submits its final answer, which ends the conversation.

Invariants:
- a submitted answer never changes;
- the answer reaches the reward function as the metric `answer` of the call.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.config import read_model
from verl_multiturn.tools.base import BaseTool, ToolResponse
from verl_multiturn.tools.schema import ToolSchema


class FinishSettings(BaseModel):
    """Settings of the tool, of which there are none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FinishTool(BaseTool):
    """The tool `finish(answer)`.

    Args:
        config: Empty: there are no settings.
        tool_schema: As in `BaseTool`; None for the tool's own.

    Raises:
        ConfigError: The config is not empty.
    """

    outage_limits = OutageLimits(mode="off")  # it answers in this process
    ends_conversation = True

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        read_model(FinishSettings, config, "config")
        super().__init__(config, tool_schema)
        self._answers: dict[str, str] = {}

    def get_schema(self) -> ToolSchema:
        """Return the schema: one argument, `answer`, a text."""
        answer = {"type": "string", "description": "The final answer, complete and by itself."}
        return ToolSchema.read(
            {
                "type": "function",
                "function": {
                    "name": "finish",
                    "description": "Submit the final answer and end the conversation. It can be called once.",
                    "parameters": {"type": "object", "properties": {"answer": answer}, "required": ["answer"]},
                },
            },
            "FinishTool",
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Record the answer, and return it as the metric `answer`.

        Raises:
            ValueError: The conversation has an answer already.
        """
        if instance_id in self._answers:
            raise ValueError("an answer has been submitted already and cannot be changed")
        self._answers[instance_id] = str(parameters["answer"])
        return ToolResponse("Submitted."), 0.0, {"answer": self._answers[instance_id]}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the conversation."""
        self._answers.pop(instance_id, None)

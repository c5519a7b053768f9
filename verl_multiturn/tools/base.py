"""`BaseTool`: what a tool's author writes.

    class Lookup(BaseTool):
        async def execute(self, instance_id, parameters, **kwargs):
            return ToolResponse(text=self.config["table"][parameters["key"]])

A tool object is shared by all conversations of a worker; what belongs to one conversation is kept under `instance_id`
between `create` and `release`. verl's own tools (0.4 to 0.9) are accepted beside subclasses of this class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.schema import ToolSchema


@dataclass(frozen=True)
class ToolResponse:
    """What the model gets to read, and, where it takes images, to see: `image` is a list of PIL images."""

    text: str = ""
    image: list[Any] | None = None


class BaseTool:
    """A tool with state per conversation.

    Args:
        config: the `config` mapping of the tool's YAML entry.
        tool_schema: its `tool_schema`; None when the class describes itself in `get_schema`.

    Attributes:
        config, tool_schema, name: as given; the name is the schema's function name.
    """

    repeatable: ClassVar[bool] = False
    """Whether a call may be made twice: then `limits.retries` may repeat one that failed."""
    pure: ClassVar[bool] = False
    """Whether the answer depends on the arguments and the row's kwargs alone: then `limits.cache` may keep it."""
    ends_conversation: ClassVar[bool] = False
    """Whether the conversation is over once `execute` has answered; an exception does not end it."""

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        self.config = config
        schema = tool_schema or self.get_schema()
        if schema is None:
            raise ConfigError(f"{type(self).__name__} has no tool_schema; give it in the YAML or override get_schema()")
        self.tool_schema = schema
        self.name = schema.function.name

    def get_schema(self) -> ToolSchema | None:
        """The schema of a class that describes itself."""
        return None

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        """Begin a conversation; `kwargs` are the row's `tools_kwargs[name]["create_kwargs"]`. Runs at most once."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> ToolResponse | tuple[ToolResponse, float, dict[str, Any]]:
        """Answer one call.

        Args:
            instance_id: the conversation.
            parameters: the arguments, already checked against the schema.
            kwargs: the row's `execute_kwargs`.

        Returns:
            The response; or the response, a step reward and metrics.
            An exception becomes a short error message for the model.
        """
        raise NotImplementedError(f"{type(self).__name__} must define execute()")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The tool's reward for the whole conversation, asked once at its end."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End the conversation: give back what `create` took. Runs exactly once for every `create` that began."""

    async def aclose(self) -> None:
        """Close what all conversations share, a connection for example; called once when the worker ends."""


def is_foreign(tool: Any) -> bool:
    """Whether a tool was written for another loop than ours, whose habits it has."""
    return not isinstance(tool, BaseTool)

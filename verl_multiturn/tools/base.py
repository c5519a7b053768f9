"""`BaseTool`: the class that the author of a tool derives from.

    class Lookup(BaseTool):
        async def execute(self, instance_id, parameters, **kwargs):
            return ToolResponse(text=self.config["table"][parameters["key"]])

All conversations of a worker share one tool object. Keep the state of one conversation under its `instance_id`, from
`create` to `release`. The tools of verl itself (0.4 to 0.9) are accepted, too; they need not derive from this class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.schema import ToolSchema


@dataclass(frozen=True)
class ToolResponse:
    """A tool's answer to one call.

    Attributes:
        text: The text that the model reads.
        image: PIL images that the model sees, if it takes images; None for no image.
    """

    text: str = ""
    image: list[Any] | None = None


class BaseTool:
    """A tool, which may keep state for each conversation.

    Args:
        config: The `config` mapping of the tool's YAML entry.
        tool_schema: The `tool_schema` of the entry, or such a mapping; None when the class describes
            itself in `get_schema`.

    Attributes:
        config: As given.
        tool_schema: As given, or from `get_schema`, as a `ToolSchema`.
        name: The function name in the schema, by which the model calls the tool.

    Raises:
        ConfigError: There is no schema, neither given nor from `get_schema`, or it is wrong.
    """

    repeatable: ClassVar[bool] = False
    """True if a call may safely be made twice: then `limits.retries` may repeat a call that failed."""
    pure: ClassVar[bool] = False
    """True if the answer depends only on the arguments and the row's kwargs: then `limits.cache` may keep it."""
    ends_conversation: ClassVar[bool] = False
    """True if the conversation is over once `execute` has answered. An exception does not end it."""

    outage_limits: ClassVar[OutageLimits] = OutageLimits()
    """Rules for outages; `limits.outage` of the YAML entry goes before them.

    Example: `OutageLimits(timeouts="outage")`, where the time depends on a service alone, not on the model's text.
    """

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | Mapping[str, Any] | None = None) -> None:
        self.config = config
        name = type(self).__name__
        given, where = (tool_schema, "tool_schema") if tool_schema else (self.get_schema(), "get_schema()")
        if given is None:
            raise ConfigError(f"{name} has no tool_schema; give it in the YAML or override get_schema()")
        self.tool_schema = ToolSchema.of(given, f"{name}.{where}")
        self.name = self.tool_schema.function.name

    def get_schema(self) -> ToolSchema | Mapping[str, Any] | None:
        """Return the schema of a class that describes itself; None where the YAML entry has to give it.

        Example: `{"type": "function", "function": {"name": "count", "parameters": {"type": "object", …}}}`.
        """
        return None

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        """Begin a conversation. Runs at most once for each.

        Args:
            instance_id: Id of the conversation, the same for all four methods.
            kwargs: The row's `tools_kwargs[name]["create_kwargs"]`.
        """

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> ToolResponse | tuple[ToolResponse, float, dict[str, Any]]:
        """Answer one call.

        An exception becomes a short error message for the model. Raise `OutageError` where a service is not there: if
        that is an outage of the run, no model is shown it, and none is trained on it.

        Args:
            instance_id: Id of the conversation.
            parameters: The arguments, already checked against the schema.
            kwargs: The row's `tools_kwargs[name]["execute_kwargs"]`.

        Returns:
            The response; or the response, a step reward and metrics.
        """
        raise NotImplementedError(f"{type(self).__name__} must define execute()")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the tool's reward for the whole conversation; called once, at its end.

        Args:
            instance_id: Id of the conversation.
            kwargs: The row's `tools_kwargs[name]["calc_reward_kwargs"]`.
        """
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End a conversation and free the resources of `create`. Runs exactly once for every `create` that began.

        Args:
            instance_id: Id of the conversation.
            kwargs: The row's `tools_kwargs[name]["release_kwargs"]`.
        """

    async def aclose(self) -> None:
        """Close the resources that all conversations share, such as a connection; called once, when the worker ends."""


def is_foreign(tool: Any) -> bool:
    """Return whether a tool does not derive from `BaseTool`: it was written for another agent loop, such as verl's.

    Such a tool may return values that its loop accepts and ours refuses, for example a reward that is not a number.
    """
    return not isinstance(tool, BaseTool)

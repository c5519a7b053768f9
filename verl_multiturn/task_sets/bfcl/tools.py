"""BFCL's functions as tools. A call is made in the worlds of the conversation's dialogue, which `BfclUser` began.

    tools:
      - toolset: verl_multiturn.task_sets.bfcl.tools.bfcl_tools

Invariants:
- the model reads the package's own descriptions, without the form of the results;
- the arguments have to be a JSON object, and else only the world judges them, as in BFCL: a wrong or missing one has
  the words of Python's exception as its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import jsonschema_rs

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.errors import ToolContractError
from verl_multiturn.task_sets.bfcl.package import CLASSES, documents_of
from verl_multiturn.task_sets.bfcl.user import EPISODES
from verl_multiturn.tools.base import BaseTool, ToolResponse
from verl_multiturn.tools.schema import ToolSchema

_TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array", "bool": "boolean", "int": "integer"}


class _Described(ToolSchema):
    """A schema that the model reads, and that refuses no arguments."""

    @cached_property
    def _validator(self) -> jsonschema_rs.Draft202012Validator:
        return jsonschema_rs.Draft202012Validator({})


class BfclTool(BaseTool):
    """One function of BFCL's worlds.

    Args:
        config: Empty.
        tool_schema: The function's schema.
    """

    outage_limits = OutageLimits(mode="off")  # it answers in this process

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        """Make the call in the worlds of the conversation.

        Raises:
            ToolContractError: The conversation has no dialogue.
        """
        episode = EPISODES.get(instance_id)
        if episode is None:
            raise ToolContractError(
                f"tool {self.name!r}: the conversation has no dialogue of BFCL; give its row the interaction "
                "verl_multiturn.task_sets.bfcl.user.BfclUser"
            )
        return ToolResponse(episode.call(self.name, parameters))


def bfcl_tools(classes: Iterable[str] = CLASSES, descriptions: bool = True) -> list[BfclTool]:
    """Return the functions of BFCL's worlds as tools: all 128, or those of some classes.

    Args:
        classes: Names of the classes.
        descriptions: Whether the model reads the package's text on each function and argument, and not only their
            names and types. With them all 128 schemas have 67,000 characters, without 25,000.

    Raises:
        ConfigError: A class is not in the list, or the package is not installed.
    """
    documents = [document for name in classes for document in documents_of(name)]
    return [BfclTool({}, schema_of(document, descriptions)) for document in documents]


def schema_of(document: Mapping[str, Any], descriptions: bool = True) -> ToolSchema:
    """Return the schema of a function that the package describes."""
    function = {"name": document["name"], "parameters": _json(document["parameters"], descriptions)}
    if descriptions:
        function["description"] = document["description"]
    return _Described.read({"type": "function", "function": function}, f"BFCL's function {document['name']!r}")


def _json(schema: Any, descriptions: bool) -> Any:
    """Return a description of a value with the types of JSON Schema."""
    made = {key: schema[key] for key in ("required", "default") if key in schema}
    if descriptions and "description" in schema:
        made["description"] = schema["description"]
    if "type" in schema:
        made["type"] = _TYPES.get(schema["type"], schema["type"])
    if "properties" in schema:
        made["properties"] = {name: _json(value, descriptions) for name, value in schema["properties"].items()}
    if "items" in schema:
        made["items"] = _json(schema["items"], descriptions)
    return made

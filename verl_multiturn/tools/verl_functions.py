"""Functions decorated with verl 0.9's `@function_tool`, as tools.

verl's registry says what the model sees of such a function, and verl's rules what its return value means. Nothing here
imports verl: whoever decorated a function has.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

from verl_multiturn.tools.base import BaseTool, ToolResponse
from verl_multiturn.tools.schema import ToolSchema


class VerlFunctionTool(BaseTool):
    """A function of verl's registry; `verl_function_tool` derives a class for each, with the `execute` that fits it."""

    def __init__(self, schema: ToolSchema) -> None:
        super().__init__({}, schema)


def find_entry(function: Any) -> Any | None:
    """Return the entry of verl's registry for a decorated function; None where it is not decorated."""
    registry = getattr(sys.modules.get("verl.tools.function_tool"), "FUNCTION_TOOL_REGISTRY", {})
    return next((entry for entry in registry.values() if entry.fn is function), None)


def verl_function_tool(entry: Any, schema: ToolSchema | None = None) -> VerlFunctionTool:
    """Return the tool of an entry of verl's registry.

    Args:
        schema: by default the entry's own, whether verl derived it or the author gave it.

    Raises:
        ConfigError: its schema is none.
    """
    function: Callable[..., Any] = entry.fn
    if schema is None:
        raw = entry.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
        if entry.name != function.__name__:  # a name of the author's own; else a given schema's name holds
            raw["function"]["name"] = entry.name
        schema = ToolSchema.read(raw, f"@function_tool {entry.name!r}")

    async def asynchronous(self: BaseTool, instance_id: str, parameters: dict[str, Any]) -> Any:
        return read_return(await function(**parameters))

    def synchronous(self: BaseTool, instance_id: str, parameters: dict[str, Any]) -> Any:
        returned = function(**parameters)
        return _awaited(returned) if inspect.isawaitable(returned) else read_return(returned)

    execute: Any = asynchronous if inspect.iscoroutinefunction(function) else synchronous
    namespace = {"__doc__": function.__doc__, "__module__": function.__module__, "execute": execute}
    made: type[VerlFunctionTool] = type(function.__name__, (VerlFunctionTool,), namespace)
    return made(schema)


async def _awaited(returned: Any) -> Any:
    return read_return(await returned)


def read_return(returned: Any) -> Any:
    """Return what `execute` may return, by verl's rules: a tuple is (response,), (response, reward) or (response,
    reward, metrics), a dict is JSON, and everything else its `str`. A tuple of another length is left to be refused."""
    if not isinstance(returned, tuple):
        return _response(returned)
    if not 1 <= len(returned) <= 3:
        return returned
    response, reward, metrics = (*returned, None, None)[:3]
    with contextlib.suppress(TypeError, ValueError, OverflowError):  # the runtime names the tool that returned it
        reward = None if reward is None else float(reward)
    return _response(response), reward, metrics


def _response(value: Any) -> Any:
    if isinstance(value, str | ToolResponse) or (hasattr(value, "text") and hasattr(value, "image")):
        return value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)

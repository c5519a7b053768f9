"""Tools made from functions that are decorated with verl 0.9's `@function_tool`.

verl's registry gives the name and the schema of such a function; verl's rules give the meaning of its return value.
This module does not import verl: a module with a decorated function has imported it already.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

from verl_multiturn.calls.json_values import NoJsonError, json_value
from verl_multiturn.describe import show, without_addresses
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.base import BaseTool
from verl_multiturn.tools.loading.parameters import field_defaults
from verl_multiturn.tools.running.answers import UnreadableReturn, is_response
from verl_multiturn.tools.schema import ToolSchema


class VerlFunctionTool(BaseTool):
    """A tool made from a function of verl's registry.

    `verl_function_tool` derives a class of its own for each function, with its `execute`.

    Args:
        schema: The schema of the tool.
    """

    def __init__(self, schema: ToolSchema) -> None:
        super().__init__({}, schema)


def find_entry(function: Any) -> Any | None:
    """Return the entry of verl's registry for a function; None where the function is not decorated."""
    registry = getattr(sys.modules.get("verl.tools.function_tool"), "FUNCTION_TOOL_REGISTRY", {})
    return next((entry for entry in registry.values() if entry.fn is function), None)


def verl_function_tool(entry: Any, schema: ToolSchema | None = None) -> VerlFunctionTool:
    """Make a tool from an entry of verl's registry.

    Args:
        entry: The entry, as `find_entry` returns it.
        schema: The schema of the tool; None: the entry's own, which verl derived or the author gave.

    Raises:
        ConfigError: The entry's schema is wrong, or a default is a `Field`, which verl hands over as it is.
    """
    function: Callable[..., Any] = entry.fn
    if fields := list(field_defaults(list(inspect.signature(function).parameters.values()), {}).items()):
        raise ConfigError(
            f"@function_tool {entry.name!r}: parameter {fields[0][0]!r} has the default {show(fields[0][1], 100)}, "
            "which verl's decorator does not read; leave the decorator out, or give the value itself"
        )
    if schema is None:
        raw = entry.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
        if entry.name != function.__name__:  # the author gave a name; otherwise the schema's name holds
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
    """Return a function's return value in a form that `execute` may return, by verl's rules.

    A tuple is (response,), (response, reward) or (response, reward, metrics). As a response, a dict becomes JSON, and
    everything else but a text or a response becomes its `str`. A tuple of another length is returned unchanged, and the
    runtime refuses it.
    """
    if not isinstance(returned, tuple):
        return _response(returned)
    if not 1 <= len(returned) <= 3:
        return returned
    response, reward, metrics = (*returned, None, None)[:3]
    with contextlib.suppress(TypeError, ValueError, OverflowError):  # the runtime names the tool
        reward = None if reward is None else float(reward)
    return _response(response), reward, metrics


def _response(value: Any) -> Any:
    if is_response(value):
        return value
    if not isinstance(value, dict):
        return without_addresses(str(value))
    try:
        return json.dumps(json_value(value), ensure_ascii=False)
    except NoJsonError as error:
        return UnreadableReturn(f"the function returned what JSON cannot express: {error}; return plain types")

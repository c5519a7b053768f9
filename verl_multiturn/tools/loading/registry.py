"""Loading of tools from a YAML file.

Each entry of the file has one of six keys, which gives its kind:

- `tool`: a class or a typed function of an installed package, by its reference (`calls/loading/entry_points.py`);
- `class_name`: a class with the four methods of `BaseTool`, ours or verl's, with `config` and `tool_schema`;
- `function`: a typed function (`tools/loading/functions.py`);
- `toolset`: a function that returns many tools, with `config` for its arguments;
- `mcp`: an MCP server, which may have many tools (`tools/mcp_tools.py`);
- `a2a`: an agent, to which the model sends messages (`tools/a2a_tools.py`).

`class_name`, `function` and `toolset` take a dotted name, and a reference, too. An entry of any kind may also have
`limits` for the calls of its tools (`tools/loading/call_limits.py`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.calls.loading.dotted_names import resolve, resolve_class
from verl_multiturn.calls.loading.entry_points import is_reference
from verl_multiturn.calls.loading.list_file import ListFile, check_keys, construct
from verl_multiturn.describe import did_you_mean, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.base import BaseTool
from verl_multiturn.tools.loading.call_limits import attach_limits
from verl_multiturn.tools.loading.functions import function_tool
from verl_multiturn.tools.loading.verl_functions import find_entry, verl_function_tool
from verl_multiturn.tools.schema import ToolSchema

METHODS = ("create", "execute", "calc_reward", "release")
"""Names of the four methods of a tool."""
TOOL_FILE = ListFile(
    "tool_config_path",
    "tools",
    "give the path of a tool YAML, see tool_configs/",
    "tool name",
    "rename one of them, or give an MCP server a 'prefix'",
)
_GROUP = "tools"
# Allowed keys of an entry, by the key that gives its kind.
_ENTRY_KEYS = {
    "tool": {"tool", "config", "tool_schema", "limits"},
    "class_name": {"class_name", "config", "tool_schema", "limits"},
    "function": {"function", "tool_schema", "limits"},
    "toolset": {"toolset", "config", "limits"},
    "mcp": {"mcp", "limits"},
    "a2a": {"a2a", "limits"},
}
KINDS = tuple(_ENTRY_KEYS)
"""Keys of an entry of which each names code, a command or an address; an interaction has `class_name`."""


def load_tools(path: str | Path) -> dict[str, Any]:
    """Load the tools of a YAML file.

    Args:
        path: The path of the file.

    Returns:
        The tools by name, in the file's order: objects with the four methods of `BaseTool`, `name` and `tool_schema`.

    Raises:
        ConfigError: There is no such file, it is not YAML, a key is unknown, a class or function cannot be found, a
            schema is wrong, a tool cannot be built, or two tools have one name.
    """
    return TOOL_FILE.load(path, build_tools)


def build_tools(entry: Any, where: str) -> list[Any]:
    """Build the tools of one entry of a YAML file.

    Args:
        entry: The entry of the file.
        where: The place that errors name, for example `tools.yaml: tools[0]`.

    Raises:
        ConfigError: A key is unknown, a class or function cannot be found, a schema is wrong, or the tool cannot be
            built.
    """
    kinds = [kind for kind in _ENTRY_KEYS if isinstance(entry, Mapping) and kind in entry]
    if len(kinds) != 1:
        hint = "" if kinds or not isinstance(entry, Mapping) else _nearest(entry, _ENTRY_KEYS)
        raise ConfigError(f"{where}: expected a mapping with one of {list(_ENTRY_KEYS)}, got {entry!r:.200}{hint}")
    known = _ENTRY_KEYS[kinds[0]]
    check_keys(entry, known, where, f"beside {kinds[0]!r} known are {sorted(known - {kinds[0]})}")
    tools = _build_entry(entry, kinds[0], where)
    for tool in tools:
        if entry.get("limits") is not None:
            attach_limits(tool, entry["limits"], f"{where}.limits")
    return tools


def _nearest(keys: Iterable[Any], known: Iterable[str]) -> str:
    """Return which known key the first misspelt one was meant to be, as the end of a message; "" where none is near."""
    hints = ((key, did_you_mean(str(key), known)) for key in keys)
    return next((f"; {key!r}: {hint}" for key, hint in hints if hint), "")


def _build_entry(entry: Mapping[str, Any], kind: str, where: str) -> list[Any]:
    if kind == "mcp":
        from verl_multiturn.tools.mcp_tools import mcp_tools  # this import takes a second, and few runs need it

        return list(mcp_tools(entry["mcp"], f"{where}.mcp"))
    if kind == "a2a":
        from verl_multiturn.tools.a2a_tools import a2a_tools  # so does this one, and its package is an extra

        return list(a2a_tools(entry["a2a"], f"{where}.a2a"))
    if kind == "toolset":
        return _build_toolset(entry, where)
    if kind == "tool":
        return _build_named(entry, where)
    raw_schema = entry.get("tool_schema")
    schema = None
    if raw_schema is not None:
        schema = ToolSchema.read(raw_schema, f"{where}.tool_schema")
        schema.check_values(f"{where}.tool_schema")
    if kind == "function":
        return [_build_function(entry["function"], schema, where)]
    return [_build_tool(entry, schema, where)]


def _build_named(entry: Mapping[str, Any], where: str) -> list[Any]:
    """Return the tool of an installed package, whose class or function a reference names."""
    name = entry["tool"]
    if not is_reference(name):
        raise ConfigError(
            f"{where}.tool: expected a reference such as 'my-tools/lookup', got {name!r:.200}; write a dotted name "
            "under 'class_name' or 'function'"
        )
    is_class = isinstance(resolve(name, f"{where}.tool", _GROUP), type)
    if not is_class and entry.get("config") is not None:
        raise ConfigError(f"{where}.config: {name!r} is a function, which has no config; leave it out")
    rest = {key: value for key, value in entry.items() if key not in ("tool", *(() if is_class else ("config",)))}
    kind = "class_name" if is_class else "function"
    return _build_entry({kind: name, **rest}, kind, where)


def _build_function(name: Any, schema: ToolSchema | None, where: str) -> Any:
    function = resolve(name, f"{where}.function", _GROUP)
    if isinstance(function, type):
        raise ConfigError(f"{where}.function: {name!r} is a class; name it under 'class_name'")
    return _function_tool(function, schema, where)


def _function_tool(function: Any, schema: ToolSchema | None, where: str) -> Any:
    try:
        entry = find_entry(function)
        return function_tool(function, schema) if entry is None else verl_function_tool(entry, schema)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _build_toolset(entry: Mapping[str, Any], where: str) -> list[Any]:
    """Return the tools that an author's function returns, each checked as one of its own entry is."""
    name = entry["toolset"]
    function = resolve(name, f"{where}.toolset", _GROUP)
    if isinstance(function, type) or not callable(function):
        raise ConfigError(
            f"{where}.toolset: {name!r} is {show(function, 100)}; name a function that returns a list of tools"
        )
    listed = construct(entry, "toolset", where, lambda config: function(**config))
    if inspect.iscoroutine(listed):
        listed.close()  # else Python warns of it, at some later moment
    if not isinstance(listed, list | tuple) or not listed:
        raise ConfigError(
            f"{where}: {name} returned {show(listed, 100)}; expected a list of tools and typed functions, not empty"
        )
    return [listed_tool(each, f"{where}: {name}()[{index}]") for index, each in enumerate(listed)]


def listed_tool(listed: Any, where: str) -> Any:
    """Return an item of an author's list of tools as a tool: as it is, or made of a typed function.

    Args:
        listed: The item.
        where: The place that errors name.

    Raises:
        ConfigError: It is neither a tool nor a function, or not a complete one.
    """
    if isinstance(listed, type):
        raise ConfigError(f"{where}: {show(listed)} is a class; give a tool made of it")
    if inspect.isroutine(listed):
        return _function_tool(listed, None, where)
    if not hasattr(listed, "tool_schema"):
        raise ConfigError(f"{where}: expected a function or a tool, got {show(listed)}; derive its class from BaseTool")
    name = type(listed).__name__
    _check_methods(type(listed), name, where)
    _check_built(listed, name, where)
    return listed


def _build_tool(entry: Mapping[str, Any], schema: ToolSchema | None, where: str) -> Any:
    tool_class = resolve_class(entry["class_name"], f"{where}.class_name", _GROUP)
    _check_methods(tool_class, entry["class_name"], where)

    def make(config: dict[str, Any]) -> Any:
        if issubclass(tool_class, BaseTool) and config.get("type") == "native":
            del config["type"]  # verl's loader demands this key; the settings of our tools do not know it
        return tool_class(config=config, tool_schema=schema)

    tool = construct(entry, "class_name", where, make)
    _check_built(tool, entry["class_name"], where)
    return tool


def _check_methods(tool_class: Any, class_name: str, where: str) -> None:
    """Refuse a class that lacks one of the four methods."""
    missing = [method for method in METHODS if not callable(getattr(tool_class, method, None))]
    if missing:
        raise ConfigError(f"{where}: {class_name!r} has no method {missing[0]!r}; derive it from BaseTool")


def _leaves_out_execute(tool_class: type) -> bool:
    """Return whether a class inherits `execute` from `BaseTool`, ours or verl's, and defines none of its own."""
    verls = getattr(sys.modules.get("verl.tools.base_tool"), "BaseTool", BaseTool)
    execute: Any = getattr(tool_class, "execute", None)
    return execute in (BaseTool.execute, verls.execute)


def _check_built(tool: Any, class_name: str, where: str) -> None:
    """Refuse a tool without `execute`, or without the `name` and `tool_schema` that `BaseTool.__init__` sets."""
    if not isinstance(getattr(tool, "name", None), str) or not hasattr(tool, "tool_schema"):
        raise ConfigError(
            f"{where}: {class_name!r} has no name or no tool_schema once it is made; "
            "call super().__init__(config, tool_schema) in its __init__"
        )
    try:
        schema_of(tool)
    except ConfigError as error:
        raise ConfigError(f"{where}: {class_name!r}: {error}") from None
    if _leaves_out_execute(type(tool)):
        raise ConfigError(
            f"{where}: {class_name!r} does not define execute(), so every call would fail or do nothing; define execute"
        )


def schema_of(tool: Any) -> ToolSchema:
    """Return a tool's schema as a `ToolSchema`, also where the tool has a mapping or an object of verl's schema class.

    Raises:
        ConfigError: The schema is none of these, or wrong.
    """
    return ToolSchema.of(tool.tool_schema, f"tool {tool.name!r}: tool_schema")

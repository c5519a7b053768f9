"""Tools from a YAML file: `class_name`, `config`, `tool_schema` for each."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.schema import ToolSchema

METHODS = ("create", "execute", "calc_reward", "release")
_ENTRY_KEYS = {"class_name", "config", "tool_schema"}


def load_tools(path: str | Path) -> dict[str, Any]:
    """The tools of a YAML file by name, in the file's order.

    Returns:
        Objects with the four methods of `BaseTool`, `name` and `tool_schema`.

    Raises:
        ConfigError: no such file, no YAML, an unknown key, a class that does not resolve, a schema that is none, or
            one name twice.
    """
    entries = _read_entries(Path(path))
    tools: dict[str, Any] = {}
    for index, entry in enumerate(entries):
        tool = _build_tool(entry, f"{path}: tools[{index}]")
        if tool.name in tools:
            raise ConfigError(f"{path}: tools[{index}]: the tool name {tool.name!r} is used twice; rename one of them")
        tools[tool.name] = tool
    return tools


def _read_entries(path: Path) -> list[Any]:
    if not path.is_file():
        raise ConfigError(f"tool_config_path {str(path)!r} is no file; give the path of a tool YAML, see tool_configs/")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"tool_config_path {str(path)!r} is no valid YAML: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("tools"), list) or not content["tools"]:
        raise ConfigError(f"{path}: expected a mapping with a non-empty list under 'tools', got {content!r:.200}")
    unknown = set(content) - {"tools"}
    if unknown:
        raise ConfigError(f"{path}: unknown key {sorted(unknown)[0]!r}; only 'tools' is known")
    return list(content["tools"])


def _build_tool(entry: Any, where: str) -> Any:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("class_name"), str):
        raise ConfigError(f"{where}: expected a mapping with 'class_name', got {entry!r:.200}")
    unknown = set(entry) - _ENTRY_KEYS
    if unknown:
        raise ConfigError(f"{where}: unknown key {sorted(unknown)[0]!r}; known are {sorted(_ENTRY_KEYS)}")
    tool_class = resolve_class(entry["class_name"], f"{where}.class_name")
    config = entry.get("config") or {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}.config: expected a mapping, got {config!r}")
    raw_schema = entry.get("tool_schema")
    schema = ToolSchema.read(raw_schema, f"{where}.tool_schema") if raw_schema is not None else None
    missing = [method for method in METHODS if not callable(getattr(tool_class, method, None))]
    if missing:
        raise ConfigError(f"{where}: {entry['class_name']!r} has no method {missing[0]!r}; derive it from BaseTool")
    try:
        return tool_class(config=dict(config), tool_schema=schema)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except Exception as error:  # an author's constructor may raise anything; it is named and ends the start-up
        raise ConfigError(
            f"{where}: {entry['class_name']}(config={dict(config)!r}) raised {type(error).__name__}: {error}"
        ) from error


def schema_of(tool: Any) -> ToolSchema:
    """A tool's schema, also of one that describes itself with verl's schema class."""
    schema = tool.tool_schema
    if isinstance(schema, ToolSchema):
        return schema
    return ToolSchema.read(schema.model_dump(exclude_unset=True, exclude_none=True), f"tool {tool.name!r}")


def resolve_class(name: str, where: str) -> Any:
    """The class of a dotted name.

    Raises:
        ConfigError: the module cannot be imported or has no such class.
    """
    module_name, _, class_name = name.rpartition(".")
    if not module_name:
        raise ConfigError(f"{where}: {name!r} is no dotted name; write it as 'package.module.Class'")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # an author's module may raise anything at import; it is named and ends the start-up
        raise ConfigError(
            f"{where}: cannot import {module_name!r} ({type(error).__name__}: {error}); install it or set PYTHONPATH"
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise ConfigError(f"{where}: {module_name!r} has no class {class_name!r}")
    return found

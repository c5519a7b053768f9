"""The tools of a run, from the YAML of `tool_config_path` and the functions of verl's `function_tool_path`."""

from __future__ import annotations

from typing import Any

from verl.tools.function_tool import load_function_tools_from_path
from verl.utils.import_utils import resolve_config_path

from verl_multiturn.describe import describe
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.loading.registry import load_tools
from verl_multiturn.tools.loading.verl_functions import verl_function_tool


def load_run_tools(tool_config_path: str | None, function_tool_path: str | None) -> dict[str, Any]:
    """Return the tools of a run by name, the tools of the YAML first.

    Args:
        tool_config_path: The tool YAML; None: no tools from a YAML.
        function_tool_path: A Python file whose functions are decorated with verl's `@function_tool`; None: no file.

    Raises:
        ConfigError: A file cannot be loaded, an entry is not a valid tool, or a name is used twice.
    """
    tools = load_tools(tool_config_path) if tool_config_path else {}
    if not function_tool_path:
        return tools
    where = f"rollout.multi_turn.function_tool_path={str(function_tool_path)!r}"
    try:
        entries = load_function_tools_from_path(resolve_config_path(function_tool_path))
    except (Exception, SystemExit) as error:  # the file is the author's code
        raise ConfigError(f"{where}: cannot be loaded ({describe(error)}); mend the file") from error
    if not entries:
        raise ConfigError(f"{where}: no function in it is decorated with @function_tool; decorate one")
    for entry in entries:
        tool = verl_function_tool(entry)
        if tool.name in tools:
            raise ConfigError(f"{where}: the tool name {tool.name!r} is used twice; rename one of them")
        tools[tool.name] = tool
    return tools

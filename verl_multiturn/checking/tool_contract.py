"""Contract tests, with which a tool's author finds mistakes before a run does.

    findings = check_tool(MyTool(config), arguments={"query": "tea"})
    assert not [finding for finding in findings if finding.verdict is Grade.PROBLEM]

The tests call the tool as the runtime does: on one event loop, with many conversations at once, and each of its methods
may be cancelled at any moment. The command line's `check-tool` prints the same findings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.calls.loading.dotted_names import resolve
from verl_multiturn.calls.loading.entry_points import is_reference
from verl_multiturn.checking.examination import CheckResult, Grade, run_examination
from verl_multiturn.checking.instruments import ExaminationWatch
from verl_multiturn.checking.other_rows import Kwargs, rows_of_data
from verl_multiturn.checking.tool_examination import ToolExamination
from verl_multiturn.checking.trial_calls import ProbeWorld, ToolProbe
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.base import BaseTool
from verl_multiturn.tools.loading.functions import function_tool
from verl_multiturn.tools.loading.registry import TOOL_FILE, build_tools, load_tools

__all__ = ["CheckResult", "Grade", "check_tool", "tools_to_check"]


def check_tool(
    tool: Any,
    arguments: Mapping[str, Any] | None = None,
    create_kwargs: Mapping[str, Any] | None = None,
    execute_kwargs: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    world: ProbeWorld | None = None,
    dataset: Path | None = None,
) -> list[CheckResult]:
    """Examine a tool; this takes seconds, and calls the tool some hundred times.

    Args:
        tool: An object with the four methods of `BaseTool`, or a function.
        arguments: Arguments of an example call; None: they are guessed from the schema.
        create_kwargs: The kwargs that a data row gives for `create`.
        execute_kwargs: The kwargs that a data row gives for `execute`.
        timeout_s: Seconds after which a call counts as hanging; None: the `limits.timeout_s` of its
            YAML entry, from 10 to 60.
        world: State that its conversations share with an interaction; None: nothing.
        dataset: A file of data rows. The tool gets the kwargs of the first row that has it, unless `create_kwargs` or
            `execute_kwargs` are given, and a second conversation those of a row that differs. None: kwargs that differ
            are made (`other_rows.py`).

    Returns:
        One finding for each check, in the order of the checks.

    Raises:
        ConfigError: It is not a tool, or cannot be called with these kwargs; its world does not begin; or no row of the
            data set has it.
    """
    if not hasattr(tool, "tool_schema"):
        tool = function_tool(tool)
    given = {"create_kwargs": create_kwargs, "execute_kwargs": execute_kwargs}
    kwargs: Kwargs = {method: value or {} for method, value in given.items()}
    other: Kwargs | None = None
    if dataset is not None:
        first, second = rows_of_data(dataset, tool.name)
        own = {method: value for method, value in given.items() if value is not None}
        kwargs, other = {**kwargs, **first, **own}, first if own and first != own else second
    probe = ToolProbe(tool, kwargs, timeout_s, world)

    def begin(watch: ExaminationWatch, temporary: Path) -> ToolExamination:
        return ToolExamination(probe, watch, temporary, arguments, other)

    return run_examination(begin, probe.end_s)


def tools_to_check(
    target: str, config: Mapping[str, Any] | None, tool_config: Path | None, name: str | None = None
) -> list[Any]:
    """Return the tools that a command line names.

    Args:
        target: A class or function as `package.module.name` or by its reference, `package/name`; or the path of a YAML
            file with tools.
        config: The `config` of a class, in place of its YAML entry's; None for the entry's, or an empty one.
        tool_config: A YAML file with entries of that class or function; None to build the tool without one.
        name: Name of the only tool wanted; None for all.

    Raises:
        ConfigError: There is no such tool, or it cannot be built.
    """
    tools = _named_tools(target, config, tool_config)
    if name is None:
        return tools
    chosen = [tool for tool in tools if tool.name == name]
    if not chosen:
        raise ConfigError(f"{target}: no tool {name!r}; known are {sorted(tool.name for tool in tools)}")
    return chosen


def _named_tools(target: str, config: Mapping[str, Any] | None, tool_config: Path | None) -> list[Any]:
    if target.endswith((".yaml", ".yml")):
        if config is not None or tool_config is not None:
            raise ConfigError(f"{target}: --config and --tool-config belong to a class; leave them out for a YAML")
        return list(load_tools(target).values())
    found = resolve(target, "check-tool", "tools")
    kind = "class_name" if isinstance(found, type) else "function"
    if config is not None and kind == "function":
        raise ConfigError(f"{target}: a function has no --config; leave it out")
    changed = {} if config is None else {"config": dict(config)}
    if tool_config is None:
        try:
            return build_tools({kind: target, **changed}, "check-tool")
        except ConfigError as error:
            if getattr(found, "get_schema", None) is not BaseTool.get_schema:
                raise
            raise ConfigError(
                f"{error}; check the tool with its entry: verl-multiturn check-tool TOOLS.yaml, or --tool-config "
                "TOOLS.yaml beside the class"
            ) from None
    entries = [
        (index, entry) for index, entry in enumerate(TOOL_FILE.entries(tool_config)) if _names(entry, kind, found)
    ]
    if not entries:
        raise ConfigError(f"{tool_config}: no entry names {target!r}; add one, or leave --tool-config out")
    return [
        tool for index, entry in entries for tool in build_tools({**entry, **changed}, f"{tool_config}: tools[{index}]")
    ]


def _names(entry: Any, kind: str, found: Any) -> bool:
    """Return whether a YAML entry names this class or function."""
    name = entry.get(kind, entry.get("tool")) if isinstance(entry, Mapping) else None
    if not isinstance(name, str) or (not is_reference(name) and name.rpartition(".")[2] != found.__name__):
        return False
    return resolve(name, "check-tool", "tools") is found

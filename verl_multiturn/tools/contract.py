"""Contract tests: what a tool's author can find out before a run does.

    findings = check_tool(MyTool(config), arguments={"query": "tea"})
    assert not [finding for finding in findings if finding.verdict is Verdict.PROBLEM]

The tool is called as the runtime calls it: it lives on one event loop with many conversations at once, and each of its
methods may be cancelled at any moment. The command line's `check-tool` prints the same findings.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.base import BaseTool
from verl_multiturn.tools.contract_advice import CLASS
from verl_multiturn.tools.contract_checks import AT_ONCE, Examination, Finding, Verdict
from verl_multiturn.tools.contract_probe import LATE_S, Probe, Watch, private_temporary_folder
from verl_multiturn.tools.functions import function_tool
from verl_multiturn.tools.registry import build_tools, load_tools, read_entries, resolve

__all__ = ["Finding", "Verdict", "check_tool", "examine", "tools_to_check"]

_CLOSING_S = 5.0


def check_tool(
    tool: Any,
    arguments: Mapping[str, Any] | None = None,
    create_kwargs: Mapping[str, Any] | None = None,
    execute_kwargs: Mapping[str, Any] | None = None,
    timeout_s: float = 10.0,
) -> list[Finding]:
    """Examine a tool; takes seconds, and calls it some hundred times.

    Args:
        tool: an object with the four methods of `BaseTool`, or a function.
        arguments: of an example call; by default they are guessed from the schema.
        create_kwargs, execute_kwargs: as a data row gives them.
        timeout_s: after which a call counts as hanging.

    Raises:
        ConfigError: it is no tool, or cannot be called with these kwargs.
    """
    if not hasattr(tool, "tool_schema"):
        tool = function_tool(tool)
    kwargs = {"create_kwargs": create_kwargs or {}, "execute_kwargs": execute_kwargs or {}}
    probe = Probe(tool, kwargs, timeout_s)
    watch = Watch()
    failures: list[BaseException] = []
    with private_temporary_folder() as temporary:
        examination = Examination(probe, watch, temporary, arguments)

        def run() -> None:
            try:
                asyncio.run(examination.run())
            except BaseException as error:  # handed over to the caller
                failures.append(error)

        # A thread of its own: the loop is watched from outside, and may never come back.
        thread = threading.Thread(target=run, daemon=True, name="check-tool")
        thread.start()
        while thread.is_alive() and not examination.done:
            thread.join(0.01)
            if watch.look() > timeout_s + AT_ONCE * LATE_S:
                found = f"blocked for ever by {watch.place}"
                examination.note("event loop", Verdict.PROBLEM, found, examination.advice["event loop"])
                break
        else:
            thread.join(_CLOSING_S)  # what ignores its cancellation keeps the loop from closing
    if failures:
        raise failures[0]
    return list(examination.findings)


def examine(tool: Any, **given: Any) -> list[Finding]:
    """As `check_tool`; a tool that cannot be called with these kwargs is a finding, too."""
    try:
        return check_tool(tool, **given)
    except ConfigError as error:
        return [Finding("row kwargs", Verdict.PROBLEM, str(error), CLASS["row kwargs"])]


def tools_to_check(
    target: str, config: Mapping[str, Any] | None, tool_config: Path | None, name: str | None = None
) -> list[Any]:
    """The tools that a command line names.

    Args:
        target: a class or function as package.module.name, or a YAML file with tools.
        config: of a class, in place of a YAML entry's.
        tool_config: a YAML file with an entry of that class or function.
        name: of one of the tools.

    Raises:
        ConfigError: there is no such tool.
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
            raise ConfigError(f"{target}: --config and --tool-config are of a class; leave them out beside a YAML")
        return list(load_tools(target).values())
    found = resolve(target, "check-tool")
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
    entries = [(index, entry) for index, entry in enumerate(read_entries(tool_config)) if _names(entry, kind, found)]
    if not entries:
        raise ConfigError(f"{tool_config}: no entry names {target!r}; add one, or leave --tool-config out")
    return [
        tool for index, entry in entries for tool in build_tools({**entry, **changed}, f"{tool_config}: tools[{index}]")
    ]


def _names(entry: Any, kind: str, found: Any) -> bool:
    """Whether an entry of a YAML is of this class or function."""
    name = entry.get(kind) if isinstance(entry, Mapping) else None
    if not isinstance(name, str) or name.rpartition(".")[2] != found.__name__:
        return False
    return resolve(name, "check-tool") is found

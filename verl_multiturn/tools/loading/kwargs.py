"""Tools and `tools_kwargs` of a data row: select the tools, read the kwargs, bind them to the methods of a tool.

The methods may have the signatures of our tools, of verl 0.4 or of verl 0.9.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Iterable, Mapping
from typing import Any

from verl_multiturn.chat.messages import plain
from verl_multiturn.describe import describe, did_you_mean, show, unbound
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.base import BaseTool
from verl_multiturn.tools.loading.registry import METHODS

SHOWN = "shown"
"""Key of a row's `tools_kwargs[name]`: False hides the tool from the model until the interaction shows it."""


def tools_of_row(
    row: Mapping[str, Any], tools: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the tools that a data row has, and the kwargs for their methods, after checking that the two fit.

    A row has all tools of the run. With `need_tools_kwargs` it has only the tools that its `tools_kwargs` name.
    `tool_selection` narrows them further. In a run without tools only the kwargs are read.

    Args:
        row: The row as verl's data set returns it; its `tools_kwargs` and `extra_info` are read.
        tools: All tools of the run, by name.
        where: The place that errors name, for example `data row 7`.

    Returns:
        The row's tools by name, and its kwargs as `read_tools_kwargs` returns them.

    Raises:
        ConfigError: The row names a tool that the run does not have, it selects no tool, or a method of a tool cannot
            be called with the row's kwargs.
    """
    extra_info = row.get("extra_info")
    if extra_info is None:
        extra_info = {}
    if not isinstance(extra_info, Mapping):
        raise ConfigError(f"{where}: extra_info must be a mapping, got {extra_info!r:.200}")
    given = read_tools_kwargs(_of_row(row), where)
    if not tools:
        return {}, given
    _check_names(given, tools, "tools_kwargs", where)
    chosen = dict(tools)
    if extra_info.get("need_tools_kwargs"):
        if not given:
            raise ConfigError(
                f"{where}: need_tools_kwargs is set, but tools_kwargs names no tool; name its tools there"
            )
        chosen = {name: tool for name, tool in chosen.items() if name in given}
    selection = _selection(extra_info.get("tool_selection"), where)
    if selection:
        _check_names(selection, tools, "tool_selection", where)
        chosen = {name: tool for name, tool in chosen.items() if name in selection}
    if not chosen:
        raise ConfigError(
            f"{where}: tool_selection {selection!r} and tools_kwargs {sorted(given)!r} leave the row no tool; name the "
            "same in both, or drop need_tools_kwargs"
        )
    for name, tool in chosen.items():
        for method in METHODS:
            bind_kwargs(tool, method, given.get(name, {}).get(f"{method}_kwargs", {}), where)
    return chosen, given


def _selection(raw: Any, where: str) -> list[str]:
    """Return `tool_selection` as a list; empty where the row selects nothing, which means all tools, as in verl."""
    names = list(raw) if isinstance(raw, Iterable) and not isinstance(raw, str | bytes | Mapping) else None
    if raw is not None and (names is None or not all(isinstance(name, str) for name in names)):
        raise ConfigError(f"{where}: tool_selection must be a list of tool names, got {raw!r:.200}")
    return names or []


def _check_names(names: Iterable[str], tools: Mapping[str, Any], key: str, where: str) -> None:
    for name in names:
        if name not in tools:
            hint = did_you_mean(name, tools) or f"known are {sorted(tools)}"
            raise ConfigError(f"{where}: {key} names {name!r}, which is no tool of the YAML; {hint}")


def _of_row(row: Mapping[str, Any]) -> Any:
    extra_info = row.get("extra_info")
    return row.get("tools_kwargs") or (extra_info.get("tools_kwargs") if isinstance(extra_info, Mapping) else None)


def kwargs_of_tool(row: Any, name: str, where: str) -> dict[str, Any] | None:
    """Return a data row's values for one tool, whatever other tools the run has; None where it does not have the tool.

    Args:
        row: As in `tools_of_row`.
        name: The tool's name.
        where: As in `tools_of_row`.

    Raises:
        ConfigError: The row is not a mapping, or its `tools_kwargs` or `tool_selection` are wrong.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: expected a mapping, got {show(row)}")
    given = read_tools_kwargs(_of_row(row), where)
    extra_info = row.get("extra_info")
    needs = isinstance(extra_info, Mapping) and extra_info.get("need_tools_kwargs")
    selection = _selection(extra_info.get("tool_selection") if isinstance(extra_info, Mapping) else None, where)
    if (needs and name not in given) or (selection and name not in selection):
        return None
    return {key: value for key, value in given.get(name, {}).items() if key != SHOWN}


def hidden_tools(tools_kwargs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names of the tools that the model is not shown until the interaction shows them.

    Args:
        tools_kwargs: A row's, as `read_tools_kwargs` returns them.
    """
    return [name for name, given in tools_kwargs.items() if given.get(SHOWN) is False]


def check_shown(row: Mapping[str, Any], where: str) -> None:
    """Refuse a data row without an interaction that hides a tool, since it could never be shown.

    Args:
        row: As in `tools_of_row`.
        where: As in `tools_of_row`.

    Raises:
        ConfigError: There is such a tool.
    """
    if hidden := hidden_tools(read_tools_kwargs(_of_row(row), where)):
        raise ConfigError(
            f"{where}: tools_kwargs[{hidden[0]!r}][{SHOWN!r}] is False, and the row has no interaction, which alone "
            "could show the tool; give the run one, or leave it out"
        )


def read_tools_kwargs(raw: Any, where: str) -> dict[str, dict[str, Any]]:
    """Return a row's `tools_kwargs` without keys whose value is None, at every depth (see `chat.messages.plain`).

    Parquet gives every row the keys of all rows, with None where a row has no value.

    Args:
        raw: The value in the row; None where there is none.
        where: The place that errors name, for example `data row 7`.

    Returns:
        The kwargs by tool and method, for example `{"search": {"create_kwargs": {"index": "wiki"}}}`. Beside them a
        tool may have `shown`: False hides it from the model until the interaction shows it.

    Raises:
        ConfigError: The value is not such a mapping, or names a method that tools do not have.
    """
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: tools_kwargs must map tool names to kwargs, got {raw!r:.200}")
    allowed = {SHOWN, *(f"{method}_kwargs" for method in METHODS)}
    tools: dict[str, dict[str, Any]] = {}
    for name, methods in raw.items():
        if methods is None:
            continue
        if not isinstance(methods, Mapping):
            raise ConfigError(f"{where}: tools_kwargs[{name!r}] must be a mapping, got {methods!r:.200}")
        unknown = {key for key, value in methods.items() if value is not None} - allowed
        if unknown:
            raise ConfigError(
                f"{where}: tools_kwargs[{name!r}] has the unknown key {sorted(unknown)[0]!r}; "
                f"known are {sorted(allowed)}"
            )
        for key, value in methods.items():
            if value is not None and not isinstance(value, bool if key == SHOWN else Mapping):
                kind = "True or False" if key == SHOWN else "a mapping"
                raise ConfigError(f"{where}: tools_kwargs[{name!r}][{key!r}] must be {kind}, got {value!r:.200}")
        tools[name] = {
            key: value if key == SHOWN else plain(value) for key, value in methods.items() if value is not None
        }
    return tools


def _signature(method: Any) -> inspect.Signature:
    function = getattr(method, "__func__", None)
    return inspect.signature(method) if function is None else _signature_of(function)


@functools.lru_cache(maxsize=256)
def _signature_of(function: Any) -> inspect.Signature:
    """Return the signature of a method without `self`; cached, since every conversation asks for it."""
    return inspect.signature(types.MethodType(function, object()))


def bind_kwargs(tool: Any, method: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the keyword arguments that a method of a tool is called with.

    verl 0.4's tools take a row's `create_kwargs` one by one. verl 0.9's tools take them as one argument
    `create_kwargs`. A method that takes both gets both. verl 0.9 also passes `agent_data` to `execute`; it is None
    until the call.

    Args:
        tool: The tool.
        method: The name of the method, for example `create`.
        given: The row's kwargs for this method.
        where: The place that errors name, for example `data row 7`.

    Raises:
        ConfigError: The method cannot be called with these kwargs.
    """
    signature = _signature(getattr(tool, method))
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    in_one_piece = "create_kwargs" in signature.parameters
    foreign = takes_any and not isinstance(tool, BaseTool)
    kwargs = {} if in_one_piece and not takes_any else dict(given)
    if method == "create" and (in_one_piece or foreign):
        kwargs["create_kwargs"] = dict(given)
    if method == "execute" and ("agent_data" in signature.parameters or foreign):
        kwargs.setdefault("agent_data", None)
    positional: list[Any] = ["id", {}] if method == "execute" else ["id"]
    if why := unbound(signature, positional, kwargs):
        raise ConfigError(
            f"{where}: tool {getattr(tool, 'name', tool)!r}: {method}{signature} cannot be called with "
            f"{method}_kwargs {show(dict(given))}: {why}; correct the row's tools_kwargs, or the method's parameters"
        )
    return kwargs


def copy_kwargs(kwargs: Mapping[str, Any], name: str, method: str, where: str) -> dict[str, Any]:
    """Return a deep copy of a method's keyword arguments, since the conversations of a group share those of their row.

    Args:
        kwargs: The keyword arguments.
        name: The tool's name, for errors.
        method: The method's name, for errors.
        where: The place that errors name, for example `data row 7`.

    Raises:
        ConfigError: A value cannot be copied.
    """
    try:
        return copy.deepcopy(dict(kwargs))
    except Exception as error:  # a row may hold any object, whose copy may raise anything
        raise ConfigError(
            f"{where}: tool {name!r}: {method}_kwargs cannot be copied for each conversation "
            f"({describe(error)}); hand over plain data"
        ) from None

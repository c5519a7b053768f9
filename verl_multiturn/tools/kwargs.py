"""A row's tools and `tools_kwargs`: selected, read, and bound to the methods of a tool, whichever signature it was
written with."""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import types
from collections.abc import Iterable, Mapping
from typing import Any

from verl_multiturn.describe import describe, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.base import BaseTool
from verl_multiturn.tools.registry import METHODS


def tools_of_row(
    row: Mapping[str, Any], tools: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], dict[str, dict[str, dict[str, Any]]]]:
    """The tools that a data row has, and its kwargs as `read_tools_kwargs` returns them; each has been seen to fit.

    A row has all tools of the run; with `need_tools_kwargs` those that its `tools_kwargs` name. `tool_selection`
    narrows them further. In a run without tools nothing is looked for.

    Args:
        row: `tools_kwargs` and `extra_info` as verl's data set hands them over.
        tools: all tools of the run.
        where: named in errors, for example `data row 7`.

    Raises:
        ConfigError: the row names a tool that is none, is left without one, or a tool cannot be called with its kwargs.
    """
    extra_info = row.get("extra_info")
    if extra_info is None:
        extra_info = {}
    if not isinstance(extra_info, Mapping):
        raise ConfigError(f"{where}: extra_info must be a mapping, got {extra_info!r:.200}")
    given = read_tools_kwargs(row.get("tools_kwargs") or extra_info.get("tools_kwargs"), where)
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
    """`tool_selection` as a list; empty where the row selects nothing, which verl takes for all."""
    names = list(raw) if isinstance(raw, Iterable) and not isinstance(raw, str | bytes | Mapping) else None
    if raw is not None and (names is None or not all(isinstance(name, str) for name in names)):
        raise ConfigError(f"{where}: tool_selection must be a list of tool names, got {raw!r:.200}")
    return names or []


def _check_names(names: Iterable[str], tools: Mapping[str, Any], key: str, where: str) -> None:
    for name in names:
        if name not in tools:
            near = difflib.get_close_matches(name, tools, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {sorted(tools)}"
            raise ConfigError(f"{where}: {key} names {name!r}, which is no tool of the YAML; {hint}")


def read_tools_kwargs(raw: Any, where: str) -> dict[str, dict[str, dict[str, Any]]]:
    """A row's `tools_kwargs` as `{tool: {"create_kwargs": {…}, …}}`.

    Keys whose value is None are left out: parquet gives every row the union of all rows' keys.

    Raises:
        ConfigError: it is no such mapping.
    """
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: tools_kwargs must map tool names to kwargs, got {raw!r:.200}")
    allowed = {f"{method}_kwargs" for method in METHODS}
    tools: dict[str, dict[str, dict[str, Any]]] = {}
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
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(f"{where}: tools_kwargs[{name!r}][{key!r}] must be a mapping, got {value!r:.200}")
        tools[name] = {
            key: {argument: given for argument, given in value.items() if given is not None}
            for key, value in methods.items()
            if value is not None
        }
    return tools


def _signature(method: Any) -> inspect.Signature:
    function = getattr(method, "__func__", None)
    return inspect.signature(method) if function is None else _signature_of(function)


@functools.lru_cache(maxsize=256)
def _signature_of(function: Any) -> inspect.Signature:
    """Of a method, as its caller sees it: bound, and looked at once and not for every conversation."""
    return inspect.signature(types.MethodType(function, object()))


def bind_kwargs(tool: Any, method: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keyword arguments that a tool's method is called with.

    verl 0.4 tools take a row's `create_kwargs` one by one, verl 0.9 tools in one piece as `create_kwargs`; a method
    that takes both gets both. verl 0.9 hands `agent_data` to `execute`; None stands for it until the call.

    Raises:
        ConfigError: the method cannot be called so.
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
    try:
        signature.bind(*positional, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{where}: tool {getattr(tool, 'name', tool)!r}: {method}{signature} cannot be called with "
            f"{method}_kwargs {show(dict(given))}: {error}; mend tools_kwargs in the data or the method"
        ) from None
    return kwargs


def copy_kwargs(kwargs: Mapping[str, Any], name: str, method: str, where: str) -> dict[str, Any]:
    """Copy a method's keyword arguments deeply: the rows of a group share what they hold.

    Raises:
        ConfigError: something in them cannot be copied.
    """
    try:
        return copy.deepcopy(dict(kwargs))
    except Exception as error:  # of whatever a row holds
        raise ConfigError(
            f"{where}: tool {name!r}: {method}_kwargs cannot be copied for each conversation "
            f"({describe(error)}); hand over plain data"
        ) from None

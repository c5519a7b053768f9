"""The options of a function of advantages, read against its signature before a run begins."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from verl_multiturn.describe import did_you_mean, show
from verl_multiturn.errors import ConfigError

OPTIONS = "custom.multiturn.advantage.options"
"""The setting that holds them."""
_PLACES = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_FORM = "write it as def advantages(group, *, option=default)"


def read_options(function: Callable[..., Any], options: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the options as the function gets them: those with an annotation are of its type.

    Args:
        function: The function, or an object that is called as one.
        options: The options by name, as YAML or a command line gives them.
        name: The function's name, for errors.

    Raises:
        ConfigError: The function takes no group, does not know an option, lacks one, or its type refuses the value.
    """
    try:
        # A decorator may take keywords that the function within it does not.
        parameters = list(inspect.signature(function, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):  # one that is not written in Python
        return dict(options)
    if not parameters or parameters[0].kind not in _PLACES:
        raise ConfigError(f"{name} takes no group; {_FORM}")
    group, *others = parameters
    if group.kind is group.VAR_POSITIONAL:
        others = [each for each in others if each.kind is not each.POSITIONAL_OR_KEYWORD]
    known = [each.name for each in others if each.kind in _NAMED]
    is_open = any(each.kind is each.VAR_KEYWORD for each in others)
    taken = group.name if group.kind is group.POSITIONAL_OR_KEYWORD else None
    for option in options:
        if option == taken or (option not in known and not is_open):
            hint = did_you_mean(str(option), known) or "correct the name, or leave it out"
            raise ConfigError(f"{OPTIONS}.{option}: {name} takes {', '.join(known) or 'no option'}; {hint}")
    for each in others:
        if each.default is each.empty and each.kind in (*_PLACES[:2], each.KEYWORD_ONLY) and each.name not in options:
            if each.kind is each.POSITIONAL_ONLY:
                raise ConfigError(f"{name} takes {each.name!r} by its place alone; {_FORM}")
            raise ConfigError(f"{name} needs the option {each.name!r}; set {OPTIONS}.{each.name}, or give it a default")
    types = _types(function)
    return {option: _typed(value, types, option, name) for option, value in options.items()}


def _types(function: Any) -> dict[str, Any]:
    called = function if inspect.isroutine(function) else getattr(type(function), "__call__", function)  # noqa: B004
    try:
        return typing.get_type_hints(called, include_extras=True)
    except Exception:  # annotations may name what is not there at run time
        return {}


def _typed(value: Any, types: Mapping[str, Any], option: str, name: str) -> Any:
    if option not in types or not isinstance(option, str):
        return value
    try:
        return TypeAdapter(types[option]).validate_python(value)
    except ValidationError as error:
        found = error.errors()[0]["msg"]
        raise ConfigError(f"{OPTIONS}.{option}={show(value)}: {name} refuses it: {found}; correct the value") from None
    except Exception:  # an annotation that pydantic cannot read says nothing about the value
        return value

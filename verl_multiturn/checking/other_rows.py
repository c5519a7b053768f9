"""Other rows for an examination: the rows of a conversation that runs beside the first one.

They come from a data set, or are made: a number becomes the next one, a text that is a number, too, another text gets
`-2` at its end, and so do the items of a list and the values of a mapping. A made row that the author's code refuses is
omitted.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.checking.data_rows import SUFFIXES
from verl_multiturn.errors import ConfigError
from verl_multiturn.rows.files import read_rows
from verl_multiturn.tools.loading.kwargs import kwargs_of_tool

Kwargs = Mapping[str, Mapping[str, Any]]
"""Kwargs of a row by method, for example `{"create_kwargs": {"goal": 3}}`."""
_MOST_MADE = 8
_OURS = frozenset(["instance_id", "create_kwargs", "agent_data", "self", "messages"])


def varied(value: Any) -> Any:
    """Return another value of the same form; the value itself where none is known.

    Example: `varied({"goal": 3, "words": ["a", "7"], "strict": True})` is
    `{"goal": 4, "words": ["a-2", "8"], "strict": True}`.

    Args:
        value: A value as JSON has it.
    """
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        try:
            return str(int(value) + 1)
        except ValueError:
            return f"{value}-2"
    if isinstance(value, Mapping):
        return {key: varied(item) for key, item in value.items()}
    return [varied(item) for item in value] if isinstance(value, list | tuple) else value


def made_kwargs(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield other kwargs of a method, made from those of a row: all of them changed, and then each alone.

    Args:
        given: The kwargs of a row.
    """
    others = {key: other for key, value in given.items() if (other := varied(value)) != value}
    if others:
        yield {**given, **others}
    if len(others) > 1:
        yield from ({**given, key: other} for key, other in others.items())


def defaults_of(method: Any) -> dict[str, Any]:
    """Return the defaults of an author's method that a row may replace: numbers and texts, by name.

    Args:
        method: The method.
    """
    parameters = inspect.signature(method).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.name not in _OURS
        and isinstance(parameter.default, int | float | str)
        and not isinstance(parameter.default, bool)
    }


def made_rows(tool: Any, kwargs: Kwargs) -> list[Kwargs]:
    """Return rows that differ from one in the values for a tool, made from its kwargs and from `create`'s defaults.

    Args:
        tool: The tool.
        kwargs: The row's kwargs for it.
    """
    create = {**defaults_of(tool.create), **kwargs.get("create_kwargs", {})}
    execute = kwargs.get("execute_kwargs", {})
    rows: list[Kwargs] = [
        {**kwargs, "create_kwargs": other_create, "execute_kwargs": other_execute}
        for other_create, other_execute in zip(made_kwargs(create), made_kwargs(execute), strict=False)
    ]
    rows += [{**kwargs, "create_kwargs": other} for other in made_kwargs(create)]
    rows += [{**kwargs, "execute_kwargs": other} for other in made_kwargs(execute)]
    return rows[:_MOST_MADE]


def rows_of_data(path: Path, name: str) -> tuple[Kwargs, Kwargs | None]:
    """Return the values of two rows of a data set for a tool: the first row that has it, and the next one that differs.

    Args:
        path: A `.parquet`, `.jsonl` or `.json` file.
        name: The tool's name.

    Returns:
        The kwargs of the two rows by method; None for the second where all rows give the same.

    Raises:
        ConfigError: The file cannot be read, a row's value is wrong, or no row has the tool.
    """
    first: Kwargs | None = None
    for index, row in enumerate(read_rows(path, SUFFIXES)):
        kwargs = kwargs_of_tool(row, name, f"{path}: row {index}")
        if first is None:
            first = kwargs
        elif kwargs is not None and kwargs != first:
            return first, kwargs
    if first is None:
        raise ConfigError(f"{str(path)!r}: no row has the tool {name!r}; name a data set with rows for it")
    return first, None

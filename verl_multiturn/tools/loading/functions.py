"""Function tools: a tool made from a typed function, synchronous or `async`.

    @tool(pure=True)
    def lookup(key: str, limit: int = 3, *, table: Annotated[str, FromRow]) -> list[str]:
        '''Return the entries of a table under a key.'''

The docstring describes the tool to the model, and its parameters in any of four styles (`docstrings.py`); annotations
and defaults may describe them, too (`parameters.py`). `returns.py` reads return values. The YAML names the
function: `- function: my_package.my_module.lookup`. The decorator is needed only for its options, and leaves the
function a function.

Invariants:
- the schema follows the signature and the docstring, and the function gets arguments of the annotated types;
- a parameter marked with `FromRow` is never shown to the model; its value comes from the row's `execute_kwargs`;
- a function that cannot be described fully is refused when it is loaded; the error names the parameter.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast, overload

from pydantic.fields import FieldInfo

from verl_multiturn.describe import describe, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.base import BaseTool
from verl_multiturn.tools.loading.docstrings import read_docstring
from verl_multiturn.tools.loading.model_schema import json_schema
from verl_multiturn.tools.loading.parameters import Parameters, field_defaults, fill_defaults, read_parameters
from verl_multiturn.tools.loading.returns import ReturnAnnotation, read_return
from verl_multiturn.tools.schema import ToolSchema

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS = "__multiturn_tool__"


class FromRow:
    """Mark of a parameter whose value comes from the data row, not from the model: `Annotated[str, FromRow]`."""


@dataclass(frozen=True)
class ToolOptions:
    """Options that `@tool` sets for a function.

    Attributes:
        name: Name of the tool; None for the function's name.
        description: Description of the tool for the model; None for the docstring up to its first section.
        pure: As in `BaseTool`.
        repeatable: As in `BaseTool`.
        ends_conversation: As in `BaseTool`.
    """

    name: str | None = None
    description: str | None = None
    pure: bool = False
    repeatable: bool = False
    ends_conversation: bool = False


@overload
def tool(function: Function, /) -> Function: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    pure: bool = False,
    repeatable: bool = False,
    ends_conversation: bool = False,
) -> Callable[[Function], Function]: ...


def tool(function: Any = None, /, **options: Any) -> Any:
    """Set options for a function that is used as a tool.

    Args:
        function: The function, where the decorator has no options (`@tool`).
        options: The fields of `ToolOptions`, as keywords: `name`, `description`, `pure`, `repeatable`,
            `ends_conversation`.

    Returns:
        The function itself; or a decorator, where options are given.
    """

    def mark(marked: Function) -> Function:
        setattr(marked, _OPTIONS, ToolOptions(**options))
        return marked

    return mark if function is None else mark(function)


class FunctionTool(BaseTool):
    """A tool made from a function. `function_tool` derives a class of its own for each function, with its `execute`.

    Args:
        schema: The schema of the tool.
        filled: The parameters that the model fills; None: the function gets the arguments as they come.
        defaults: The `Field`s in the place of the function's defaults, by parameter; those of `filled` may be omitted.
    """

    def __init__(self, schema: ToolSchema, filled: Parameters | None, defaults: Mapping[str, FieldInfo]) -> None:
        super().__init__({}, schema)
        self._filled = filled
        self._defaults = defaults

    def read_arguments(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments in the types that the function's annotations name.

        An argument that the call omits is omitted here, too, where the function has a default for it.

        Args:
            parameters: The arguments of the call, by name.

        Raises:
            ValueError: An argument does not fit its type; the text is for the model.
        """
        return dict(parameters) if self._filled is None else self._filled.read(parameters)

    def arguments(self, parameters: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
        """Return all keyword arguments of a call of the function.

        Args:
            parameters: The arguments of the call, by name.
            row: The data row's values for the parameters that are marked with `FromRow`.

        Raises:
            ValueError: As in `read_arguments`.
        """
        return fill_defaults(self._defaults, {**self.read_arguments(parameters), **row})


def function_tool(function: Callable[..., Any], schema: ToolSchema | None = None) -> FunctionTool:
    """Make a tool from a function.

    Args:
        function: The function.
        schema: The schema of the tool; None: it is derived from the signature and the docstring. A given schema is not
            compared with the function, and the arguments are passed as they come.

    Raises:
        ConfigError: It is not a function, its signature does not describe a call fully, or its return annotation is a
            text and a number, which would be no reward.
    """
    where = f"function {getattr(function, '__qualname__', function)}"
    if not inspect.isroutine(function):
        raise ConfigError(f"{where}: expected a function, got {show(function)}")
    options: ToolOptions = getattr(function, _OPTIONS, ToolOptions())
    parameters = list(inspect.signature(function).parameters.values())
    annotations = _annotations(function, where)
    returned = ReturnAnnotation.read(annotations.get("return"))
    if returned.is_pair_with_a_reward:
        raise ConfigError(
            f"{where}: returns {show(annotations['return'])}, which is JSON for the model and no reward; return "
            "(text, reward, {}), or a list if it is meant as JSON"
        )
    from_row = [parameter for parameter in parameters if _is_from_row(annotations.get(parameter.name))]
    taken = [parameter for parameter in parameters if parameter not in from_row]
    filled: Parameters | None = None
    if schema is None:
        summary, descriptions = read_docstring(function.__doc__ or "")
        filled = read_parameters(taken, annotations, descriptions, where)
        raw = {"description": options.description or summary, "parameters": json_schema(filled.model)}
        name = options.name or function.__name__
        schema = ToolSchema.read({"type": "function", "function": {"name": name, **raw}}, where)
    defaults = field_defaults(from_row if filled is not None else parameters, annotations)
    namespace = {
        "__doc__": function.__doc__,
        "__module__": function.__module__,
        "execute": _execute(function, from_row, defaults, returned, where),
        "pure": options.pure,
        "repeatable": options.repeatable,
        "ends_conversation": options.ends_conversation,
    }
    made: type[FunctionTool] = type(function.__name__, (FunctionTool,), namespace)
    return made(schema, filled, defaults)


def _annotations(function: Callable[..., Any], where: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # an annotation is the author's code, which may raise anything
        raise ConfigError(
            f"{where}: an annotation cannot be read: {describe(error)}; annotate with names of its module"
        ) from None


def _is_from_row(annotation: Any) -> bool:
    metadata = getattr(annotation, "__metadata__", ())
    return any(mark is FromRow or isinstance(mark, FromRow) for mark in metadata)


def _execute(
    function: Callable[..., Any],
    from_row: Sequence[inspect.Parameter],
    defaults: Mapping[str, FieldInfo],
    annotation: ReturnAnnotation,
    where: str,
) -> Callable[..., Any]:
    """Return the `execute` method for a function's class.

    A synchronous function has a synchronous `execute`, which the runtime calls in a thread.
    """
    taken = ("self", "instance_id", "parameters")
    for parameter in from_row:
        if parameter.name in taken:
            raise ConfigError(f"{where}: a parameter from the row cannot be named {parameter.name!r}; rename it")

    async def awaited(returned: Any) -> Any:
        return read_return(await returned, annotation)

    async def asynchronous(self: FunctionTool, instance_id: str, parameters: dict[str, Any], **row: Any) -> Any:
        return read_return(await function(**self.arguments(parameters, row)), annotation)

    def synchronous(self: FunctionTool, instance_id: str, parameters: dict[str, Any], **row: Any) -> Any:
        returned = function(**self.arguments(parameters, row))
        return awaited(returned) if inspect.isawaitable(returned) else read_return(returned, annotation)

    execute: Any = asynchronous if inspect.iscoroutinefunction(function) else synchronous
    execute.__name__ = execute.__qualname__ = function.__name__
    # With this signature `bind_kwargs` finds a row whose kwargs do not fit, before anything is called.
    first = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("self", "instance_id", "parameters")
    ]
    row = [_keyword(parameter, defaults.get(parameter.name)) for parameter in from_row]
    execute.__signature__ = inspect.Signature([*first, *row])
    return cast(Callable[..., Any], execute)


def _keyword(parameter: inspect.Parameter, default: FieldInfo | None) -> inspect.Parameter:
    """Return a parameter as a keyword of `execute`; one that a `Field` requires has no default there."""
    kind = inspect.Parameter.KEYWORD_ONLY
    if default is None:
        return parameter.replace(kind=kind)
    return parameter.replace(kind=kind, default=parameter.empty if default.is_required() else default)

"""Function tools: a tool made from a typed function, synchronous or `async`.

    @tool(pure=True)
    def lookup(key: str, limit: int = 3, *, table: Annotated[str, FromRow]) -> list[str]:
        '''Return the entries of a table under a key.'''

The docstring describes the tool to the model; its section `Args:`, in Google's style, describes the parameters
(docs/write/tools.md has an example). The YAML names the function: `- function: my_package.my_module.lookup`. The
decorator is needed only for its options, and leaves the function a function.

Invariants:
- the schema says what the signature and the docstring say, and the function gets arguments of the annotated types;
- a parameter marked with `FromRow` is never shown to the model; its value comes from the row's `execute_kwargs`;
- a function that cannot be described fully is refused when it is loaded; the error names the parameter.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast, overload

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind
from pydantic_core import to_json

from verl_multiturn.describe import describe, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.reward_numbers import is_number
from verl_multiturn.tools.base import BaseTool, ToolResponse
from verl_multiturn.tools.schema import ToolSchema

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS = "__multiturn_tool__"
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Warnings?|See Also):\s*$")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


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
        function: The function, where the decorator stands without options (`@tool`).
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
        arguments: The model that reads the arguments; None: the function gets them as they come.
        names: The function's parameter for each field of `arguments`.
    """

    def __init__(self, schema: ToolSchema, arguments: type[BaseModel] | None, names: Mapping[str, str]) -> None:
        super().__init__({}, schema)
        self._arguments = arguments
        self._names = names

    def read_arguments(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments in the types that the function's annotations name.

        An argument that the call leaves out is left out here, too: the function has a default for it.

        Args:
            parameters: The arguments of the call, by name.

        Raises:
            ValueError: An argument does not fit its type; the text is for the model.
        """
        if self._arguments is None:
            return dict(parameters)
        try:
            read = self._arguments.model_validate(parameters)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            path = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"argument {path!r}: {first['msg']}") from None
        return {self._names[key]: getattr(read, key) for key in read.model_fields_set}


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
    parameters = inspect.signature(function).parameters.values()
    annotations = _annotations(function, where)
    if _is_pair_with_a_reward(annotations.get("return")):
        raise ConfigError(
            f"{where}: returns {show(annotations['return'])}, which is JSON for the model and no reward; return "
            "(text, reward, {}), or a list if it is meant as JSON"
        )
    from_row = [parameter for parameter in parameters if _is_from_row(annotations.get(parameter.name))]
    arguments: type[BaseModel] | None = None
    names: dict[str, str] = {}
    if schema is None:
        taken = [parameter for parameter in parameters if parameter not in from_row]
        summary, descriptions = read_docstring(function.__doc__ or "")
        arguments, names = _model(taken, annotations, descriptions, where)
        raw = {"description": options.description or summary, "parameters": _json_schema(arguments)}
        name = options.name or function.__name__
        schema = ToolSchema.read({"type": "function", "function": {"name": name, **raw}}, where)
    namespace = {
        "__doc__": function.__doc__,
        "__module__": function.__module__,
        "execute": _execute(function, from_row, where),
        "pure": options.pure,
        "repeatable": options.repeatable,
        "ends_conversation": options.ends_conversation,
    }
    made: type[FunctionTool] = type(function.__name__, (FunctionTool,), namespace)
    return made(schema, arguments, names)


def _annotations(function: Callable[..., Any], where: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # an annotation is the author's code, which may raise anything
        raise ConfigError(
            f"{where}: an annotation cannot be read: {describe(error)}; annotate with names of its module"
        ) from None


def _is_pair_with_a_reward(returned: Any) -> bool:
    """Return whether an annotation is (text, number), which looks like a text with a reward and is treated as JSON."""
    parts = typing.get_args(returned)
    if typing.get_origin(returned) is not tuple or len(parts) != 2:
        return False
    return parts[0] in (str, ToolResponse) and bool({float, int} & {parts[1], *typing.get_args(parts[1])})


def _is_from_row(annotation: Any) -> bool:
    metadata = getattr(annotation, "__metadata__", ())
    return any(mark is FromRow or isinstance(mark, FromRow) for mark in metadata)


def _model(
    parameters: list[inspect.Parameter], annotations: Mapping[str, Any], descriptions: Mapping[str, str], where: str
) -> tuple[type[BaseModel], dict[str, str]]:
    """Return a model of the arguments, and the name of the parameter for each of its fields."""
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    for index, parameter in enumerate(parameters):
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"{where}: parameter {str(parameter)!r} has no name that a call could use; write out the parameters"
            )
        if name not in annotations:
            raise ConfigError(f"{where}: parameter {name!r} has no annotation; write its type, as in `{name}: str`")
        try:
            TypeAdapter(annotations[name]).json_schema(schema_generator=_SchemaGenerator)
        except Exception as error:  # pydantic and the author's own types may raise anything here
            raise ConfigError(
                f"{where}: parameter {name!r} is a {show(annotations[name])}, which JSON cannot express "
                f"({describe(error).splitlines()[0]}); take another type, or mark it with FromRow"
            ) from None
        # The fields have numbers for names, since a parameter may have a name that pydantic reserves.
        field: dict[str, Any] = {"alias": name}
        if name in descriptions:
            field["description"] = descriptions[name]
        if parameter.default is not parameter.empty:
            field["default"] = parameter.default
        fields[f"p{index}"] = (annotations[name], Field(**field))
        names[f"p{index}"] = name
    model = create_model("Arguments", __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields)
    return model, names


class _SchemaGenerator(GenerateJsonSchema):
    def emit_warning(self, kind: JsonSchemaWarningKind, detail: str) -> None:
        """Ignore the warning about a default that JSON cannot express: the schema leaves the default out."""


def _json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's JSON Schema, made as short as possible: chat templates put it into every prompt."""
    raw = model.model_json_schema(schema_generator=_SchemaGenerator)
    definitions = raw.pop("$defs", {})
    schema: dict[str, Any] = {"type": "object", "properties": {}} | _plain(raw, definitions)
    if '"$ref"' in to_json(schema).decode():  # left for types that contain themselves
        schema["$defs"] = {name: _plain(value, {}) for name, value in definitions.items()}
    return schema


def _plain(schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...] = ()) -> Any:
    """Return a schema without titles, in which each `$ref` is replaced by the definition that it names."""
    if isinstance(schema, list):
        return [_plain(item, definitions, within) for item in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if name in definitions and name not in within:
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        return _plain(definitions[name] | beside, definitions, (*within, name))
    plain: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            plain[key] = {field: _plain(of, definitions, within) for field, of in value.items()}
        elif key in ("default", "examples", "enum", "const"):
            plain[key] = value
        elif key not in ("title", "discriminator"):
            plain[key] = _plain(value, definitions, within)
    return plain


def _execute(function: Callable[..., Any], from_row: list[inspect.Parameter], where: str) -> Callable[..., Any]:
    """Return the `execute` method for a function's class.

    A synchronous function has a synchronous `execute`, which the runtime calls in a thread.
    """
    taken = ("self", "instance_id", "parameters")
    for parameter in from_row:
        if parameter.name in taken:
            raise ConfigError(f"{where}: a parameter from the row cannot be named {parameter.name!r}; rename it")

    async def awaited(returned: Any) -> Any:
        return render(await returned)

    async def asynchronous(self: FunctionTool, instance_id: str, parameters: dict[str, Any], **row: Any) -> Any:
        return render(await function(**self.read_arguments(parameters), **row))

    def synchronous(self: FunctionTool, instance_id: str, parameters: dict[str, Any], **row: Any) -> Any:
        returned = function(**self.read_arguments(parameters), **row)
        return awaited(returned) if inspect.isawaitable(returned) else render(returned)

    execute: Any = asynchronous if inspect.iscoroutinefunction(function) else synchronous
    execute.__name__ = execute.__qualname__ = function.__name__
    # With this signature `bind_kwargs` finds a row whose kwargs do not fit, before anything is called.
    first = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("self", "instance_id", "parameters")
    ]
    row = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in from_row]
    execute.__signature__ = inspect.Signature([*first, *row])
    return cast(Callable[..., Any], execute)


def render(returned: Any) -> Any:
    """Return a function's return value in a form that `execute` may return.

    A text, a response and (response, reward, metrics) stay as they are. Everything else becomes JSON.
    """
    if isinstance(returned, tuple) and len(returned) == 3:
        response, reward, metrics = returned
        if (reward is None or is_number(reward)) and isinstance(metrics, dict):
            return _text(response), reward, metrics
    return _text(returned)


def _text(value: Any) -> Any:
    if is_response(value):
        return value
    try:
        return to_json(value).decode()
    except (ValueError, RecursionError):
        return value  # the runtime refuses it, and names the tool


def is_response(value: Any) -> bool:
    """Return whether a value is a tool's answer as it is: text, our `ToolResponse`, or one of verl's shape."""
    return isinstance(value, str | ToolResponse) or (hasattr(value, "text") and hasattr(value, "image"))


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Read a docstring in Google's style.

    Args:
        text: The docstring.

    Returns:
        The text before the first section, and the description of each argument in the section `Args:`, by name.
    """
    lines = inspect.cleandoc(text).splitlines()
    first = next((index for index, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    summary = "\n".join(lines[:first]).strip()
    arguments: dict[str, str] = {}
    in_arguments, indent, current = False, 0, ""
    for line in lines[first:]:
        if line.strip() and not line[0].isspace():
            in_arguments, indent = line.startswith(("Args", "Arguments", "Parameters")), 0
            continue
        if not in_arguments or not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = indent or depth
        found = _ARGUMENT.match(line.strip()) if depth == indent else None
        if found:
            current = found[1]
            arguments[current] = found[2]
        elif current:
            arguments[current] = f"{arguments[current]} {line.strip()}".strip()
    return summary, arguments

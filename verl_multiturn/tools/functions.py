"""Function tools: a typed function, synchronous or not, as a tool.

    @tool(pure=True)
    def lookup(key: str, limit: int = 3, *, table: Annotated[str, FromRow]) -> list[str]:
        '''What a table says under a key.

        Args:
            key: The key, for example `colour`.
            limit: At most so many entries.
        '''

The YAML names it: `- function: my_package.my_module.lookup`. The decorator is needed for its options only; the
function stays a function.

Invariants:
- the schema is what the signature and the docstring say, and the arguments arrive in the annotated types;
- what is marked with `FromRow` is never seen by the model, and comes from the row's `execute_kwargs`;
- a function that cannot be described fully is refused when it is loaded, by the name of the parameter.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar, cast, overload

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind
from pydantic_core import to_json

from verl_multiturn.describe import describe, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.base import BaseTool, ToolResponse
from verl_multiturn.tools.schema import ToolSchema

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS = "__multiturn_tool__"
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Warnings?|See Also):\s*$")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class FromRow:
    """Marks a parameter that the data row fills, not the model: `Annotated[str, FromRow]`."""


@dataclass(frozen=True)
class ToolOptions:
    """What `@tool` says of a function; the last three mean the same as the attributes of `BaseTool`."""

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
    """Mark a function as a tool.

    Args:
        name: what the model calls it; by default the function's name.
        description: what the model reads of it; by default the docstring up to its first section.
        pure, repeatable, ends_conversation: as in `BaseTool`.
    """

    def mark(marked: Function) -> Function:
        setattr(marked, _OPTIONS, ToolOptions(**options))
        return marked

    return mark if function is None else mark(function)


class FunctionTool(BaseTool):
    """A function as a tool; `function_tool` derives a class for each, with the `execute` that fits it."""

    def __init__(self, schema: ToolSchema, arguments: type[BaseModel] | None, names: Mapping[str, str]) -> None:
        super().__init__({}, schema)
        self._arguments = arguments
        self._names = names

    def read_arguments(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The model's arguments in the function's types; what it left out is left to the function.

        Raises:
            ValueError: they do not fit; the text is for the model.
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
    """A function as a tool.

    Args:
        schema: by default it is derived; a given one is believed, and the arguments are passed as they come.

    Raises:
        ConfigError: its signature does not say what a call takes.
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
    except Exception as error:  # an annotation is an expression of the author's
        raise ConfigError(
            f"{where}: an annotation cannot be read: {describe(error)}; annotate with names of its module"
        ) from None


def _is_pair_with_a_reward(returned: Any) -> bool:
    """Whether a function says that it returns (text, number), which reads as a reward and would be none."""
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
    """A model of the arguments, and the parameter behind each of its fields."""
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
        except Exception as error:  # pydantic, and the author's own types, raise many things here
            raise ConfigError(
                f"{where}: parameter {name!r} is a {show(annotations[name])}, which JSON cannot express "
                f"({describe(error).splitlines()[0]}); take another type, or mark it with FromRow"
            ) from None
        # Fields are numbered, since a parameter may have a name that pydantic keeps for itself.
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
        """A default that JSON cannot express is left out of the schema, and that is all."""


def _json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """A model's schema, as short as it can be: chat templates put it into every prompt."""
    raw = model.model_json_schema(schema_generator=_SchemaGenerator)
    definitions = raw.pop("$defs", {})
    schema: dict[str, Any] = {"type": "object", "properties": {}} | _plain(raw, definitions)
    if '"$ref"' in to_json(schema).decode():  # of types that contain themselves
        schema["$defs"] = {name: _plain(value, {}) for name, value in definitions.items()}
    return schema


def _plain(schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...] = ()) -> Any:
    """A schema without titles, with its definitions put in their places."""
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
    """The `execute` of a function's class; a synchronous function has a synchronous one, which the runtime puts into a
    thread."""
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
    # A row whose kwargs do not fit is found by `bind_kwargs`, before anything is called.
    first = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("self", "instance_id", "parameters")
    ]
    row = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in from_row]
    execute.__signature__ = inspect.Signature([*first, *row])
    return cast(Callable[..., Any], execute)


def render(returned: Any) -> Any:
    """What a function returned as `execute` may return it: text, responses and (response, reward, metrics) as they
    are, everything else as JSON."""
    if isinstance(returned, tuple) and len(returned) == 3:
        response, reward, metrics = returned
        if isinstance(reward, Real | None) and isinstance(metrics, dict):
            return _text(response), reward, metrics
    return _text(returned)


def _text(value: Any) -> Any:
    if isinstance(value, str | ToolResponse) or (hasattr(value, "text") and hasattr(value, "image")):
        return value
    try:
        return to_json(value).decode()
    except (ValueError, RecursionError):
        return value  # the runtime names the tool that returned it


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description of a docstring in Google's style, up to its first section, and what its `Args:` says of each."""
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

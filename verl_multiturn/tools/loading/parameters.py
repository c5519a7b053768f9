"""Parameters of a typed function: their form for the model, and the function's values.

A description is in pydantic's `Field(description=…)`, in the annotation as a text or a `Doc`, or in the docstring;
the first of them counts. A `Field` may be in the annotation (`Annotated[int, Field(ge=1)] = 10`) or be the default
(`x: int = Field(10, ge=1)`), as in FastMCP and LlamaIndex.

Invariants:
- the content of a `Field` is in the schema, and the function never gets a `Field`, but the default that it names;
- a default is a value that a call may pass, or it is refused by name: it has the parameter's type and a form in JSON.
"""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo

from verl_multiturn.calls.json_values import NoJsonError, json_value
from verl_multiturn.describe import describe, show, without_addresses
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.loading.model_schema import SchemaGenerator

_ANNOTATED: Any = Annotated
_UNION: Any = Union
"""The forms of `typing`, as values: their content is known when they run."""


@dataclass(frozen=True)
class Parameters:
    """Parameters that the model fills, as `read_parameters` returns them.

    Attributes:
        model: The model that reads the arguments; its fields have numbers for names.
        names: The function's parameter for each field.
        given: Fields whose default the function does not have itself, because a `Field` names it.
    """

    model: type[BaseModel]
    names: Mapping[str, str]
    given: frozenset[str]

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments in the types that the annotations name, by parameter.

        An argument that the call leaves out is omitted here, too, where the function has a default for it.

        Args:
            arguments: The arguments of the call, by the names that the model is shown.

        Raises:
            ValueError: An argument does not fit its type; the text is for the model.
        """
        try:
            read = self.model.model_validate(arguments)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            path = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"argument {path!r}: {without_addresses(first['msg'])}") from None
        values = vars(read)  # `getattr` would warn of a field that is deprecated
        return {name: values[key] for key, name in self.names.items() if key in read.model_fields_set | self.given}


def field_defaults(parameters: Sequence[inspect.Parameter], annotations: Mapping[str, Any]) -> dict[str, FieldInfo]:
    """Return the `Field` that is the default of a parameter, or of its annotation, for each that has one.

    Args:
        parameters: Parameters of a function.
        annotations: Their annotations, by name.
    """
    found: dict[str, FieldInfo] = {}
    for parameter in parameters:
        if isinstance(parameter.default, FieldInfo):
            found[parameter.name] = parameter.default
        elif parameter.default is parameter.empty:
            in_annotation = [
                mark
                for mark in getattr(annotations.get(parameter.name), "__metadata__", ())
                if isinstance(mark, FieldInfo) and not mark.is_required()
            ]
            if in_annotation:
                found[parameter.name] = in_annotation[-1]
    return found


def fill_defaults(fields: Mapping[str, FieldInfo], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with the defaults of the `Field`s that they leave out.

    Args:
        fields: The fields, by parameter.
        arguments: The arguments, by parameter.

    Raises:
        ValueError: An argument that a `Field` requires is not there; the text is for the model.
    """
    missing = {name: field for name, field in fields.items() if name not in arguments}
    if required := [name for name, field in missing.items() if field.is_required()]:
        raise ValueError(f"argument {required[0]!r} is required")
    return {**arguments, **{name: field.get_default(call_default_factory=True) for name, field in missing.items()}}


def read_parameters(
    parameters: Sequence[inspect.Parameter],
    annotations: Mapping[str, Any],
    descriptions: Mapping[str, str],
    where: str,
) -> Parameters:
    """Read the parameters that the model fills.

    Args:
        parameters: The parameters.
        annotations: Their annotations, by name.
        descriptions: Their descriptions in the docstring, by name.
        where: The function, for errors.

    Raises:
        ConfigError: A parameter cannot be described fully: it has no name or annotation, JSON cannot express its type,
            or its default is none that a call could pass.
    """
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    given: set[str] = set()
    aliases: dict[str, str] = {}
    for index, parameter in enumerate(parameters):
        name, key = parameter.name, f"p{index}"  # since a parameter may have a name that pydantic reserves
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"{where}: parameter {str(parameter)!r} has no name that a call could use; write out the parameters"
            )
        if name not in annotations:
            raise ConfigError(f"{where}: parameter {name!r} has no annotation; write its type, as in `{name}: str`")
        read = _Parameter(parameter, annotations[name], descriptions.get(name, ""), f"{where}: parameter {name!r}")
        if (other := aliases.setdefault(read.alias, name)) != name:
            raise ConfigError(f"{where}: parameters {other!r} and {name!r} are both {read.alias!r}; rename one")
        names[key], fields[key] = name, read.field()
        if read.is_given:
            given.add(key)
    model = create_model("Arguments", __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields)
    return Parameters(model, names, frozenset(given))


class _Parameter:
    """A parameter as its annotation, its default and the docstring describe it.

    Args:
        parameter: The parameter.
        annotation: Its annotation.
        described: Its description in the docstring.
        where: Its name in errors.

    Attributes:
        alias: The name that the model is shown.
        is_given: Whether a `Field` names the default, so that the function has none itself.

    Raises:
        ConfigError: JSON cannot express the type, a call could not pass the default, or the alias is not text.
    """

    def __init__(self, parameter: inspect.Parameter, annotation: Any, described: str, where: str) -> None:
        self._where = where
        self._type, marks = _parts(_with_descriptions(annotation))
        self._default = parameter.default
        if isinstance(parameter.default, FieldInfo):
            marks, self._default = [*marks, parameter.default], parameter.empty
        field = FieldInfo.from_annotation(_ANNOTATED[self._type, *marks, Field()])
        self.is_given = self._default is parameter.empty and not field.is_required()
        if self.is_given and field.default_factory is None:
            self._default = field.default
        self._check_type(annotation)
        if self._default is not parameter.empty:
            self._check_default()
            if field.validate_default and not _takes(_ANNOTATED[self._type, *marks], self._default):
                raise ConfigError(
                    f"{where} has the default {show(self._default, 100)}, which its own Field refuses; mend one of them"
                )
        self.alias = self._alias(field, parameter.name)
        said = field.description or _said(marks) or described or None
        self._marks = [*marks, Field(alias=self.alias, validation_alias=self.alias, description=said)]

    def field(self) -> Any:
        """Return the field for `create_model`."""
        annotation = _ANNOTATED[self._type, *self._marks]
        return annotation if self._default is inspect.Parameter.empty else (annotation, self._default)

    def _check_type(self, annotation: Any) -> None:
        if self._default is None and not _takes(self._type, None):
            self._type = _UNION[self._type, None]  # `x: str = None`
        try:
            TypeAdapter(self._type).json_schema(schema_generator=SchemaGenerator)
        except Exception as error:  # pydantic and the author's own types may raise anything here
            raise ConfigError(
                f"{self._where} is a {show(annotation)}, which JSON cannot express "
                f"({describe(error).splitlines()[0]}); take another type, or mark it with FromRow"
            ) from None

    def _check_default(self) -> None:
        has = f"{self._where} has the default {show(self._default, 100)}"
        remedy = "give a value of its type, None, or pydantic's Field"
        if not _takes(self._type, self._default):
            kind = inspect.formatannotation(self._type)[:100]
            raise ConfigError(f"{has}, which is no {kind}, so that no call could pass it; {remedy}")
        if isinstance(self._default, float) and not math.isfinite(self._default):
            raise ConfigError(f"{has}, which JSON cannot express; {remedy}")
        try:
            TypeAdapter(self._type).dump_python(self._default, mode="json", warnings=False)
        except Exception:  # the author's own serializers may raise anything
            try:
                json_value(self._default)
            except NoJsonError:
                raise ConfigError(f"{has}, which JSON cannot express; {remedy}") from None

    def _alias(self, field: FieldInfo, name: str) -> str:
        alias = field.validation_alias or field.alias or name
        if not isinstance(alias, str):
            raise ConfigError(
                f"{self._where} has the alias {show(alias, 100)}; give a text, by which the model knows it"
            )
        if getattr(field, "default_factory_takes_validated_data", False):
            raise ConfigError(f"{self._where} has a default_factory with an argument; give one without")
        return alias


def _takes(kind: Any, value: Any) -> bool:
    """Return whether a value has a type, or becomes a value of it."""
    try:
        TypeAdapter(kind).validate_python(value)
    except Exception:  # pydantic and the author's own types may raise anything here
        return False
    return True


def _parts(annotation: Any) -> tuple[Any, list[Any]]:
    """Return the type in an annotation, and the marks beside it."""
    if hasattr(annotation, "__value__"):  # `type Key = Annotated[str, "The key."]`
        return _parts(annotation.__value__)
    if hasattr(annotation, "__metadata__"):
        kind, marks = _parts(annotation.__origin__)
        return kind, [*marks, *annotation.__metadata__]
    return annotation, []


def _said(marks: Sequence[Any]) -> str:
    """Return the texts, also of `Doc`s, among the marks of an annotation."""
    texts = [mark if isinstance(mark, str) else getattr(mark, "documentation", None) for mark in marks]
    return " ".join(text.strip() for text in texts if isinstance(text, str))


def _with_descriptions(annotation: Any) -> Any:
    """Return an annotation in whose parts pydantic finds the texts: `list[Annotated[str, "A word."]]`, for example."""
    kind, marks = _parts(annotation)
    inner, origin = typing.get_args(kind), typing.get_origin(kind)
    if inner and origin is not Literal:
        inside = tuple(_described(part) for part in inner)
        if any(new is not old for new, old in zip(inside, inner, strict=True)):
            is_union = origin in (Union, types.UnionType)
            kind = _UNION[inside] if is_union else origin[inside]
    return _ANNOTATED[kind, *marks] if marks else kind


def _described(part: Any) -> Any:
    """Return a part of an annotation with its texts as pydantic's description; the part itself where it has none."""
    if not hasattr(part, "__metadata__") and not typing.get_args(part):
        return part
    found = _with_descriptions(part)
    kind, marks = _parts(found)
    if not (said := _said(marks)):
        return part if found == part else found
    if any(isinstance(mark, FieldInfo) and mark.description for mark in marks):
        return found
    return _ANNOTATED[kind, *marks, Field(description=said)]

"""Parameters of typed functions as people write them."""

# ruff: noqa: B008, RUF013  # the test needs the style of these functions

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
from typing import Annotated, Any, Literal, NewType, Optional

import fastapi
import typer
from pydantic import BaseModel, Field
from pydantic.types import PositiveInt, StringConstraints
from typing_extensions import Doc, TypedDict

from tests.long.inputs.input_cases import Case, Right, accept, call, models, refuse, schema

City = NewType("City", str)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Query(BaseModel):
    text: str
    limit: int = Field(10, ge=1, description="How many.")


class Window(TypedDict):
    start: Annotated[int, Field(ge=0, description="First line.")]


def bounded(limit: int = Field(10, ge=1, le=50, description="How many.")) -> str:
    return repr(limit)


def required(limit: int = Field(..., description="How many.")) -> str:
    return repr(limit)


def bare_field(limit: int = Field()) -> str:
    return repr(limit)


def factory(words: list[str] = Field(default_factory=list)) -> str:
    words.append("x")
    return repr(words)


def aliased(limit: int = Field(5, alias="n")) -> str:
    return repr(limit)


def with_pattern(code: str = Field("A1", pattern="^[A-Z][0-9]$")) -> str:
    return repr(code)


def multiple(size: int = Field(8, multiple_of=8)) -> str:
    return repr(size)


def optional(limit: Optional[int] = Field(None, ge=1)) -> str:  # noqa: UP045
    return repr(limit)


def both(*, limit: Annotated[int, Field(ge=1)] = Field(3, le=9)) -> str:
    return repr(limit)


def annotated(limit: Annotated[int, Field(ge=1, description="How many.")] = 3) -> str:
    return repr(limit)


def literal(kind: Literal["exact", "fuzzy"] = Field("exact")) -> str:
    return repr(kind)


def from_fastapi(limit: int = fastapi.Query(10, ge=1)) -> str:
    return repr(limit)


def from_typer(limit: int = typer.Option(10)) -> str:
    return repr(limit)


def of_dataclasses(words: list[str] = dataclasses.field(default_factory=list)) -> str:
    return repr(words)


def depends(now: str = fastapi.Depends(str)) -> str:
    return repr(now)


async def waits(limit: int = Field(10, ge=1)) -> str:
    return repr(limit)


def none_text(name: str = None) -> str:
    return repr(name)


def coloured(colour: Colour = Colour.RED) -> str:
    return repr(colour)


def dated(day: datetime.date = datetime.date(2024, 5, 1)) -> str:
    return repr(day)


def nested(query: Query) -> str:
    return repr(query.limit)


def windowed(window: Window) -> str:
    return repr(window)


def lengths(name: Annotated[str, StringConstraints(min_length=2)] = "ab") -> str:
    return repr(name)


def positive(count: PositiveInt = 1) -> str:
    return repr(count)


def new_type(city: City = City("Bonn")) -> str:
    return repr(city)


def wrong_default(limit: int = Field("many")) -> str:
    return repr(limit)


def refuses_default(limit: int = Field(10, ge=20, validate_default=True)) -> str:
    return repr(limit)


def no_json_default(limit: Any = Field(object())) -> str:
    return repr(limit)


def says_text(key: Annotated[str, "The key."]) -> str:
    return key


def says_doc(key: Annotated[str, Doc("The key.")]) -> str:
    return key


def says_optional(key: Annotated[Optional[str], "The key."] = None) -> str:  # noqa: UP045
    return repr(key)


def says_field_default(key: str = Field("a", description="The key.")) -> str:
    return key


def says_google(key: str) -> str:
    """Look it up.

    Args:
        key: The key.
    """
    return key


def says_rest(key: str) -> str:
    """Look it up.

    :param key: The key.
    :type key: str
    :returns: What is there.
    """
    return key


def says_typed_rest(key: str) -> str:
    """Look it up.

    :param str key: The key.
    """
    return key


def says_numpy(key: str, deep: bool = False) -> str:
    """Look it up.

    Parameters
    ----------
    key : str
        The key.
    deep : bool, optional
        Whether to look below.

    Returns:
    -------
    str
        What is there.
    """
    return key


def says_epytext(key: str) -> str:
    """Look it up.

    @param key: The key.
    """
    return key


_BOUNDS = {"type": "integer", "default": 10, "minimum": 1, "maximum": 50, "description": "How many."}


def _answers(text: str) -> Right:
    return accept((text, 0.0))


def cases() -> list[Case]:
    """Return the inputs of this file."""
    described = [says_text, says_doc, says_optional, says_field_default, says_google, says_rest, says_typed_rest]
    described += [says_numpy, says_epytext]
    calls: list[tuple[Any, dict[str, Any], Right]] = [
        (bounded, {}, _answers("10")),
        (bounded, {"limit": 50}, _answers("50")),
        (bounded, {"limit": 0}, models("limit")),
        (bounded, {"limit": None}, models("limit")),
        (required, {}, models("limit")),
        (bare_field, {}, models("limit")),
        (factory, {}, _answers("['x']")),
        (factory, {"words": ["a"]}, _answers("['a', 'x']")),
        (aliased, {"n": 3}, _answers("3")),
        (aliased, {}, _answers("5")),
        (aliased, {"limit": 3}, models("limit")),
        (with_pattern, {}, _answers("'A1'")),
        (with_pattern, {"code": "a1"}, models("code")),
        (multiple, {"size": 12}, models("size")),
        (optional, {}, _answers("None")),
        (optional, {"limit": None}, _answers("None")),
        (optional, {"limit": 0}, models("limit")),
        (both, {}, _answers("3")),
        (both, {"limit": 0}, models("limit")),
        (both, {"limit": 10}, models("limit")),
        (annotated, {}, _answers("3")),
        (annotated, {"limit": 0}, models("limit")),
        (literal, {}, _answers("'exact'")),
        (literal, {"kind": "near"}, models("kind")),
        (from_fastapi, {}, _answers("10")),
        (from_fastapi, {"limit": 0}, models("limit")),
        (from_typer, {}, refuse("limit", "default")),
        (of_dataclasses, {}, refuse("words", "default")),
        (depends, {}, refuse("now", "default")),
        (waits, {}, _answers("10")),
        (waits, {"limit": 0}, models("limit")),
        (none_text, {}, _answers("None")),
        (none_text, {"name": None}, _answers("None")),
        (coloured, {}, _answers("<Colour.RED: 'red'>")),
        (coloured, {"colour": "blue"}, _answers("<Colour.BLUE: 'blue'>")),
        (dated, {}, _answers("datetime.date(2024, 5, 1)")),
        (dated, {"day": "2024-13-01"}, models("day")),
        (nested, {"query": {"text": "a"}}, _answers("10")),
        (nested, {"query": {"text": "a", "limit": 0}}, models("limit")),
        (windowed, {"window": {"start": -1}}, models("start")),
        (lengths, {"name": "a"}, models("name")),
        (positive, {"count": 0}, models("count")),
        (new_type, {}, _answers("'Bonn'")),
        (new_type, {"city": 3}, models("city")),
        (wrong_default, {}, refuse("limit", "'many'")),
        (refuses_default, {}, refuse("limit", "10")),
        (no_json_default, {}, refuse("limit", "default")),
        (functools.partial(bounded, limit=7), {}, refuse("expected a function")),
    ]
    return [
        Case("parameters", "Field as a default: the schema", schema(bounded, "properties", "limit"), accept(_BOUNDS)),
        Case("parameters", "Field(...): required", schema(required, "required"), accept(["limit"])),
        Case("parameters", "Field(): required", schema(bare_field, "required"), accept(["limit"])),
        Case("parameters", "alias in the schema", schema(aliased, "properties", "n", "default"), accept(5)),
        Case(
            "parameters",
            "Field of a model in a parameter",
            schema(nested, "properties", "query", "properties", "limit", "minimum"),
            accept(1),
        ),
        Case(
            "parameters",
            "NumPy, the second parameter",
            schema(says_numpy, "properties", "deep", "description"),
            accept("Whether to look below."),
        ),
        *(
            Case(
                "parameters",
                f"description, {each.__name__}",
                schema(each, "properties", "key", "description"),
                accept("The key."),
            )
            for each in described
        ),
        *(
            Case("parameters", f"{getattr(each, '__name__', 'partial')}({arguments})", call(each, arguments), right)
            for each, arguments, right in calls
        ),
    ]

"""Parameters of typed functions: `Field` as a default and in annotations, descriptions, defaults that are refused."""

# ruff: noqa: B008, RUF013  # the test needs the style of these functions

import dataclasses
import datetime
import enum
import functools
import math
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest
from annotated_types import Ge
from pydantic import AliasChoices, BaseModel, Field
from typing_extensions import Doc, TypeAliasType

from tests.conftest import make_schema
from tests.unit.tools.test_functions import call, parameters
from verl_multiturn import ConfigError, ToolSchema
from verl_multiturn.tools.loading.functions import FromRow, function_tool
from verl_multiturn.tools.loading.verl_functions import verl_function_tool
from verl_multiturn.tools.running.results import CallStatus

Key = TypeAliasType("Key", Annotated[str, "The key."])


class Colour(enum.Enum):
    RED = "red"


class Query(BaseModel):
    title: str = Field("a", title="The title", description="What to look for.")


def search(
    query: str = Field(description="What to look for."),
    limit: int = Field(default=10, ge=1, le=50),
    kind: str = Field("exact", pattern="^(exact|fuzzy)$", examples=["fuzzy"], title="The kind"),
    words: list[str] = Field(default_factory=list, max_length=2),
    language: str = Field(None, alias="lang"),
    either: int = Field(...),
    whatever: int = Field(),
) -> str:
    return repr((query, limit, kind, words, language, either, whatever))


def test_a_field_as_default_is_in_the_schema() -> None:
    assert parameters(search) == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for."},
            "limit": {"type": "integer", "default": 10, "minimum": 1, "maximum": 50},
            "kind": {
                "type": "string",
                "default": "exact",
                "pattern": "^(exact|fuzzy)$",
                "examples": ["fuzzy"],
                "title": "The kind",
            },
            "words": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
            "lang": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "either": {"type": "integer"},
            "whatever": {"type": "integer"},
        },
        "required": ["query", "either", "whatever"],
        "additionalProperties": False,
    }


async def test_the_function_gets_what_the_field_names() -> None:
    assert (await call(search, {"query": "a", "either": 1, "whatever": 2})).text == (
        "('a', 10, 'exact', [], None, 1, 2)"
    )
    given = {"query": "a", "limit": 3, "kind": "fuzzy", "words": ["x"], "lang": "en", "either": 1, "whatever": 2}
    assert (await call(search, given)).text == "('a', 3, 'fuzzy', ['x'], 'en', 1, 2)"
    for wrong in ({"limit": 0}, {"kind": "x"}, {"words": ["a", "b", "c"]}, {"language": "en"}):
        result = await call(search, {"query": "a", "either": 1, "whatever": 2, **wrong})
        assert result.status is CallStatus.BAD_ARGUMENTS, wrong
    assert (await call(search, {"query": "a", "either": 1})).status is CallStatus.BAD_ARGUMENTS


def test_a_default_that_its_own_field_refuses() -> None:
    def default(limit: int = Field(10, ge=20, validate_default=True)) -> None: ...

    def beside(limit: Annotated[int, Field(ge=20, validate_default=True)] = 10) -> None: ...

    def mark(limit: int = Field(-1, ge=0)) -> None: ...  # pydantic accepts it: it means that there is none

    for function in (default, beside):
        with pytest.raises(ConfigError, match=r"parameter 'limit' has the default 10, which its own Field refuses"):
            parameters(function)
    assert parameters(mark)["properties"]["limit"]["default"] == -1


async def test_each_call_has_a_default_of_its_own() -> None:
    def note(words: list[str] = Field(default_factory=list)) -> str:
        words.append("x")
        return repr(words)

    assert [(await call(note, {})).text for _ in range(2)] == ["['x']", "['x']"]


async def test_a_default_within_an_annotation_reaches_the_function() -> None:
    def take(limit: Annotated[int, Field(4, ge=1)], most: Annotated[int, Field(4)] = 5) -> str:
        return repr((limit, most))

    assert parameters(take)["properties"] == {
        "limit": {"type": "integer", "default": 4, "minimum": 1},
        "most": {"type": "integer", "default": 5},
    }
    assert (await call(take, {})).text == "(4, 5)"


def test_descriptions_in_annotations() -> None:
    def take(
        a: Annotated[str, "As a text."],
        b: Annotated[int, Doc("As a Doc."), Ge(1)],
        c: Annotated[str, Field(description="As a Field."), "No more."],
        d: Key,
        e: str,
        f: Annotated[int, "Before."] = Field(3, description="The default's."),
        g: list[Annotated[str, "An item."]] = [],  # noqa: B006  # never called
        h: Optional[Annotated[str, "Perhaps."]] = None,  # noqa: UP045  # the test needs this form
    ) -> None:
        """Take.

        :param a: not this one
        :param e: As a docstring.
        """

    found = parameters(take)["properties"]
    assert {name: found[name].get("description") for name in "abcdef"} == {
        "a": "As a text.",
        "b": "As a Doc.",
        "c": "As a Field.",
        "d": "The key.",
        "e": "As a docstring.",
        "f": "The default's.",
    }
    assert found["b"]["minimum"] == 1
    assert found["g"]["items"]["description"] == "An item."
    assert found["h"]["anyOf"][0]["description"] == "Perhaps."


def test_titles_are_those_of_the_author() -> None:
    def take(query: Query, again: Annotated[Query, Field(title="Again")]) -> None: ...

    found = parameters(take)["properties"]
    assert (found["query"].get("title"), found["again"].get("title")) == (None, "Again")
    assert found["query"]["properties"]["title"]["title"] == "The title"


def test_a_default_of_none_is_a_value_that_a_call_may_pass() -> None:
    def take(a: str = None, b: Annotated[str, Field(min_length=2, description="D.")] = None) -> None: ...  # type: ignore[assignment]

    assert parameters(take)["properties"] == {
        "a": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "b": {
            "anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}],
            "default": None,
            "description": "D.",
        },
    }


def test_defaults_of_honest_functions() -> None:
    def take(
        colour: Colour = "red",  # type: ignore[assignment]
        path: Path = Path("a"),
        day: datetime.date = datetime.date(2026, 1, 2),
        price: Decimal = Decimal("1.5"),
        words: list[str] = (),  # type: ignore[assignment]
        numbers: set[int] = frozenset([1]),  # type: ignore[assignment]
        share: float = 1,
        query: Query = Query(),
        *,
        anything: Any = None,
    ) -> None: ...

    assert {name: of["default"] for name, of in parameters(take)["properties"].items()} == {
        "colour": "red",
        "path": "a",
        "day": "2026-01-02",
        "price": "1.5",
        "words": [],
        "numbers": [1],
        "share": 1,
        "query": {"title": "a"},
        "anything": None,
    }


class Depends:
    """A default as a web framework or a command line has it."""

    def __repr__(self) -> str:
        return "Depends()"


def by_data(data: dict[str, Any]) -> int:
    return 3


@pytest.mark.parametrize(
    ("annotation", "default", "message"),
    [
        (int, dataclasses.field(default=3), "which is no int, so that no call could pass it"),
        (int, ..., "has the default Ellipsis, which is no int"),
        (int, Depends(), "has the default Depends(), which is no int"),
        (str, object(), "has the default <object object>, which is no str"),
        (Any, object(), "has the default <object object>, which JSON cannot express"),
        (Any, Depends(), "which JSON cannot express; give a value of its type, None, or pydantic's Field"),
        (float, math.inf, "has the default inf, which JSON cannot express"),
        (Literal["a"], "b", "has the default 'b', which is no Literal['a']"),
        (int, Field("x"), "has the default 'x', which is no int"),
        (int, Field(3, validation_alias=AliasChoices("a", "b")), "has the alias AliasChoices"),
        (int, Field(3, alias="other"), "parameters 'value' and 'other' are both 'other'; rename one"),
        (int, Field(default_factory=by_data), "has a default_factory with an argument"),
    ],
)
def test_a_default_that_no_call_could_pass_is_refused_by_name(annotation: Any, default: Any, message: str) -> None:
    def take(value: Any = default, other: int = 0) -> None: ...

    take.__annotations__["value"] = annotation
    with pytest.raises(ConfigError) as caught:
        function_tool(take)
    assert "'value'" in str(caught.value)
    assert message in str(caught.value)
    assert " at 0x" not in str(caught.value)


async def test_a_field_of_what_the_row_fills_in() -> None:
    def take(
        a: Annotated[dict[str, int], FromRow] = Field(default_factory=dict), b: Annotated[int, FromRow] = Field()
    ) -> str:
        return repr((a, b))

    assert (await call(take, {}, {"b": 1})).text == "({}, 1)"
    assert (await call(take, {}, {"a": {"x": 1}, "b": 1})).text == "({'x': 1}, 1)"
    with pytest.raises(ConfigError, match="missing a required"):
        await call(take, {})


async def test_beside_a_given_schema_a_field_is_still_the_default() -> None:
    def take(a: int = Field(3), b: int = Field()) -> str:
        return repr((a, b))

    raw = make_schema("take", a="integer", b="integer").as_dict()
    del raw["function"]["parameters"]["required"]
    schema = ToolSchema.read(raw, "test")
    assert (await call(take, {"b": 1}, schema=schema)).text == "(3, 1)"
    missing = await call(take, {"a": 1}, schema=schema)
    assert (missing.status, missing.text) == (CallStatus.ERROR, "Error: argument 'b' is required")


def test_a_function_of_verl_with_a_field_is_refused() -> None:
    class Entry:
        name, fn = "search", functools.partial(search)

    with pytest.raises(ConfigError, match=r"@function_tool 'search': parameter 'query' .* leave the decorator out"):
        verl_function_tool(Entry(), make_schema("search", query="string"))

"""Function tools: the schema from signature and docstring, conversion, results, values from the row, refusals."""

import datetime
import enum
import functools
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, Field

from tests.conftest import make_schema
from verl_multiturn import BaseTool, ConfigError, ToolContractError, ToolResponse, ToolSchema, load_tools, tool
from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.tools.loading.docstrings import read_docstring
from verl_multiturn.tools.loading.functions import FromRow, function_tool
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.results import CallResult, CallStatus
from verl_multiturn.tools.running.session import ToolSession


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0


class Query(BaseModel):
    title: str = Field(description="what to look for")


class Tree(BaseModel):
    children: list["Tree"] = []


def search(  # noqa: D417  # the docstring is data
    query: str,
    kind: Literal["exact", "fuzzy"] = "fuzzy",
    limit: int | None = None,
    *,
    weights: dict[str, float] | None = None,
) -> list[str]:
    """Search the shelf.

    Titles only.

    Args:
        query: What to look for,
            in any language.
        kind (str): How.

    Returns:
        titles: as they are printed
    """
    return [query, kind, str(limit), str(weights)]


async def call(
    function: Any, arguments: dict[str, Any], row: dict[str, Any] | None = None, schema: ToolSchema | None = None
) -> CallResult:
    """Make one call, as a conversation does."""
    made = function_tool(function, schema)
    kwargs = {made.name: {"execute_kwargs": row or {}}}
    async with ToolSession("r1", {made.name: made}, kwargs, Gates(Gate, 5.0), 8) as session:
        return (await session.execute([ToolCall(made.name, json.dumps(arguments), "c1")]))[0]


def parameters(function: Any) -> dict[str, Any]:
    return function_tool(function).tool_schema.function.parameters


def test_the_schema_is_what_signature_and_docstring_say() -> None:
    assert function_tool(search).tool_schema.as_dict() == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the shelf.\n\nTitles only.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for, in any language."},
                    "kind": {"type": "string", "enum": ["exact", "fuzzy"], "default": "fuzzy", "description": "How."},
                    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
                    "weights": {
                        "anyOf": [
                            {"type": "object", "additionalProperties": {"type": "number"}},
                            {"type": "null"},
                        ],
                        "default": None,
                    },
                },
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }


def test_types_of_ones_own_are_written_out_without_titles() -> None:
    def draw(points: list[Point], query: Query, colour: Colour = Colour.RED) -> None: ...

    assert parameters(draw)["properties"] == {
        "points": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
        "query": {
            "type": "object",
            "properties": {"title": {"type": "string", "description": "what to look for"}},
            "required": ["title"],
        },
        "colour": {"type": "string", "enum": ["red", "blue"], "default": "red"},
    }


def test_a_type_that_contains_itself_keeps_its_definition() -> None:
    def plant(tree: Tree) -> None: ...

    schema = function_tool(plant).tool_schema
    assert schema.read_arguments('{"tree": {"children": [{"children": []}]}}')[1] == ""
    assert "children.0" in schema.read_arguments('{"tree": {"children": [3]}}')[1]


async def test_arguments_arrive_in_the_annotated_types() -> None:
    seen: list[Any] = []

    def draw(
        points: list[Point],
        query: Query,
        when: datetime.date,
        path: Path,
        *,
        colour: Colour = Colour.RED,
        width: int = 3,
    ) -> str:
        seen.extend([points, query, when, path, colour, width])
        return "drawn"

    arguments = {
        "points": [{"x": 1}],
        "query": {"title": "T"},
        "when": "2026-11-21",
        "path": "a/b",
        "colour": "blue",
    }
    assert (await call(draw, arguments)).text == "drawn"
    assert seen == [[Point(1, 0)], Query(title="T"), datetime.date(2026, 11, 21), Path("a/b"), Colour.BLUE, 3]


async def test_what_the_model_gets_wrong_is_answered() -> None:
    def on(day: datetime.date, schema: int = 0, model_config: int = 0, _x: int = 0) -> str:
        return f"{day} {schema} {model_config} {_x}"

    assert (await call(on, {"day": "2026-11-21", "schema": 1, "model_config": 2, "_x": 3})).text == "2026-11-21 1 2 3"
    missing = await call(on, {})
    assert missing.status is CallStatus.BAD_ARGUMENTS
    assert "day" in missing.text
    unknown = await call(on, {"day": "2026-11-21", "night": 1})
    assert unknown.status is CallStatus.BAD_ARGUMENTS
    assert "night" in unknown.text
    # JSON Schema does not check the format of a date; the conversion does.
    wrong = await call(on, {"day": "tomorrow"})
    assert wrong.status is CallStatus.ERROR
    assert wrong.text.startswith("Error: argument 'day': Input should be a valid date")


@pytest.mark.parametrize(
    ("returned", "text", "reward", "metrics"),
    [
        ("plain", "plain", 0.0, {}),
        (ToolResponse("response"), "response", 0.0, {}),
        (("plain", -0.05, {"n": 1}), "plain", -0.05, {"n": 1}),
        (({"a": 1}, None, {}), '{"a":1}', 0.0, {}),
        ({"a": [1, 2.5, "µ"]}, '{"a":[1,2.5,"µ"]}', 0.0, {}),
        ((1, 2, 3), "[1,2,3]", 0.0, {}),
        ([Point(1)], '[{"x":1,"y":0}]', 0.0, {}),
        (Query(title="T"), '{"title":"T"}', 0.0, {}),
        (datetime.date(2026, 11, 21), '"2026-11-21"', 0.0, {}),
        (3, "3", 0.0, {}),
        (None, "null", 0.0, {}),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_what_a_function_may_return(
    returned: Any, text: str, reward: float, metrics: dict[str, Any], is_async: bool
) -> None:
    def plain() -> Any:
        return returned

    async def coroutine() -> Any:
        return returned

    result = await call(coroutine if is_async else plain, {})
    assert (result.text, result.reward, result.metrics) == (text, reward, metrics)


async def test_what_json_cannot_express_is_the_authors_mistake() -> None:
    def lock() -> Any:
        return threading.Lock()

    with pytest.raises(ToolContractError, match="tool 'lock'"):
        await call(lock, {})


async def test_a_synchronous_function_runs_in_a_thread_and_a_wrapped_coroutine_is_awaited() -> None:
    def where() -> str:
        return threading.current_thread().name

    async def coroutine(text: str) -> str:
        return f"{threading.current_thread() is threading.main_thread()} {text}"

    @functools.wraps(coroutine)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return coroutine(*args, **kwargs)

    assert "tool" in (await call(where, {})).text
    assert (await call(wrapped, {"text": "x"})).text == "True x"


async def test_what_the_row_fills_in_is_hidden_from_the_model() -> None:
    def lookup(key: str, *, table: Annotated[dict[str, str], FromRow], missing: Annotated[str, FromRow()] = "-") -> str:
        """Look it up."""
        return table.get(key, missing)

    assert list(parameters(lookup)["properties"]) == ["key"]
    row = {"table": {"a": "1"}}
    assert (await call(lookup, {"key": "a"}, row)).text == "1"
    assert (await call(lookup, {"key": "b"}, {**row, "missing": "none"})).text == "none"
    assert (await call(lookup, {"key": "a", "table": {}}, row)).status is CallStatus.BAD_ARGUMENTS
    with pytest.raises(ConfigError, match="'table'"):
        await call(lookup, {"key": "a"})
    with pytest.raises(ConfigError, match=r"execute_kwargs.*'tabel'"):
        await call(lookup, {"key": "a"}, {**row, "tabel": {}})


async def test_a_given_schema_is_believed() -> None:
    def anything(**arguments):  # type: ignore[no-untyped-def]
        return arguments

    schema = make_schema("renamed", a="integer")
    result = await call(anything, {"a": 1}, schema=schema)
    assert (result.tool, result.text) == ("renamed", '{"a":1}')


def test_options_of_the_decorator() -> None:
    @tool(name="renamed", description="Short.", pure=True, repeatable=True, ends_conversation=True)
    def long_name(x: int) -> int:
        """Long."""
        return x

    made = function_tool(long_name)
    assert long_name(3) == 3
    assert isinstance(made, BaseTool)
    assert (made.name, made.tool_schema.function.description) == ("renamed", "Short.")
    assert (made.pure, made.repeatable, made.ends_conversation) == (True, True, True)

    @tool
    def bare(x: int) -> int:
        return x

    assert not function_tool(bare).pure


def no_annotation(x):  # type: ignore[no-untyped-def]
    return x


def variadic(*words: str) -> str:
    return ""


def keywords(**words: str) -> str:
    return ""


def positional(x: int, /) -> int:
    return x


def no_json(lock: threading.Lock) -> str:
    return ""


def function_argument(callback: type[int] | None, key: "Unknown") -> str:  # type: ignore[name-defined] # noqa: F821
    return ""


def taken(parameters: Annotated[str, FromRow]) -> str:
    return ""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_annotation, "no_annotation: parameter 'x' has no annotation"),
        (variadic, "variadic: parameter '*words: str' has no name"),
        (keywords, "keywords: parameter '**words: str' has no name"),
        (positional, "positional: parameter 'x: int' has no name"),
        (no_json, "no_json: parameter 'lock' is a"),
        (function_argument, "'Unknown' is not defined"),
        (taken, "cannot be named 'parameters'"),
        (lambda x: x, "parameter 'x' has no annotation"),
        (functools.partial(search, limit=3), "expected a function"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        function_tool(function)
    assert message in str(caught.value)


def test_docstrings() -> None:
    assert read_docstring("") == ("", {})
    assert read_docstring("One line.") == ("One line.", {})
    text = """One.

    Arguments:
      a_b: First: with a colon.

      *rest: Second
         goes on: here.

    Note:
      c: no argument.
    """
    assert read_docstring(text) == ("One.", {"a_b": "First: with a colon.", "rest": "Second goes on: here."})


def test_functions_in_the_yaml(tmp_path: Path) -> None:
    def load(**entry: Any) -> dict[str, Any]:
        path = tmp_path / "tools.yaml"
        path.write_text(yaml.safe_dump({"tools": [entry]}))
        return load_tools(path)

    tools = load(function=f"{__name__}.search", limits={"timeout_s": 3})
    assert list(tools) == ["search"]
    described = make_schema("anything", a="integer").as_dict()
    assert list(load(function=f"{__name__}.no_annotation", tool_schema=described)) == ["anything"]
    for entry, message in [
        (
            {"function": f"{__name__}.no_annotation"},
            "tools[0]: function no_annotation: parameter 'x' has no annotation",
        ),
        ({"function": f"{__name__}.Colour"}, "is a class; name it under 'class_name'"),
        ({"function": f"{__name__}.nothing"}, "has no 'nothing'"),
        ({"function": 3}, "3 is no dotted name"),
        ({"function": f"{__name__}.search", "config": {}}, "unknown key 'config'"),
        (
            {"function": f"{__name__}.search", "class_name": "x.Y"},
            "one of ['tool', 'class_name', 'function', 'toolset', 'mcp', 'a2a']",
        ),
        ({"function": f"{__name__}.search", "limits": {"cache": 3}}, "does not declare"),
        ({"mcp": "npx"}, "tools[0].mcp: expected a mapping"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load(**entry)
        assert message in str(caught.value)


def test_a_pair_that_reads_as_a_reward_is_refused() -> None:
    """The pair would be read as JSON, and the reward would be lost without a message."""

    def pair(n: int) -> tuple[str, float]:
        return "x", 0.5

    def perhaps(n: int) -> tuple[ToolResponse, float | None]:
        return ToolResponse("x"), None

    def plain(n: int) -> tuple[float, float]:
        return 0.5, 0.5

    for function in (pair, perhaps):
        with pytest.raises(ConfigError, match=r"no reward; return \(text, reward, \{\}\), or a list"):
            function_tool(function)
    function_tool(plain)

"""A call of a tool is read under the tool's own name, in each format, whatever the name and those of its arguments."""

import json
from typing import Any

import pytest

from tests.call_texts import FORMATS, write
from tests.conftest import CharTokenizer
from verl_multiturn.chat.parsing.formats import make_call_parser
from verl_multiturn.chat.parsing.reasoning import THINK
from verl_multiturn.chat.parsing.turns import AssistantTurn, MalformedCall, ToolCall

NAMES = ["resolve-library-id", "files.read", "functions.x", "a.b-c", "3d-search", "404", "import", "None", "true",
         "null", "print", "class.f", "a..b", ".a", "a.", "-", "--x", "_", "__debug__", "__", "match", "q_0", "x" * 64,
         "f-1", "not"]  # fmt: skip
ARGUMENTS = ["user-id", "from", "class", "$top", "@type", "user.id", "user name", "2nd", "None", "true", "ﬁ", "größe",
             "__debug__", "filter[status]", "a=b", "(x)", "a,b", "{x}", "a:b", "#x", "a\\b", "x y[z]",
             "self", "lambda", "q_0", "<x>"]  # fmt: skip
PYTHON = {
    "pythonic": ["{}", "I call.\n{}", "<|python_start|>{}<|python_end|>", "<think>a</think>{}"],
    "lfm2": ["<|tool_call_start|>{}<|tool_call_end|>", "So:<|tool_call_start|>{}<|tool_call_end|>"],
}


def schema_of(name: str, *arguments: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {} for key in arguments}}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


async def parse(name: str, text: str, *schemas: dict[str, Any]) -> AssistantTurn:
    tokenizer = CharTokenizer()
    parser = make_call_parser(name, tokenizer, [tokenizer.eos_token_id], [THINK])
    return await parser.parse(tokenizer.turn(text), schemas, 0)


def calls_of(turn: AssistantTurn) -> list[tuple[str, Any]]:
    return [
        (call.name, json.loads(call.arguments)) if isinstance(call, ToolCall) else (call.problem, None)
        for call in turn.calls
    ]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tool", NAMES)
async def test_a_tool_may_have_any_name(name: str, tool: str) -> None:
    for given in ({"x": "a"}, {}):
        turn = await parse(name, write(name, given, tool=tool), schema_of(tool, "x"))
        assert calls_of(turn) == [(tool, given)]
        assert turn.content == ""


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.parametrize("key", ARGUMENTS)
async def test_an_argument_may_have_any_name_where_calls_are_python(name: str, key: str) -> None:
    schemas = (schema_of("f-x", "a", key), schema_of("g", key))
    value = '{"a": "b=c", "d": [1, "(e"]}'
    for text in PYTHON[name]:
        for written in (f"[f-x({key}='v')]", f"[f-x( {key} = 'v',)]"):
            assert calls_of(await parse(name, text.format(written), *schemas)) == [("f-x", {key: "v"})]
        written = f"[f-x(a='1', \n {key}='v')]"
        assert calls_of(await parse(name, text.format(written), *schemas)) == [("f-x", {"a": "1", key: "v"})]
        written = f'[g({key}={value}), f-x(\n  {key}="f-x({key}=1)", a=[{{"b": 1}}, null]\n)]'
        expected = [("g", {key: {"a": "b=c", "d": [1, "(e"]}}), ("f-x", {key: f"f-x({key}=1)", "a": [{"b": 1}, None]})]
        if "\\" not in key:  # it would mean something else in the text in the call
            assert calls_of(await parse(name, text.format(written), *schemas)) == expected


@pytest.mark.parametrize("name", PYTHON)
async def test_names_that_no_tool_has_are_read_too(name: str) -> None:
    for text in PYTHON[name]:
        assert calls_of(await parse(name, text.format("[no-such-tool(user-id='a', from=1)]"))) == [
            ("no-such-tool", {"user-id": "a", "from": 1})
        ]


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.parametrize(
    "call",
    [
        "[f-x('a')]",
        "[f-x(*a)]",
        "[f-x(**{'a': 1})]",
        "[f-x(a==1)]",
        "[f-x(a<=1)]",
        "[f-x(a:=1)]",
        "[f-x(a-b=1, a-b=2)]",
        "[f-x(a=b-c)]",
        "[f-x(a=1]",
        "[f-x(a='1)]",
        "[f-x(a=1), 2]",
        "[f-x(a=1)(b=2)]",
        "[f-x(a=g-y(b=1))]",
        "[f-x(a b)]",
    ],
)
async def test_what_is_no_call_with_named_arguments_is_malformed(name: str, call: str) -> None:
    (malformed,) = (await parse(name, PYTHON[name][0].format(call), schema_of("f-x", "a"))).calls
    assert isinstance(malformed, MalformedCall)


@pytest.mark.parametrize(
    "text",
    [
        "[see](https://x.org/a(b)=c)",
        "[1](x=2)",
        "It is [2(x=3)] there.",
        "It is [search(query)] there.",
        "It is [well-known(ish)].",
        "[2(x + 1)] is it.",
        "[well-known(ish)] is it.",
        "It is [approximately(where x = 3)].",
        "It is [f-x(a)] there.",
        "[a, b(c=1)]",
    ],
)
async def test_brackets_in_an_answer(text: str) -> None:
    assert await parse("pythonic", text, schema_of("search", "query"), schema_of("f-x", "a")) == AssistantTurn(text)


async def test_long_texts_of_brackets_are_answers() -> None:
    """They are so long that an expression of quadratic cost would outlast a test's time limit."""
    for text in ("[a(" * 30_000, "[a(x" + " " * 60_000, "[a-b(" + "x " * 30_000, "[f-x(a" + ",a" * 30_000 + "=1)]"):
        said = f"So {text.strip()}"
        assert await parse("pythonic", said, schema_of("g", "(a")) == AssistantTurn(said)

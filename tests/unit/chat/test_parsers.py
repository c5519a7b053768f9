"""Calls, malformed calls and the text around them; reasoning; the values of an argument's text."""

from typing import Any

import pytest

from tests.conftest import CharTokenizer
from verl_multiturn.chat.parsing.arguments import read_arguments
from verl_multiturn.chat.parsing.formats import FORMATS, make_call_parser
from verl_multiturn.chat.parsing.harmony import HarmonyParser
from verl_multiturn.chat.parsing.json_calls import JsonParser
from verl_multiturn.chat.parsing.reasoning import REASONING_MARKS, THINK, ReasoningFinder
from verl_multiturn.chat.parsing.turns import AssistantTurn, MalformedCall, ToolCall


async def parse(text: str) -> AssistantTurn:
    tokenizer = CharTokenizer()
    return await JsonParser(tokenizer, [tokenizer.eos_token_id]).parse(tokenizer.turn(text), [], 2)


async def test_calls_and_text() -> None:
    turn = await parse(
        'I think <tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>\n<tool_call>{"name":"g"}</tool_call>'
    )
    assert turn.content == "I think"
    assert turn.calls == [ToolCall("f", '{"x": "é"}', "call_2_0"), ToolCall("g", "{}", "call_2_1")]


async def test_arguments_as_text_are_the_arguments() -> None:
    turn = await parse('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>')
    assert turn.calls == [ToolCall("f", '{"x": 1}', "call_2_0")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{", "not closed"),
        ("<tool_call>{</tool_call>", "no valid JSON"),
        ("<tool_call>[1]</tool_call>", "JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "JSON object"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "nested|JSON"),
        ('<tool_call>{"name": "f"} 2</tool_call>', "followed by something else"),
        ("<tool_call>[]</tool_call>", "JSON object"),
        ('<tool_call>{"name": "f", "arguments": {"x": 1</tool_call>', "',' delimiter at '</tool_call>'"),
    ],
)
async def test_malformed_calls_are_kept_as_such(text: str, problem: str) -> None:
    (call,) = (await parse(text)).calls
    assert isinstance(call, MalformedCall)
    assert any(word in call.problem for word in problem.split("|"))


async def test_what_cannot_be_read_ends_where_a_call_is_closed() -> None:
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    turn = await parse(f"a {good} b <tool_call>{{</tool_call> c {good} d <tool_call>")
    kinds = [type(call) for call in turn.calls]
    assert kinds == [ToolCall, MalformedCall, ToolCall, MalformedCall]
    assert [call.id for call in turn.calls] == ["call_2_0", "call_2_1", "call_2_2", "call_2_3"]
    assert [call.text for call in turn.calls if isinstance(call, MalformedCall)] == [
        "<tool_call>{</tool_call>",
        "<tool_call>",
    ]
    assert turn.content == "a  b  c  d"


async def test_where_a_call_begins_in_one_that_cannot_be_read_nothing_more_is_run() -> None:
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    turn = await parse(f"a {good} b <tool_call>{{{good} c {good} d")
    assert [type(call) for call in turn.calls] == [ToolCall, MalformedCall]
    assert turn.content == "a  b"


async def test_a_closing_mark_in_an_argument_is_its_text() -> None:
    turn = await parse('<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>')
    assert turn == AssistantTurn("", [ToolCall("f", '{"x": "</tool_call>"}', "call_2_0")])


async def test_no_call() -> None:
    assert await parse(" plain \n") == AssistantTurn("plain", [])


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "opened", "executed"),
    [
        (f"<think>{CALL}</think>{CALL}", None, 1),
        (f"<think>{CALL}", None, 0),
        (f"{CALL}</think>{CALL}", "<think>", 1),
        (CALL, "<think>", 0),
        (f"{CALL}<think>{CALL}</think>{CALL}", None, 2),
        # A mark of reasoning inside a call is text of its arguments.
        ('<tool_call>{"name": "f", "arguments": {"code": "<think>"}}</tool_call>' + CALL, None, 2),
        ('<tool_call>{"name": "f", "arguments": {"code": "</think>"}}</tool_call>' + CALL, None, 2),
    ],
)
async def test_a_call_inside_the_reasoning_is_not_executed(text: str, opened: str | None, executed: int) -> None:
    tokenizer = CharTokenizer()
    parser = JsonParser(tokenizer, [tokenizer.eos_token_id])
    turn = await parser.parse(tokenizer.turn(text), [], 0, tokenizer.encode(f"P>{opened or ''}"))
    assert len(turn.calls) == executed
    assert all(isinstance(call, ToolCall) for call in turn.calls)


def test_reasoning_and_the_rest_are_the_whole_text() -> None:
    assert ReasoningFinder().split("a<think>b</think>c<think>d") == ("<think>b</think><think>d", "ac")
    assert ReasoningFinder().split("b</think>c", "<think>") == ("<think>b</think>", "c")


HEADER = "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("before", "opened"),
    [
        (f"Put your reasoning after <think>{HEADER}", None),
        ("<think>[/INST]", None),
        (f"<tool_response>\nsome page <think>\n</tool_response>{HEADER}", None),
        (f"{HEADER}<think>", "<think>"),
        (f"{HEADER}<think>\n", "<think>"),
        ("<｜Assistant｜><think>\n", "<think>"),
        (f"{HEADER}<think>\n\n</think>\n\n", None),
        (f"<think>{HEADER}<think>\n\n</think>\n\n", None),
        ("<|turn>model\n<|channel>thought\n", "<|channel>thought"),
        ("<|turn>model\n<|channel>thought\n<channel|>", None),
        ("[THINK]", "[THINK]"),
        ("", None),
    ],
)
async def test_only_the_end_of_the_prompt_opens_the_reasoning(before: str, opened: str | None) -> None:
    assert ReasoningFinder(REASONING_MARKS).opened_by(before) == opened
    tokenizer = CharTokenizer()
    parser = JsonParser(tokenizer, [tokenizer.eos_token_id], marks=REASONING_MARKS)
    turn = await parser.parse(tokenizer.turn(CALL), [], 0, tokenizer.encode(before))
    assert len(turn.calls) == (0 if opened else 1)


async def test_reasoning_and_text_stay_in_their_order() -> None:
    turn = await parse(f"a<think>{CALL}</think>b{CALL}c<think>d")
    assert turn == AssistantTurn(f"a<think>{CALL}</think>bc<think>d", [ToolCall("f", "{}", "call_2_0")])


async def harmony(text: str) -> AssistantTurn:
    tokenizer = CharTokenizer()
    return await HarmonyParser(tokenizer).parse(tokenizer.encode(text), [], 0)


@pytest.mark.parametrize("body", ["", "{", '{"x": }', "f(1)", "[" * 100_000])
async def test_harmony_without_json(body: str) -> None:
    (call,) = (await harmony(f"<|channel|>commentary to=functions.f <|message|>{body}<|call|>")).calls
    assert isinstance(call, MalformedCall)
    assert "no valid JSON" in call.problem
    (call,) = (await harmony('<|channel|>commentary to=functions.f <|message|>{"x": 1}<|call|>')).calls
    assert call == ToolCall("f", '{"x": 1}', "call_0_0")


@pytest.mark.parametrize("rest", ['{"x": 2}', "and more", "<|end|>", "<|return|>"])
async def test_harmony_with_something_after_the_json(rest: str) -> None:
    written = f'<|channel|>commentary to=functions.f <|message|>{{"x": 1}}{rest}<|call|>'
    (call,) = (await harmony(written)).calls
    problem = "the call's JSON is followed by something else; write its JSON after <|message|> and end it with <|call|>"
    assert call == MalformedCall(f"<|start|>assistant{written}", problem, "call_0_0")


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("null", "string", "null"),
        ("42", "string", "42"),
        ('"a"', "string", '"a"'),
        ("null", "string null", None),
        ("none", "string null", "none"),
        ("42", "string null", "42"),
        ("42", "string integer", 42),
        ("42", "string number", 42),
        ("1.5", "string integer", "1.5"),
        ('"a"', "string integer", '"a"'),
        ("42", "integer", 42),
        (" 42\n", "integer", 42),
        ("many", "integer", "many"),
        ("True", "boolean", True),
        ("true", "boolean", True),
        ("None", "integer null", None),
        ('{"a": [1]}', "object", {"a": [1]}),
        ("[1", "array", "[1"),
        ("[" * 100_000, "array", "[" * 100_000),
        ("9" * 5000, "integer", "9" * 5000),
        ("42", "", 42),
        ("a b", "", "a b"),
        ('"a"', "", '"a"'),
        ('"42"', "", "42"),
        ('"42"', "string integer", "42"),
        ('"42"', "string", '"42"'),
        ('"42"', "integer", "42"),
        ('"\\"42\\""', "string integer", '"42"'),
        ('"\\"a\\""', "string integer", '"\\"a\\""'),
        (' "null" ', "string null", "null"),
        ("[42]", "string array", [42]),
        ("NaN", "", "NaN"),
        ('{"a": 1, "a": 2}', "object", '{"a": 1, "a": 2}'),
    ],
)
def test_what_an_arguments_text_means(text: str, types: str, value: Any) -> None:
    schema = {"properties": {"x": {"type": types.split()} if types else {}}}
    read = read_arguments({"x": text}, schema)["x"]
    assert (read, type(read)) == (value, type(value))


def kinds(**named: str) -> dict[str, Any]:
    return {"properties": {key: {"type": kind} for key, kind in named.items()}}


STRING, INTEGER = {"type": "string"}, {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "texts", "values"),
    [
        ({"additionalProperties": STRING}, {"a": "42", "b": "null"}, {"a": "42", "b": "null"}),
        ({"patternProperties": {"^a": STRING, "^n": INTEGER}}, {"a": "42", "n": "42"}, {"a": "42", "n": 42}),
        ({"allOf": [kinds(a="string"), kinds(b="integer")]}, {"a": "1", "b": "1"}, {"a": "1", "b": 1}),
        ({"anyOf": [kinds(a="string", b="integer")]}, {"a": "1", "b": "1"}, {"a": "1", "b": 1}),
        ({"oneOf": [kinds(a="integer", b="string"), kinds(a="boolean")]}, {"a": "1", "b": "1"}, {"a": 1, "b": "1"}),
        ({"$ref": "#/$defs/q", "$defs": {"q": kinds(a="string")}}, {"a": "42"}, {"a": "42"}),
        ({"if": {"properties": {"k": {"const": "1"}}}, "then": kinds(v="integer"), "else": kinds(v="string"),
          **kinds(k="string")}, {"v": "7", "k": "1"}, {"v": 7, "k": "1"}),
        ({"if": {"properties": {"k": {"const": "1"}}}, "then": kinds(v="integer"), "else": kinds(v="string"),
          **kinds(k="string")}, {"v": "7", "k": "2"}, {"v": "7", "k": "2"}),
        ({"dependentSchemas": {"a": kinds(b="string")}}, {"a": "1", "b": "1"}, {"a": 1, "b": "1"}),
        ({"properties": {"x": {"enum": ["1", "2"]}}}, {"x": "1"}, {"x": "1"}),
        ({"properties": {"x": {"const": "true"}}}, {"x": "true"}, {"x": "true"}),
        ({"properties": {"x": {"not": INTEGER}}}, {"x": "1"}, {"x": "1"}),
        ({"properties": {"x": {"type": "string", "pattern": "^[0-9]"}}}, {"x": '"42"'}, {"x": '"42"'}),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": kinds(b="string")}},
         {"a": "x", "b": "1"}, {"a": "x", "b": "1"}),
        ({"$schema": "http://127.0.0.1:1/x", **kinds(x="string")}, {"x": "1"}, {"x": 1}),  # cannot be compiled
        # No reading fits: a value of the right type makes the message.
        ({"properties": {"x": {**INTEGER, "minimum": 10}}}, {"x": "5"}, {"x": 5}),
        ({"properties": {"x": {"enum": [1, 2]}}}, {"x": "5"}, {"x": 5}),
        ({"properties": {"x": {"enum": ["1", "2"]}}}, {"x": "5"}, {"x": "5"}),
        ({"properties": {"x": {"type": "array", "items": STRING}}}, {"x": "[1]"}, {"x": [1]}),
    ],
)  # fmt: skip
def test_arguments_are_read_by_the_whole_schema(
    schema: dict[str, Any], texts: dict[str, str], values: dict[str, Any]
) -> None:
    assert read_arguments(texts, schema) == values


def test_the_validations_of_a_call_are_few() -> None:
    """So many arguments could be combined in 2 ** 400 ways."""
    texts = {f"a{index}": "1" for index in range(400)}
    assert read_arguments(texts, {"additionalProperties": STRING}) == texts
    assert read_arguments(texts, {"additionalProperties": {"enum": [2]}}) == dict.fromkeys(texts, 1)
    one = {"additionalProperties": INTEGER, "properties": {"a7": STRING}}
    assert read_arguments(texts, {"anyOf": [{"required": ["b"]}, one]}) == dict.fromkeys(texts, 1) | {"a7": "1"}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 2000,
        "<think></think>" * 2000,
        f"[f({'a=1, ' * 2000}",
        "[f(x=" + "(" * 100_000,
        "[f(x=" + "-" * 100_000 + "1)]",
        "<tool_call><function=f>" + "<parameter=x>" * 2000,
        '{"name": ' * 20_000,
    ],
    ids=range(7),
)
async def test_a_model_gone_astray(name: str, text: str) -> None:
    tokenizer = CharTokenizer()
    turn = await make_call_parser(name, tokenizer, [tokenizer.eos_token_id], [THINK]).parse(tokenizer.turn(text), [], 0)
    assert all(isinstance(call, MalformedCall) for call in turn.calls)


async def test_harmonys_answer_after_an_analysis_that_is_not_ended() -> None:
    answer = "<|start|>assistant<|channel|>final<|message|>done<|return|>"
    assert await harmony(f"<|channel|>analysis<|message|>thinking{answer}") == AssistantTurn("done", [], "thinking")
    assert await harmony(f"<|channel|>analysis<|message|>a<|end|>{answer}") == AssistantTurn("done", [], "a")
    quoted = "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}<|call|>"
    turn = await harmony(f"<|channel|>analysis<|message|>thinking{answer}{quoted}")
    assert [type(call) for call in turn.calls] == [MalformedCall]


# The texts are so long that a regular expression of quadratic or cubic cost would outlast a test's time limit.
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm45", "<tool_call>f<arg_key>" + "\n" * 20_000),
        ("hunyuan", "<tool_call>f<tool_sep><arg_key>" + " " * 20_000),
        ("llama3", '{"x": 1' + '} {"name": 5' * 100_000),
        ("lfm2", "<|tool_call_start|>[f(x=" + "\\'''\n" * 60_000),
        ("lfm2", "<|tool_call_start|>[f(x=" + '\\"' * 200_000),
        ("hermes", "<tool_call>{" + "".join(f'"{i}":1,' for i in range(100_000)) + '"99999":1}</tool_call>'),
    ],
    ids=range(6),
)
async def test_the_time_of_reading_grows_with_the_length(name: str, text: str) -> None:
    tokenizer = CharTokenizer()
    turn = await make_call_parser(name, tokenizer, [tokenizer.eos_token_id], [THINK]).parse(tokenizer.turn(text), [], 0)
    assert all(isinstance(call, MalformedCall) for call in turn.calls)

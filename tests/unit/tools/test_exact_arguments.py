"""An argument reaches the tool as the model wrote it, character by character, or the call is malformed."""

import asyncio
import json
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.call_texts import CODER, FORMATS, HARMONY, PLAIN_TAGS, write
from tests.conftest import CharTokenizer
from tests.honest_calls import HONEST
from verl_multiturn import ToolSchema
from verl_multiturn.chat.parsing.formats import make_call_parser
from verl_multiturn.chat.parsing.reasoning import REASONING_MARKS
from verl_multiturn.chat.parsing.turns import AssistantTurn, MalformedCall, ToolCall

STRING = {"type": "string"}


def schema_of(name: str, /, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def parse(name: str, text: str, schemas: list[dict[str, Any]] | None = None, prompt: str = "") -> AssistantTurn:
    tokenizer = CharTokenizer()
    parser = make_call_parser(name, tokenizer, [tokenizer.eos_token_id], REASONING_MARKS)
    given = schemas if schemas is not None else [schema_of("f", x=STRING, y=STRING), schema_of("g", x=STRING)]
    return asyncio.run(parser.parse(tokenizer.turn(text), given, 0, tokenizer.encode(prompt)))


def calls_of(turn: AssistantTurn) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in turn.calls if isinstance(call, ToolCall)]


def check(name: str, value: str) -> bool:
    """Return whether a call with this argument is read, after checking that it is exact or not executed."""
    turn = parse(name, write(name, {"x": value}))
    executed = calls_of(turn)
    assert executed in ([("f", {"x": value})], []), (name, value, turn)
    assert turn.calls, (name, value)
    return bool(executed)


def values_of(name: str) -> list[str]:
    """Return arguments that hold calls of the format, whole and in parts."""
    one = FORMATS[name]
    quoted = write(name, {"x": "1"}, tool="g")
    single = one.write("g", {"x": "1"})
    tags = re.findall(r"</?[^<>]+>|\[/?[A-Z_]+\]", single)
    return [
        quoted,
        quoted + quoted,
        f"first {quoted} then\n{single} and more",
        f"<think>{quoted}</think>",
        f"{quoted}<think>a</think>",
        "".join(tags),
        "".join(reversed(tags)),
        *(f"a {tag} b" for tag in tags),
        *(f"a {tag} b <think>c</think> d" for tag in tags),
        single[: len(single) // 2],
        single[len(single) // 2 :],
        single[1:],
        single[:-1],
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_a_quoted_call_is_text_or_nothing_runs(name: str) -> None:
    read = [check(name, value) for value in values_of(name)]
    if name not in PLAIN_TAGS:
        exact = [value for value in values_of(name) if '<|"|>' not in value]
        assert all(check(name, value) for value in exact)
        assert exact
    else:
        assert any(read)


@pytest.mark.parametrize("name", FORMATS)
def test_no_mixture_of_tags_is_cut(name: str) -> None:
    one = FORMATS[name]
    pieces = [
        *re.findall(r"</?[^<>]+>|\[/?[A-Z_]+\]", one.write("g", {"x": "1"})),
        "a",
        "\n",
        " ",
        '"',
        "'",
        "}",
        "<think>",
    ]
    pieces += ["</think>", "]", ")", "\\"]
    chance = random.Random(name)
    for _ in range(200):
        value = "".join(chance.choice(pieces) for _ in range(chance.randint(1, 6)))
        if not forges(name, value):
            check(name, value)


def forges(name: str, value: str) -> bool:
    """Return whether the format itself reads more than one argument in this one.

    Such a format cannot mark a tag as text.
    """
    if name == "gemma4":
        return '<|"|>' in value
    if name not in PLAIN_TAGS:
        return False
    opened, closed = PLAIN_TAGS[name]
    closing = value.find(closed)
    return closing >= 0 and opened in value[closing:]


@given(st.text(max_size=40), st.sampled_from(sorted(set(FORMATS) - set(PLAIN_TAGS))))
def test_any_text_is_exact_where_a_format_can_say_it(value: str, name: str) -> None:
    if name != "gemma4" or '<|"|>' not in value:
        try:
            value.encode()
        except UnicodeEncodeError:
            assert not check(name, value)
        else:
            assert check(name, value)


@pytest.mark.parametrize("name", FORMATS)
def test_the_end_of_a_call_and_reasoning_in_an_argument_are_its_text(name: str) -> None:
    close = {
        "hermes": "</tool_call>",
        "qwen3_coder": "</tool_call>",
        "hunyuan": "</tool_call>",
        "glm45": "</tool_call>",
    }
    value = f"print('{close.get(name, '')}')\n# <think>not a thought</think> of mine"
    for before in ("", "<think>so</think>\n\n") if name != "gpt-oss" else ("",):
        turn = parse(name, before + write(name, {"x": value}))
        assert calls_of(turn) == [("f", {"x": value})]


@pytest.mark.parametrize("name", ["qwen3_coder", "step3p5", "mimo", "seed"])
def test_a_parameter_that_is_not_closed_does_not_swallow_the_next(name: str) -> None:
    text = write(name, {"x": "1", "y": "2"}).replace("</parameter>", "", 1)
    (call,) = parse(name, text).calls
    assert isinstance(call, MalformedCall)
    assert "'x' is not closed" in call.problem


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", CODER("f", {"x": "1"}) + "\n</parameter>\n</function>\n</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "1"}}</tool_call>"}}</tool_call>'),
        ("hermes", '{"name": "f", "arguments": {"x": "1"}}</tool_call>'),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"x": "a"</tool_call> <tool_call>{"name": "g"}</tool_call>"}'
            "</tool_call>",
        ),
        ("gpt-oss", "<|channel|>commentary<|message|>{}<|call|>"),
        ("gpt-oss", f"<|channel|>analysis<|message|>I call it {HARMONY('f', {'x': '1'})}"),
        ("gpt-oss", f'<|channel|>commentary to=functions.f<|message|>{{"x": "{HARMONY("g", {"x": "1"})}"}}<|call|>'),
    ],
)
def test_nothing_runs_where_a_tag_closes_nothing(name: str, text: str) -> None:
    (call,) = parse(name, text).calls
    assert isinstance(call, MalformedCall)


def test_what_is_said_before_stays_said() -> None:
    turn = parse("hermes", 'I call.<tool_call>{"name": "f"}</tool_call> <think>so</think> </tool_call>')
    assert turn.content == "I call.<think>so</think>"
    (call,) = turn.calls
    assert isinstance(call, MalformedCall)
    assert "</tool_call> that closes nothing, so nothing from the first call on was run" in call.problem
    (alone,) = parse("hermes", "I call. }</tool_call>").calls
    assert isinstance(alone, MalformedCall)
    assert "</tool_call> that closes nothing, so nothing was run" in alone.problem


CLOSES = {
    "hermes": "</tool_call>",
    "qwen3_coder": "</tool_call>",
    "mimo": "</tool_call>",
    "seed": "</seed:tool_call>",
    "glm45": "</tool_call>",
    "minimax": "</invoke>",
    "step3": "<｜tool_call_end｜>",
}


@pytest.mark.parametrize("name", CLOSES)
def test_an_answer_may_name_the_end_of_a_call(name: str) -> None:
    said = f"A call ends with {CLOSES[name]}, that is all."
    assert parse(name, said) == AssistantTurn(said)
    assert parse(name, f"It ends with `{CLOSES[name]}`") == AssistantTurn(f"It ends with `{CLOSES[name]}`")


@pytest.mark.parametrize("name", CLOSES)
def test_what_is_said_before_a_call_may_name_closing_tags(name: str) -> None:
    call = write(name, {"x": "1"})
    for tag in re.findall(r"</[^<>]+>|<｜tool_call_end｜>", call):
        said = f"I add the missing `{tag}`, then {tag} again."
        turn = parse(name, f"{said}\n{call}")
        assert (turn.content, calls_of(turn)) == (said, [("f", {"x": "1"})])
        turn = parse(name, f"{said}\n{call[: len(call) // 2]}")
        assert (turn.content, calls_of(turn), len(turn.calls)) == (said, [], 1)


@pytest.mark.parametrize("name", [name for name in CLOSES if name not in ("minimax", "step3")])
@pytest.mark.parametrize("between", ["", "\n"])
def test_a_call_that_is_closed_twice(name: str, between: str) -> None:
    call = write(name, {"x": "1"}).rstrip() + between + CLOSES[name]
    turn = parse(name, call)
    assert (turn.content, calls_of(turn)) == ("", [("f", {"x": "1"})])
    assert calls_of(parse(name, f"{call}\n{call}")) == [("f", {"x": "1"})] * 2
    for after in (CLOSES[name], f" and {CLOSES[name]}", write(name, {"x": "1"})[-len(CLOSES[name]) - 15 :]):
        (malformed,) = parse(name, call + after).calls
        assert isinstance(malformed, MalformedCall)


@pytest.mark.parametrize("name", CLOSES)
def test_a_quoted_end_that_is_there_twice_cuts_nothing(name: str) -> None:
    call = write(name, {"x": "QQ"})
    end = call[call.index("QQ") + 2 :]
    for value in (end + CLOSES[name], f"a{end}{CLOSES[name]} b", f"{end}\n{CLOSES[name]}\n{CLOSES[name]}"):
        assert calls_of(parse(name, call.replace("QQ", value))) == []


JSON_FORMATS = ["hermes", "interns1", "llama3", "mistral", "gigachat3", "lfm2"]


def as_call(name: str, call: str) -> str:
    one = {"mistral": "[TOOL_CALLS] [{}]", "lfm2": "<|tool_call_start|>[{}]<|tool_call_end|>", "llama3": "{}"}
    return (
        one[name].replace("{}", call)
        if name in one
        else write(name, {})
        .replace('{"name": "f", "arguments": {}}', call)
        .replace('{"name": "f", "parameters": {}}', call)
    )


@pytest.mark.parametrize("name", JSON_FORMATS)
@pytest.mark.parametrize(
    "call",
    [
        '{"name": "f", "args": {"x": "1"}}',
        '{"name": "f", "input": {"x": "1"}}',
        '{"name": "f", "x": "1"}',
        '{"name": "f", "arguments": {}, "parameters": {"x": "1"}}',
        '{"name": "f", "arguments": {"x": "1"}, "parameters": {"x": "1"}}',
        '{"name": "f", "arguments": {"x": "1"}, "arguments": {"x": "2"}}',
        '{"name": "f", "name": "g", "arguments": {"x": "1"}}',
        '{"name": "f", "arguments": {"x": "1", "x": "2"}}',
        '{"name": "f", "arguments": {"x": {"a": 1, "a": 2}}}',
        '{"name": "f", "arguments": "{\\"x\\": 1, \\"x\\": 2}"}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": 1e999}}',
    ],
)
def test_no_part_of_a_call_vanishes(name: str, call: str) -> None:
    (malformed,) = parse(name, as_call(name, call)).calls
    assert isinstance(malformed, MalformedCall)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "-Infinity"])
def test_a_number_that_no_float_holds_is_named(number: str) -> None:
    """It may also be where nothing reads it later: beside the arguments."""
    for call in (f'{{"name": "f", "arguments": {{"x": {number}}}}}', f'{{"name": "f", "index": {number}}}'):
        (malformed,) = parse("hermes", as_call("hermes", call)).calls
        assert isinstance(malformed, MalformedCall)
        assert f"{number} is no number that can be had" in malformed.problem


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_what_a_call_may_have_beside_its_arguments(name: str) -> None:
    for call in (
        '{"type": "function", "name": "f", "parameters": {"x": "1"}}',
        '{"name": "f", "arguments": {"x": "1"}, "id": "call_1", "index": 0, "type": "function"}',
    ):
        if name != "llama3" or not call.startswith('{"name": "f", "arguments": {"x": "1"}, "id"'):
            assert calls_of(parse(name, as_call(name, call))) == [("f", {"x": "1"})]


@pytest.mark.parametrize("name", ["pythonic", "lfm2"])
def test_python_that_says_something_twice(name: str) -> None:
    one = FORMATS[name]
    for call in ('f(x="1", x="2")', "f(x={'a': 1, 'a': 2})", "f(x={1: 1, '1': 2})", "f(x={True: 1})", "f(x=1e999)"):
        (malformed,) = parse(name, one.around.replace("{}", call)).calls
        assert isinstance(malformed, MalformedCall)


@pytest.mark.parametrize("name", ["pythonic", "lfm2"])
@pytest.mark.parametrize("sign", ["==", "!=", "<=", ">=", ":="])
def test_a_comparison_in_python_is_no_argument(name: str, sign: str) -> None:
    (malformed,) = parse(name, FORMATS[name].around.replace("{}", f'f(x{sign}"1")')).calls
    assert isinstance(malformed, MalformedCall)
    assert "arguments are named" in malformed.problem


def test_a_name_with_dots_in_python_may_have_spaces_around_them() -> None:
    call = FORMATS["lfm2"].around.replace("{}", 'math . add(x="1")')
    assert calls_of(parse("lfm2", call)) == [("math.add", {"x": "1"})]


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ('f-1(x-a="1")(y="2")', "f-1(x-a='1')"),
        ('f(x="q\\x5f7")(y="2")', "f(x='q_7')"),  # it looks like a name that stands for another
    ],
)
def test_a_call_of_a_result_in_python_is_refused_with_the_names_that_the_model_wrote(call: str, shown: str) -> None:
    (malformed,) = parse("lfm2", FORMATS["lfm2"].around.replace("{}", call)).calls
    assert isinstance(malformed, MalformedCall)
    assert f'"{shown}" is no name of a tool' in malformed.problem


def test_the_longest_name_of_an_argument_counts() -> None:
    schemas = [schema_of("f", **{"x[": STRING, "x[=y": STRING})]
    call = FORMATS["lfm2"].around.replace("{}", 'f(x[="1", x[=y="2")')
    assert calls_of(parse("lfm2", call, schemas)) == [("f", {"x[": "1", "x[=y": "2"})]


@pytest.mark.parametrize(("text", "value"), [("1", 1), ('"1"', "1"), ("None", None), ("a b", "a b"), ("{", "{")])
def test_a_value_that_the_model_marks_as_no_string(text: str, value: Any) -> None:
    call = write("deepseekv32", {"x": "QQ"}).replace('string="true">QQ', f'string="false">{text}')
    assert calls_of(parse("deepseekv32", call)) == [("f", {"x": value})]


@pytest.mark.parametrize("name", sorted(set(PLAIN_TAGS)))
def test_an_argument_that_is_there_twice(name: str) -> None:
    text = write(name, {"first": "1", "second": "2"}).replace("second", "first")
    (malformed,) = parse(name, text).calls
    assert isinstance(malformed, MalformedCall)
    assert "twice" in malformed.problem


def types_of(arguments: dict[str, Any]) -> dict[str, Any]:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return {key: {"type": kinds[type(value)]} if value is not None else {} for key, value in arguments.items()}


@pytest.mark.parametrize(
    ("name", "text", "calls"), HONEST, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(HONEST)]
)
def test_honest_calls_are_read(name: str, text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    turn = parse(name, text, [schema_of(tool, **types_of(arguments)) for tool, arguments in calls])
    assert [call for call in turn.calls if isinstance(call, MalformedCall)] == []
    assert calls_of(turn) == calls


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in PLAIN_TAGS and name != "gemma4"])
@pytest.mark.parametrize("value", ["\ud83d", "a\udfffb", "\ude00\ud83d"])
def test_half_a_character_reaches_no_tool(name: str, value: str) -> None:
    text = write(name, {"x": "QQ"}).replace("QQ", value.encode("unicode_escape").decode())
    (malformed,) = parse(name, text).calls
    assert isinstance(malformed, MalformedCall)
    assert "half a character" in malformed.problem
    whole = write(name, {"x": "QQ"}).replace("QQ", "\\ud83d\\ude00" if "'QQ'" not in text else "\\U0001f600")
    assert calls_of(parse(name, whole)) == [("f", {"x": "😀"})] or name in ("pythonic", "lfm2")


def test_half_a_character_in_an_argument_that_was_not_read_here() -> None:
    schema = ToolSchema.read(schema_of("f", x=STRING), "test")
    for text in ('{"x": "\\ud83d"}', '{"x": "\ud83d"}', '{"\\uDE00": 1}'):
        assert schema.read_arguments(text)[0] is None
    assert schema.read_arguments('{"x": "\\ud83d\\ude00é"}') == ({"x": "😀é"}, "")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "Ada Lovelace", "age": 36}', 0),
        ('{"name": "Ada", "parameters": {}}', 0),
        ('{"name": "Ada"}', 0),
        ('{"name": "Ada", "arguments": [1]}', 0),
        ('{"name": "Ada", age: 36', 0),
        ('{"name": "f", "age": 36}', 1),
        ('{"name": "f"', 1),
        ('{"name": "f', 1),
        ('{"name": "ff", "parameters": {"x": "1"}}', 1),  # a tool that does not exist, but nothing but a call
        ('<|python_tag|>{"name": "Ada", "age": 36}', 1),
        ('{"name": "Ada", "age": 36}; {"name": "f", "parameters": {"x": "1"}}', 1),
    ],
)
def test_an_answer_of_llamas_that_begins_with_a_name(text: str, calls: int) -> None:
    turn = parse("llama3", text)
    assert len(turn.calls) == calls
    if not calls:
        assert turn.content == text
    # Without tools, the whole text is an answer.
    assert parse("llama3", text, []).calls == [] or text.startswith("<|python_tag|>")


@pytest.mark.parametrize("name", ["seed", "minimax", "minimax-m2", "step3", "glm45", "hunyuan", "deepseekv32"])
@pytest.mark.parametrize("value", ["\nx", "x\n", "\n\nx\n\n", " x ", "\n"])
def test_white_space_around_a_value_is_the_values(name: str, value: str) -> None:
    assert calls_of(parse(name, write(name, {"x": value}))) == [("f", {"x": value})]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<|channel|>analysis to=functions.f <|message|>{"x": "1"}<|call|>', [("f", {"x": "1"})]),
        (' to=functions.f<|channel|>analysis<|message|>{"x": "1"}<|call|>', [("f", {"x": "1"})]),
        ('<|channel|>analysis to=f code<|message|>{"x": "1"}<|call|>', [("f", {"x": "1"})]),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", []),
        ("<|channel|>analysis to=functions.f<|message|>think<|end|>", []),
    ],
)
def test_a_call_of_gpt_oss_on_any_channel_runs_or_is_told(text: str, calls: list[Any]) -> None:
    turn = parse("gpt-oss", text)
    assert calls_of(turn) == calls
    assert len(turn.calls) == 1

"""Every call format: single and several calls, any schema and any argument, and calls that cannot be read."""

import json
from functools import reduce
from typing import Any

import pytest

from tests.call_texts import CODER, FORMATS, HARMONY, SEVERAL, Arguments, write
from tests.conftest import CharTokenizer, make_schema
from tests.support.families import names
from tests.support.template_play import template_of
from verl_multiturn.chat.parsing.formats import FORMATS as OURS
from verl_multiturn.chat.parsing.reasoning import REASONING_MARKS, ReasoningFinder
from verl_multiturn.chat.parsing.turns import AssistantTurn, MalformedCall, ToolCall

pytestmark = pytest.mark.stack


def schema_of(prop: Any, **others: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": prop}, "required": ["x"], **others}
    return {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}


async def parse(
    name: str, text: str, generation_prompt: str = "", schema: dict[str, Any] | None = None
) -> AssistantTurn:
    from verl_multiturn.verl_bridge.model.call_formats import make_parser

    tokenizer = CharTokenizer()
    parser = make_parser(name, tokenizer, [tokenizer.eos_token_id])
    schemas = [schema or make_schema("f", x="integer").as_dict()]
    return await parser.parse(tokenizer.turn(text), schemas, 1, tokenizer.encode(generation_prompt))


def calls_of(turn: AssistantTurn) -> list[tuple[str, Any]]:
    assert all(isinstance(call, ToolCall) for call in turn.calls), turn.calls
    return [(call.name, json.loads(call.arguments)) for call in turn.calls if isinstance(call, ToolCall)]


def test_every_format_is_tried() -> None:
    assert set(FORMATS) == set(OURS)


# Formats of SGLang that came after 0.5.12, the current set's. `multi_turn.format` refuses them until we read them.
NEWER = {
    "apertus2509", "cohere_command4", "dots", "inkling", "kimi_k3", "ling3", "minicpm5", "minimax-m3", "muse",
    "spark25",
}  # fmt: skip


def test_verl_and_sglang_know_no_other_formats() -> None:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    from verl_multiturn.verl_bridge.model.call_formats import known_formats

    assert set(FunctionCallParser.ToolCallParserEnum) - NEWER <= set(known_formats()) == {*FORMATS, "tir"}
    assert not NEWER & {*FORMATS}


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", FORMATS)
async def test_calls(name: str, count: int) -> None:
    if count > 1 and name not in SEVERAL:
        return
    turn = await parse(name, write(name, *[{"x": index} for index in range(count)]))
    assert calls_of(turn) == [("f", {"x": index}) for index in range(count)]
    assert [call.id for call in turn.calls] == [f"call_1_{index}" for index in range(count)]
    assert turn.content == ""


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "gpt-oss"])
async def test_text_before_a_call(name: str) -> None:
    text = "I call it." if name != "llama3" else "I call it.<|python_tag|>"
    turn = await parse(name, text + write(name, {"x": 1}).removeprefix("<|python_tag|>"))
    assert (calls_of(turn), turn.content) == ([("f", {"x": 1})], "I call it.")


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, one in FORMATS.items() for text in one.broken])
async def test_a_call_that_cannot_be_read_does_not_vanish(name: str, text: str) -> None:
    (malformed,) = (await parse(name, text)).calls
    assert isinstance(malformed, MalformedCall)
    assert malformed.problem
    assert malformed.text.rstrip("¶") in f"<|start|>assistant{text}"


@pytest.mark.parametrize("name", SEVERAL)
async def test_a_call_cut_short_after_a_good_one(name: str) -> None:
    one = FORMATS[name]
    if name in ("pythonic", "lfm2"):
        return  # this format reads a list as a whole or not at all
    good, cut = one.write("f", {"x": 1}), one.write("f", {"x": 2})
    turn = await parse(name, one.around.partition("{}")[0] + good + one.between + cut[: cut.index("2")])
    first, second = turn.calls
    assert isinstance(first, ToolCall)
    assert isinstance(second, MalformedCall)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "gpt-oss"])
async def test_a_call_inside_the_reasoning_is_not_executed(name: str) -> None:
    said = write(name, {"x": 1})
    for text, prompt in [(f"<think>{said}</think>done", ""), (f"{said}</think>done", "<think>\n")]:
        turn = await parse(name, text, prompt)
        assert turn.calls == []
        assert turn.content.endswith("done")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", ["a<think>b</think>c", "<think>", "</think>"])
async def test_a_mark_of_reasoning_in_an_argument_is_its_text(name: str, value: str) -> None:
    for before in ("", "<think>so</think>\n\n") if name != "gpt-oss" else ("",):
        turn = await parse(name, before + write(name, {"x": value}), schema=schema_of({"type": "string"}))
        assert calls_of(turn) == [("f", {"x": value})]


async def test_gpt_oss_reasons_in_a_channel_of_its_own() -> None:
    analysis = f"<|channel|>analysis<|message|>I could {HARMONY('f', {'x': 1})}<|end|>"
    assert (await parse("gpt-oss", analysis)).calls == []
    turn = await parse("gpt-oss", f"{analysis}<|start|>assistant<|channel|>final<|message|>Four.<|return|>")
    assert turn == AssistantTurn("Four.", [], f"I could {HARMONY('f', {'x': 1})}")


def answer(name: str, text: str) -> str:
    return f"<|channel|>final<|message|>{text}<|return|>" if name == "gpt-oss" else text


# Schemas of an argument, each with a value that fits.
SCHEMAS: dict[str, tuple[dict[str, Any], Any]] = {
    "string": (schema_of({"type": "string"}), "42"),
    "anyOf": (schema_of({"anyOf": [{"type": "string"}, {"type": "null"}]}), "red"),
    "anyOf, null": (schema_of({"anyOf": [{"type": "integer"}, {"type": "null"}]}), None),
    "$ref": (
        schema_of({"$ref": "#/$defs/Color"}, **{"$defs": {"Color": {"enum": ["red", "1"], "type": "string"}}}),
        "1",
    ),
    "enum": (schema_of({"enum": ["1", "2"]}), "1"),
    "enum of numbers": (schema_of({"enum": [1, 2]}), 1),
    "object": (schema_of({"type": "object", "properties": {"a": {"type": "array"}}}), {"a": [1, "b", {"c": None}]}),
    "array": (schema_of({"type": "array", "items": {"type": "string"}}), ["1", "a, b", "{c}"]),
    "types": (schema_of({"type": ["number", "null"]}), 1.5),
    "boolean": (schema_of({"type": "boolean"}), True),
    "allOf": (schema_of({"allOf": [{"type": "string"}, {"minLength": 1}]}), "true"),
    "true": (schema_of(True), 7),
}
for _key, (_schema, _value) in list(SCHEMAS.items()):
    if _key in ("string", "object"):
        _function = {key: value for key, value in _schema["function"].items() if key != "description"}
        SCHEMAS[f"{_key}, no description"] = ({**_schema, "function": _function}, _value)


@pytest.mark.parametrize("key", SCHEMAS)
@pytest.mark.parametrize("name", FORMATS)
async def test_any_schema(name: str, key: str) -> None:
    from verl_multiturn import ToolSchema

    schema, value = SCHEMAS[key]
    checked = ToolSchema.read(schema, "test")
    assert await parse(name, answer(name, "It is {4}."), schema=schema) == AssistantTurn("It is {4}.", [])
    turn = await parse(name, write(name, {"x": value}), schema=schema)
    assert calls_of(turn) == [("f", {"x": value})]
    (call,) = turn.calls
    assert isinstance(call, ToolCall)
    assert checked.read_arguments(call.arguments) == ({"x": value}, "")


async def test_a_tool_without_parameters() -> None:
    schema = {"type": "function", "function": {"name": "f"}}
    for name in FORMATS:
        assert calls_of(await parse(name, write(name, {}), schema=schema)) == [("f", {})]


STRINGS = ["null", "None", "true", "42", "1e3", "٣", '"q"', "[1]", "{a}", "a\n b", " a ", "</x>", "a < b & c", "it's"]


@pytest.mark.parametrize("name", FORMATS)
async def test_a_string_stays_as_it_is(name: str) -> None:
    for value in STRINGS:
        turn = await parse(name, write(name, {"x": value}), schema=schema_of({"type": "string"}))
        assert calls_of(turn) == [("f", {"x": value})]


@pytest.mark.parametrize("name", FORMATS)
async def test_a_plain_answer(name: str) -> None:
    for text in ["It is {4}.", '{"answer": [4]}', "[4] is f(x=1)", "See [the page](x) <b>now</b>."]:
        assert await parse(name, answer(name, text)) == AssistantTurn(text, [])


@pytest.mark.parametrize("name", FORMATS)
async def test_a_call_of_a_tool_that_does_not_exist_is_kept(name: str) -> None:
    assert calls_of(await parse(name, write(name, {"x": 1}, tool="g"))) == [("g", {"x": 1})]


BARE = "<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n"
DSML = '<｜DSML｜invoke name="f">\n{{"x": {}}}\n</｜DSML｜invoke>'
JSON = '{{"name": "f", "arguments": {{"x": {}}}}}'
PARAMETERS = '{{"name": "f", "parameters": {{"x": {}}}}}'
TYPED = '{{"type": "function", '
PLUGIN = "<|action_start|> <|plugin|>"
OTHER_WAYS = [
    ("mistral", f"[TOOL_CALLS] [{JSON}, {JSON}]"),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]a1[ARGS]{{"x": {}}}[TOOL_CALLS]f[CALL_ID]a2[ARGS]{{"x": {}}}'),
    ("llama3", f"{PARAMETERS}; {JSON}"),
    ("llama3", f"  {PARAMETERS.replace('{{', TYPED, 1)}\n{PARAMETERS}"),
    ("lfm2", f"<|tool_call_start|>[{JSON}, {JSON}]<|tool_call_end|>"),
    ("pythonic", "<|python_start|>[f(x={}), f(x={})]<|python_end|>"),
    ("pythonic", "I do: [f(x={}), f(x={})]"),
    ("deepseekv32", DSML + DSML),
    ("qwen3_coder", f"{BARE}</tool_call>\n<tool_call>\n{BARE}</tool_call>"),
    ("qwen3_coder", f"<tool_call>{BARE}{BARE}</tool_call>"),
    (
        "interns1",
        f"<|action_start|><|plugin|>{JSON}<|action_end|><|action_start|> <|plugin|>\n{PARAMETERS}<|action_end|>",
    ),
]


@pytest.mark.parametrize(("name", "text"), OTHER_WAYS)
async def test_other_ways_to_write_a_call(name: str, text: str) -> None:
    turn = await parse(name, text.format(1, 2))
    assert calls_of(turn) == [("f", {"x": 1}), ("f", {"x": 2})]
    assert turn.content == ("I do:" if text.startswith("I do") else "")


async def test_words_of_python_and_of_json_in_either() -> None:
    schema = schema_of({"type": ["boolean", "null"]})
    for text in ("True", "true"):
        turn = await parse("qwen3_coder", CODER("f", {"x": text}), schema=schema)
        assert calls_of(turn) == [("f", {"x": True})]
    assert calls_of(await parse("lfm2", '<|tool_call_start|>[f(x={"a": [true, None]})]<|tool_call_end|>')) == [
        ("f", {"x": {"a": [True, None]}})
    ]


async def test_no_arguments() -> None:
    text = '<｜DSML｜tool_calls><｜DSML｜invoke name="f"/></｜DSML｜tool_calls>'
    for name in ("deepseekv4", "deepseek_v4"):
        assert calls_of(await parse(name, text)) == [("f", {})]


@pytest.mark.parametrize("name", names())
def test_whether_a_familys_prompt_opens_the_reasoning(name: str) -> None:
    prompt = template_of(name).generation_prompt
    opened = [start for start, end in REASONING_MARKS if prompt.rfind(start) > prompt.rfind(end)]
    assert ReasoningFinder(REASONING_MARKS).opened_by(prompt) == (opened[0] if opened else None)
    for before in ("Put your reasoning after <think>", "<think>", "<think>\n"):
        assert ReasoningFinder(REASONING_MARKS).opened_by(before + (prompt or "[/INST]")) == (
            opened[0] if opened else None
        )


def test_some_families_open_the_reasoning() -> None:
    opened = {
        name for name in names() if ReasoningFinder(REASONING_MARKS).opened_by(template_of(name).generation_prompt)
    }
    assert opened == {
        *("qwen3.5-think", "qwen3.6", "qwen3.8", "deepseek-v3", "deepseek-r1-distill"),
        *("nemotron-3-nano", "nemotron-3-super"),
    }


@pytest.fixture
def registered() -> Any:
    """Register a tool parser with verl, as a user may do, and yield the name of its format."""
    from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

    @ToolParser.register("of_a_user")
    class OfAUser(ToolParser):
        async def extract_tool_calls(
            self, responses_ids: list[int], tools: Any = None
        ) -> tuple[str, list[FunctionCall]]:
            said, _, call = self.tokenizer.decode(responses_ids).partition("CALL ")
            kind = tools[0].function.parameters.properties["x"].type
            assert isinstance(kind, str), kind
            made = [FunctionCall(name=call.partition(" ")[0], arguments=call.partition(" ")[2])] if call else []
            return said, made

    yield "of_a_user"
    del ToolParser._registry["of_a_user"]


@pytest.mark.parametrize("key", [key for key in SCHEMAS if key not in ("types", "true")])
async def test_a_parser_that_is_registered_with_verl(
    registered: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    schema, value = SCHEMAS[key]
    assert await parse(registered, "It is 4.", schema=schema) == AssistantTurn("It is 4.", [])
    assert "a call that it skips is not noticed" in caplog.text
    turn = await parse(registered, f"<think>CALL</think>CALL f {json.dumps({'x': value})}", schema=schema)
    assert calls_of(turn) == [("f", {"x": value})]
    (malformed,) = (await parse(registered, "CALL f {", schema=schema)).calls
    assert isinstance(malformed, MalformedCall)


class Text(CharTokenizer):
    """A tokenizer in the form that verl's parsers get: they decode by themselves."""

    pad_token = ""

    def __init__(self, text: str) -> None:
        self.text = text

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return self.text

    def convert_tokens_to_ids(self, token: str) -> int:
        return 0


@pytest.mark.parametrize("given", [{"x": 1}, {"x": 2, "y": "some [text]"}, {}])
async def test_what_parsers_of_verl_and_sglang_read_is_read_alike(given: Arguments) -> None:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from verl.experimental.agent_loop.tool_parser import ToolParser
    from verl.tools.schemas import OpenAIFunctionToolSchema

    schema = make_schema("f", x="integer", y="string").as_dict()
    different = {}
    for name in FORMATS:
        text = write(name, given, given) if name in SEVERAL else write(name, given)
        ours = calls_of(await parse(name, text, schema=schema))
        if name in ToolParser._registry:
            tools = [OpenAIFunctionToolSchema.model_validate(schema)]
            _, read = await ToolParser.get_tool_parser(name, Text(text)).extract_tool_calls([], tools)
            if ours != (theirs := [(call.name, json.loads(call.arguments)) for call in read]):
                different["verl", name] = theirs
        if name in FunctionCallParser.ToolCallParserEnum:
            _, items = FunctionCallParser([Tool.model_validate(schema)], name).parse_non_stream(text)
            if ours != (theirs := [(str(item.name), json.loads(item.parameters)) for item in items]):
                different["sglang", name] = theirs
    assert different == {}


ROOT: dict[str, Any] = {"$defs": {"A": {"enum": ["a", 1, None]}, "B": {"$ref": "#/$defs/B"}}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, "string"),
        ({"type": ["string", "null"]}, "null string"),
        ({"enum": ["a", 1, 1.5, True, None, [], {}]}, "array boolean integer null number object string"),
        ({"const": 1}, "integer"),
        ({"$ref": "#/$defs/A"}, "integer null string"),
        ({"$ref": "#/$defs/B"}, ""),
        ({"$ref": "#/$defs/C"}, ""),
        ({"$ref": "https://example.org/x"}, ""),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/A"}]}, "integer null string"),
        ({"oneOf": [{"type": "string"}, {}]}, ""),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}, {"minLength": 1}]}, "string"),
        (reduce(lambda inner, _: {"anyOf": [inner]}, range(8), {"type": "string"}), "string"),
        (reduce(lambda inner, _: {"anyOf": [inner]}, range(9), {"type": "string"}), ""),  # the search ends
        ({"description": "any"}, ""),
        (True, ""),
        (None, ""),
    ],
)
def test_types_of_a_schema(schema: Any, types: str) -> None:
    from verl_multiturn.verl_bridge.model.call_formats import types_of

    assert types_of(schema, ROOT) == set(types.split())

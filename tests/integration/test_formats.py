"""The call formats that verl's and SGLang's parsers read: calls, several of them, and what cannot be read."""

import pytest

from tests.conftest import CharTokenizer, make_schema
from verl_multiturn.chat.parsers import AssistantTurn, MalformedCall, ToolCall

pytestmark = pytest.mark.stack

# Per format: one good call of `f` with x=1, what parts calls, what surrounds them, and calls that are none.
CODER = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
DEEPSEEK = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x": 1}\n```<｜tool▁call▁end｜>'
HARMONY = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>'
FORMATS: dict[str, tuple[str, str, str, list[str]]] = {
    "hermes": (
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "\n", "{}", ["<tool_call>\n{\n</tool_call>"]
    ),
    "llama3": (
        '{"name": "f", "parameters": {"x": 1}}', ";", "<|python_tag|>{}", ["<|python_tag|>f(x=1)", '{"name": "f", ']
    ),
    "mistral": ('[TOOL_CALLS]f[ARGS]{"x": 1}', "", "{}", ["[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS] oops"]),
    "deepseekv3": (
        DEEPSEEK,
        "\n",
        "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
        [
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f",
            f"<｜tool▁calls▁begin｜>{DEEPSEEK}\n{DEEPSEEK.replace('1}', '1')}<｜tool▁calls▁end｜>",
        ],
    ),
    "glm": (GLM, "\n", "{}", ["<tool_call>f\n<arg_key>x</arg_key>"]),
    "glm45": (GLM, "\n", "{}", ["<tool_call>f\n<arg_key>x</arg_key>"]),
    "gpt-oss": (
        HARMONY, "", "{}", [HARMONY.replace("<|call|>", ""), HARMONY.replace("<|message|>", "")]
    ),
    "qwen3_coder": (CODER, "\n", "{}", ["<tool_call>\n<function=f</tool_call>", "<tool_call>f</tool_call>"]),
}  # fmt: skip


async def parse(name: str, text: str, generation_prompt: str = "") -> AssistantTurn:
    from verl_multiturn.verl_bridge.parsers import make_parser

    tokenizer = CharTokenizer()
    parser = make_parser(name, tokenizer, [tokenizer.eos_token_id])
    schemas = [make_schema("f", x="integer").as_dict()]
    return await parser.parse(tokenizer.turn(text), schemas, 1, tokenizer.encode(generation_prompt))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", FORMATS)
async def test_calls(name: str, count: int) -> None:
    call, between, around, _ = FORMATS[name]
    turn = await parse(name, around.replace("{}", between.join([call] * count)))
    assert [(c.name, c.arguments.replace(" ", ""), c.id) for c in turn.calls if isinstance(c, ToolCall)] == [
        ("f", '{"x":1}', f"call_1_{index}") for index in range(count)
    ]
    assert len(turn.calls) == count
    assert not turn.content.replace("¶", "").strip()


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, made in FORMATS.items() for text in made[3]])
async def test_a_call_that_cannot_be_read_does_not_vanish(name: str, text: str) -> None:
    turn = await parse(name, text)
    (malformed,) = [call for call in turn.calls if isinstance(call, MalformedCall)]
    assert malformed.problem


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "gpt-oss"])
async def test_a_call_inside_the_reasoning_is_not_executed(name: str) -> None:
    call, _, around, _ = FORMATS[name]
    said = around.replace("{}", call)
    for text, prompt in [(f"<think>{said}</think>done", ""), (f"{said}</think>done", "<think>\n")]:
        turn = await parse(name, text, prompt)
        assert turn.calls == []
        assert turn.content.endswith("done")


async def test_gpt_oss_reasons_in_a_channel_of_its_own() -> None:
    analysis = f"<|channel|>analysis<|message|>I could {HARMONY}<|end|>"
    assert (await parse("gpt-oss", analysis)).calls == []
    turn = await parse("gpt-oss", f"{analysis}<|start|>assistant<|channel|>final<|message|>Four.<|return|>")
    assert turn == AssistantTurn("Four.", [])


@pytest.mark.parametrize("name", FORMATS)
async def test_a_plain_answer(name: str) -> None:
    text = "<|channel|>final<|message|>It is {4}.<|return|>" if name == "gpt-oss" else "It is {4}."
    assert await parse(name, text) == AssistantTurn("It is {4}.", [])


@pytest.mark.parametrize("name", FORMATS)
async def test_a_call_of_a_tool_that_does_not_exist_is_kept(name: str) -> None:
    call, _, around, _ = FORMATS[name]
    unknown = call.replace("functions.f", "functions.g").replace("function=f", "function=g").replace('"f"', '"g"')
    unknown = unknown.replace(">f\n", ">g\n").replace("]f[", "]g[")
    (found,) = (await parse(name, around.replace("{}", unknown))).calls
    assert isinstance(found, ToolCall)
    assert found.name == "g"

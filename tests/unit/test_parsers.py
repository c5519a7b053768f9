"""The Hermes parser: calls, malformed calls, and the text around them."""

import pytest

from tests.conftest import CharTokenizer
from verl_multiturn.chat.parsers import AssistantTurn, HermesParser, MalformedCall, ToolCall


async def parse(text: str) -> AssistantTurn:
    tokenizer = CharTokenizer()
    return await HermesParser(tokenizer, [tokenizer.eos_token_id]).parse(tokenizer.turn(text), [], 2)


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
    ],
)
async def test_malformed_calls_are_kept_as_such(text: str, problem: str) -> None:
    (call,) = (await parse(text)).calls
    assert isinstance(call, MalformedCall)
    assert any(word in call.problem for word in problem.split("|"))


async def test_no_call() -> None:
    assert await parse(" plain \n") == AssistantTurn("plain", [])

"""The Hermes parser: calls, malformed calls, and the text around them."""

import pytest

from tests.conftest import CharTokenizer
from verl_multiturn.chat.parsers import AssistantTurn, HermesParser, MalformedCall, Reasoning, ToolCall


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


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "opened", "executed"),
    [
        (f"<think>{CALL}</think>{CALL}", None, 1),
        (f"<think>{CALL}", None, 0),
        (f"{CALL}</think>{CALL}", "<think>", 1),
        (CALL, "<think>", 0),
        (f"{CALL}<think>{CALL}</think>{CALL}", None, 2),
        # A mark inside a call is text of its arguments.
        ('<tool_call>{"name": "f", "arguments": {"code": "<think>"}}</tool_call>' + CALL, None, 2),
        ('<tool_call>{"name": "f", "arguments": {"code": "</think>"}}</tool_call>' + CALL, None, 2),
    ],
)
async def test_a_call_inside_the_reasoning_is_not_executed(text: str, opened: str | None, executed: int) -> None:
    tokenizer = CharTokenizer()
    parser = HermesParser(tokenizer, [tokenizer.eos_token_id], Reasoning())
    turn = await parser.parse(tokenizer.turn(text), [], 0, tokenizer.encode(f"P>{opened or ''}"))
    assert len(turn.calls) == executed
    assert all(isinstance(call, ToolCall) for call in turn.calls)


def test_reasoning_and_the_rest_are_the_whole_text() -> None:
    assert Reasoning().split("a<think>b</think>c<think>d") == ("<think>b</think><think>d", "ac")
    assert Reasoning().split("b</think>c", "<think>") == ("<think>b</think>", "c")

"""Where reasoning and calls begin and end in a turn, format by format."""

import json
from typing import Any

import pytest

from tests.conftest import CharTokenizer
from verl_multiturn.chat.parsing.formats import make_call_parser
from verl_multiturn.chat.parsing.reasoning import REASONING_MARKS, ReasoningFinder
from verl_multiturn.chat.parsing.turns import AssistantTurn, MalformedCall, ToolCall


def test_the_reasoning_that_a_text_begins_with() -> None:
    after = ReasoningFinder().after
    assert after("xy") == "xy"
    assert after(" \n<think>a</think> <think>b</think>c <think>d</think>") == "c <think>d</think>"
    assert after("a<think>b</think>c") == "a<think>b</think>c"
    assert after("a</think>b", "<think>") == "b"
    assert after("</think>b", "<think>") == "b"
    assert after("<think>never ended") == ""
    assert ReasoningFinder().split("</think>b", "<think>") == ("<think></think>", "b")
    marks = ReasoningFinder(REASONING_MARKS)
    assert marks.after("<think>[THINK]a[/THINK]</think>[THINK]b[/THINK]c") == "c"


async def read(name: str, text: str, opened: str = "", parameters: Any = None) -> AssistantTurn:
    tokenizer = CharTokenizer()
    parser = make_call_parser(name, tokenizer, [tokenizer.eos_token_id], REASONING_MARKS)
    schemas = [{"type": "function", "function": {"name": "f", "parameters": parameters or {"type": "object"}}}]
    return await parser.parse(tokenizer.turn(text), schemas, 0, tokenizer.encode(opened))


async def test_reasoning_that_the_prompt_opened_stays_in_the_text() -> None:
    assert (await read("hermes", "hm</think>Hello", opened="<think>")).content == "<think>hm</think>Hello"


def test_an_agent_gets_the_calls_that_could_be_read() -> None:
    first, broken, last = (
        ToolCall("f", "{}", "call_0_0"),
        MalformedCall("{", "it ends", "call_0_1"),
        ToolCall("g", "{}", ""),
    )
    assert AssistantTurn("", [first, broken, last]).readable == [first, last]


UNMARKED = '{"name": "f", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "executed"),
    [
        (UNMARKED, 1),
        (f"<think>a</think>\n{UNMARKED}", 1),
        (f"<think>a</think>\n<think>b</think>{UNMARKED}", 1),
        (f"Hello <think>a</think>{UNMARKED}", 0),
        (f"<|python_tag|>{UNMARKED}<think>a</think>{UNMARKED}", 1),
        (f"{UNMARKED}<think>a</think>{UNMARKED}", 1),
    ],
)
async def test_a_call_without_a_mark_is_at_the_beginning_or_after_another(text: str, executed: int) -> None:
    assert len((await read("llama3", text)).calls) == executed


@pytest.mark.parametrize(
    ("text", "calls", "malformed"),
    [
        ("End it with </parameter></function>.", 0, 0),
        ("</function></tool_call>", 0, 1),
        ("a</parameter></function> <tool_call><function=f></function></tool_call>", 0, 1),
        ("a</parameter> <tool_call><function=f></function></tool_call>", 1, 0),
    ],
)
async def test_the_end_of_a_call_without_its_beginning(text: str, calls: int, malformed: int) -> None:
    found = (await read("qwen3_coder", text)).calls
    assert [isinstance(call, ToolCall) for call in found] == [True] * calls + [False] * malformed


@pytest.mark.parametrize(("name", "value"), [("qwen3_coder", "a &lt; b"), ("mimo", "a < b")])
async def test_what_is_escaped_as_in_html(name: str, value: str) -> None:
    text = "<tool_call><function=f><parameter=x>a &lt; b</parameter></function></tool_call>"
    (call,) = (await read(name, text)).calls
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == {"x": value}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lfm2", "<|tool_call_start|>[f(x=1)]"),
        ("lfm2", '<|tool_call_start|>[f(x="<|tool_call_end|>")]'),
        ("pythonic", "<|python_start|>[f(x=1)"),
    ],
)
async def test_a_list_of_calls_that_is_not_closed(name: str, text: str) -> None:
    (call,) = (await read(name, text)).calls
    assert isinstance(call, MalformedCall)
    assert "not closed" in call.problem


@pytest.mark.parametrize("call", ["f(1)", "f(1, x=2)", 'f(**{"x": 1})', "f", "'f'", "f(x=1), f(2)"])
async def test_calls_in_python_whose_arguments_have_no_names(call: str) -> None:
    (found,) = (await read("lfm2", f"<|tool_call_start|>[{call}]<|tool_call_end|>")).calls
    assert isinstance(found, MalformedCall)
    assert "not a call whose arguments are named" in found.problem

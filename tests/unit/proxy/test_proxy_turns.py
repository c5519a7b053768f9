"""The view of a turn by a client of the endpoint, beside its calls."""

from __future__ import annotations

import pytest

from tests.conftest import CharTokenizer
from verl_multiturn.chat.parsing.formats import make_call_parser
from verl_multiturn.chat.parsing.reasoning import THINK
from verl_multiturn.chat.parsing.turns import AssistantTurn
from verl_multiturn.proxy.protocols.requests import ChatRequest
from verl_multiturn.proxy.sessions.turn_reading import TurnReader

FINAL = "<|start|>assistant<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.f <|message|>{}<|call|>"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def read(name: str, text: str, stop: str = "") -> AssistantTurn:
    tokenizer = CharTokenizer()
    ends = [tokenizer.eos_token_id]
    reader = TurnReader(make_call_parser(name, tokenizer, ends, [THINK]), tokenizer, ends, [THINK])
    request = ChatRequest([{"role": "user", "content": "x"}], [TOOL], stop=[stop] if stop else [])
    turn, stopped = await reader.read(tokenizer.encode(text), [], request)
    assert (stopped or "") == stop
    return turn


@pytest.mark.parametrize(
    ("name", "text", "stop"),
    [
        ("hermes", "<think>Hm.</think>Four.", ""),
        ("gpt-oss", f"{ANALYSIS}{FINAL}Four.<|return|>", ""),
        ("gpt-oss", f"{ANALYSIS}{FINAL}Four. STOP", "STOP"),
    ],
)
async def test_reasoning_is_apart_from_the_text(name: str, text: str, stop: str) -> None:
    turn = await read(name, text, stop)
    assert (turn.reasoning, turn.content.strip(), turn.calls) == ("Hm.", "Four.", [])


async def test_gpt_oss_reasons_before_a_call_and_where_it_was_cut() -> None:
    turn = await read("gpt-oss", ANALYSIS + CALL)
    assert (turn.reasoning, turn.content, [call.name for call in turn.calls]) == ("Hm.", "", ["f"])
    assert await read("gpt-oss", "<|channel|>analysis<|message|>Hm") == AssistantTurn("", [], "Hm")


async def test_a_call_of_gpt_oss_that_cannot_be_read_is_text_with_all_around_it() -> None:
    text = ANALYSIS + CALL.replace("{}", "{")
    turn = await read("gpt-oss", text)
    assert (turn.reasoning, turn.content, turn.calls) == ("", text, [])

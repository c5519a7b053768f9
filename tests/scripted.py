"""Conversations of scripted turns for tests, with one token for each character."""

from typing import Any

from tests.conftest import CharBuilder, CharTokenizer, EchoTool
from verl_multiturn import Conversation, Limits, Outcome, Request, ScriptedEngine
from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.parsing.json_calls import JsonParser
from verl_multiturn.tools.running.gate import Gate

CALL = '<tool_call>{"name": "echo", "arguments": {"text": "hi"}}</tool_call>'


async def run(
    turns: Any, tool: EchoTool | None = None, request: dict[str, Any] | None = None, **limits: Any
) -> Outcome:
    tokenizer = CharTokenizer()
    engine = turns
    if isinstance(turns, list):
        engine = ScriptedEngine([tokenizer.turn(turn) for turn in turns], version=3)
    settings = {"prompt_length": 100, "response_length": 400, "max_parallel_calls": 8, **limits}
    conversation = Conversation(
        engine,
        ChatCodec(CharBuilder(), tokenizer=tokenizer),
        JsonParser(tokenizer, [tokenizer.eos_token_id]),
        Limits(**settings),
        Gates(Gate, 5.0),
    )
    tools = {"echo": tool} if tool is not None else {}
    messages = [{"role": "user", "content": "Q"}]
    return await conversation.run(Request("r1", messages, tools, **(request or {})))

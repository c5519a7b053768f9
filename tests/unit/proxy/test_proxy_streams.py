"""Streams and errors as bytes. Anthropic's own client (2.12.0) reads these streams; it is not installed here."""

import json
from typing import Any

import pytest

from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.proxy.protocols import PROTOCOLS
from verl_multiturn.proxy.protocols.anthropic_messages import token_count
from verl_multiturn.proxy.protocols.requests import ChatRequest, Completion, ContextLengthError, RefusedError

CHAT, RESPONSES, MESSAGES = (PROTOCOLS[f"/v1/{name}"] for name in ("chat/completions", "responses", "messages"))
ASKED = ChatRequest([{"role": "user", "content": "x"}], model="policy")
CALLED = Completion(
    "c2",
    "I\u2028add.",
    reasoning="Think.",
    calls=[ToolCall("add", '{"a":  1}', "abcdefgh1")],
    finish="tool_calls",
    prompt_tokens=11,
    completion_tokens=5,
)
TOO_LONG = ContextLengthError(40_000, 32_768)


def test_a_stream_of_messages() -> None:
    expected = r"""
event: message_start
data: {"type":"message_start","message":{"id":"msg_c2","type":"message","role":"assistant","model":"policy","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":11,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":0}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"Think."}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"c2"}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: content_block_start
data: {"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"I\u2028add."}}

event: content_block_stop
data: {"type":"content_block_stop","index":1}

event: content_block_start
data: {"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"abcdefgh1","name":"add","input":{}}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"{\"a\":  1}"}}

event: content_block_stop
data: {"type":"content_block_stop","index":2}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"input_tokens":11,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":5}}

event: message_stop
data: {"type":"message_stop"}

"""  # noqa: E501
    assert "\n" + b"".join(MESSAGES.events(ASKED, [CALLED], 0)).decode() == expected


def test_an_answer_of_messages() -> None:
    assert MESSAGES.answer(ASKED, [CALLED], 0) == {
        "id": "msg_c2",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [
            {"type": "thinking", "thinking": "Think.", "signature": "c2"},
            {"type": "text", "text": "I\u2028add."},
            {"type": "tool_use", "id": "abcdefgh1", "name": "add", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 11,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 5,
        },
    }
    assert token_count(17) == {"input_tokens": 17}


@pytest.mark.parametrize(
    ("completion", "reason", "stop"),
    [
        (Completion("c", "a"), "end_turn", None),
        (Completion("c", "a", finish="length"), "max_tokens", None),
        (Completion("c", "a", stop="</code>"), "stop_sequence", "</code>"),
        (Completion("c", "a", finish="tool_calls", stop="</code>", calls=CALLED.calls), "tool_use", None),
    ],
)
def test_why_a_message_ended(completion: Completion, reason: str, stop: str | None) -> None:
    answer = MESSAGES.answer(ASKED, [completion], 0)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, stop)


def test_numbers_that_json_cannot_hold_stay_text_in_a_block() -> None:
    call = ToolCall("f", '{"a": NaN, "b": -Infinity, "c": 1e999, "d": 1.5}', "abcdefgh1")
    block = MESSAGES.answer(ASKED, [Completion("c", "", calls=[call])], 0)["content"][0]
    assert block["input"] == {"a": "NaN", "b": "-Infinity", "c": "1e999", "d": 1.5}


def test_pings_are_no_events_of_openai() -> None:
    assert CHAT.ping() == RESPONSES.ping() == b": ping\n\n"
    assert MESSAGES.ping() == b'event: ping\ndata: {"type":"ping"}\n\n'


@pytest.mark.parametrize(
    ("refused", "openai", "anthropic"),
    [
        (RefusedError(400, "session_over", "over"), ("invalid_request_error", "session_over"), "invalid_request_error"),
        (RefusedError(401, "bad_key", "who"), ("authentication_error", "bad_key"), "authentication_error"),
        (RefusedError(404, "not_found", "what"), ("not_found_error", "not_found"), "not_found_error"),
        (RefusedError(413, "too_large", "big"), ("request_too_large", "too_large"), "request_too_large"),
        (RefusedError(503, "ending", "ends"), ("server_error", "ending"), "api_error"),
    ],
)  # fmt: skip
def test_errors(refused: RefusedError, openai: tuple[str, str], anthropic: str) -> None:
    kind, code = openai
    expected = {"error": {"message": refused.message, "type": kind, "param": None, "code": code}}
    assert CHAT.error(refused) == RESPONSES.error(refused) == expected
    assert MESSAGES.error(refused) == {"type": "error", "error": {"type": anthropic, "message": refused.message}}


def events(stream: bytes) -> list[Any]:
    return [json.loads(block.partition(b"data: ")[2]) for block in stream.split(b"\n\n") if block]


def test_a_prompt_that_is_too_long_in_a_stream() -> None:
    assert events(MESSAGES.error_events(TOO_LONG)) == [
        {
            "type": "error",
            "error": {
                "type": "invalid_request_error",
                "message": "prompt is too long: 40000 tokens > 32768 maximum",
            },
        }
    ]
    assert events(CHAT.error_events(TOO_LONG))[0]["error"]["code"] == "context_length_exceeded"
    error, failed = events(RESPONSES.error_events(TOO_LONG))
    assert (error["type"], error["error"]["code"]) == ("error", "context_length_exceeded")
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": "context_length_exceeded", "message": TOO_LONG.message}


def test_codex_does_not_ask_again_after_a_final_error() -> None:
    _, failed = events(RESPONSES.error_events(RefusedError(400, "session_over", "over")))
    assert failed["response"]["error"] == {"code": "invalid_prompt", "message": "over"}


def test_the_events_of_a_response() -> None:
    stream = events(b"".join(RESPONSES.events(ASKED, [CALLED], 5)))
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    assert [event["type"].removeprefix("response.") for event in stream] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert stream[-1]["response"] == RESPONSES.answer(ASKED, [CALLED], 5)
    assert stream[14]["item"] == {
        "id": "fc_abcdefgh1",
        "type": "function_call",
        "status": "in_progress",
        "call_id": "abcdefgh1",
        "name": "add",
        "arguments": "",
    }
    assert stream[0]["response"]["usage"] is None

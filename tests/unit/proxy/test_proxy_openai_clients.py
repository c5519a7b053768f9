"""OpenAI's own client against the answers and the streams of both of its protocols, over a real socket."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import BaseModel

from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.proxy.protocols import PROTOCOLS
from verl_multiturn.proxy.protocols import model as model_card
from verl_multiturn.proxy.protocols import models as model_list
from verl_multiturn.proxy.protocols.requests import ChatRequest, Completion, ContextLengthError, RefusedError

ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": ADD}}
FLAT_TOOL: Any = {"type": "function", "name": "add", "description": "Add.", "parameters": ADD, "strict": True}
ASKED: Any = [{"role": "user", "content": "x"}]

SAID = Completion("c1", "Grüße \u2028 🙂", prompt_tokens=7, completion_tokens=3)
CALLED = Completion(
    "c2",
    "I add.",
    reasoning="Think.",
    calls=[ToolCall("add", '{"a": 1}', "abcdefgh1"), ToolCall("add", '{"a":2}', "abcdefgh2")],
    finish="tool_calls",
    prompt_tokens=11,
    completion_tokens=5,
)
BARE_CALL = Completion("c3", "", calls=[ToolCall("add", '{"a": 3}', "abcdefgh3")], finish="tool_calls")
CUT = Completion("c4", "Half of", finish="length", prompt_tokens=2, completion_tokens=2)
SCORED = Completion("c5", "é!", token_logprobs=[("é", -0.5), ("!", float("-inf"))], completion_tokens=2)
JSON_TEXT = Completion("c6", '{"answer": 5}')


class Answer(BaseModel):
    answer: int


class Served:
    """An endpoint that answers with its own completions.

    Attributes:
        completions: The answer to each request.
        refused: If set, it is answered in their place: before the first byte, or after a ping.
        asked: The requests that were read.
    """

    def __init__(self) -> None:
        self.completions: list[Completion] = [SAID]
        self.refused: RefusedError | None = None
        self.asked: list[ChatRequest] = []
        self.late = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        protocol = PROTOCOLS[request.path]
        try:
            asked = protocol.read(await request.json())
            if self.refused and not self.late:
                raise self.refused
        except RefusedError as refused:
            return web.json_response(protocol.error(refused), status=refused.status)
        self.asked.append(asked)
        if not asked.stream:
            return web.json_response(protocol.answer(asked, self.completions, 1_700_000_000))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(protocol.ping())
        await asyncio.sleep(0.01)
        await response.write(protocol.ping())
        if self.refused:
            await response.write(protocol.error_events(self.refused))
            return response
        for piece in protocol.events(asked, self.completions, 1_700_000_000):
            await response.write(piece)
        return response


@pytest.fixture
async def served() -> AsyncIterator[tuple[Served, openai.AsyncOpenAI]]:
    endpoint = Served()
    app = web.Application()
    for path in PROTOCOLS:
        app.router.add_post(path, endpoint.handle)

    async def models(request: web.Request) -> web.Response:
        name = request.match_info.get("name")
        return web.json_response(model_card(name) if name else model_list(["policy"]))

    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name}", models)
    async with TestServer(app) as server:
        url = str(server.make_url("/v1"))
        async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
            yield endpoint, client


Both = tuple[Served, openai.AsyncOpenAI]


async def test_a_chat_completion(served: Both) -> None:
    endpoint, client = served
    answer = await client.chat.completions.create(model="policy", messages=ASKED)
    assert answer.model_dump(exclude_unset=True) == {
        "id": "chatcmpl-c1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Grüße \u2028 🙂", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }
    assert endpoint.asked[0].messages == [{"role": "user", "content": "x"}]


async def test_chat_calls_and_reasoning(served: Both) -> None:
    endpoint, client = served
    endpoint.completions = [CALLED]
    (choice,) = (await client.chat.completions.create(model="policy", messages=ASKED, tools=[TOOL])).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.model_dump(exclude_unset=True) == {
        "role": "assistant",
        "content": "I add.",
        "refusal": None,
        "reasoning_content": "Think.",
        "tool_calls": [
            {"id": "abcdefgh1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
            {"id": "abcdefgh2", "type": "function", "function": {"name": "add", "arguments": '{"a":2}'}},
        ],
    }
    endpoint.completions = [BARE_CALL]
    (choice,) = (await client.chat.completions.create(model="policy", messages=ASKED, tools=[TOOL])).choices
    assert choice.message.content is None


@pytest.mark.parametrize("completion", [SAID, CALLED, BARE_CALL], ids=["text", "calls", "bare call"])
async def test_a_chat_stream_says_what_the_answer_says(served: Both, completion: Completion) -> None:
    endpoint, client = served
    endpoint.completions = [completion]
    whole = (await client.chat.completions.create(model="policy", messages=ASKED)).choices[0]
    async with client.chat.completions.stream(model="policy", messages=ASKED) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    (choice,) = final.choices
    assert choice.finish_reason == whole.finish_reason
    assert choice.message.content == whole.message.content
    assert getattr(choice.message, "reasoning_content", None) == getattr(whole.message, "reasoning_content", None)
    calls = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    assert calls == [(call.id, call.name, call.arguments) for call in completion.calls]
    assert ("content.done" in kinds) == bool(completion.content)
    assert kinds.count("tool_calls.function.arguments.done") == len(completion.calls)
    assert final.usage is None


async def test_a_chat_stream_ends_with_usage_when_asked(served: Both) -> None:
    endpoint, client = served
    endpoint.completions = [SAID, CUT]
    chunks = [
        chunk.model_dump(exclude_unset=True)
        async for chunk in await client.chat.completions.create(
            model="policy", messages=ASKED, n=2, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 6
    assert chunks[-1] == {
        "id": "chatcmpl-c1",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "policy",
        "choices": [],
        "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12},
    }
    texts = ["", ""]
    for choice in (chunk["choices"][0] for chunk in chunks[:-1]):
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == ["Grüße \u2028 🙂", "Half of"]


async def test_several_completions_in_a_chat_stream(served: Both) -> None:
    endpoint, client = served
    endpoint.completions = [SAID, CALLED, BARE_CALL]
    async with client.chat.completions.stream(model="policy", messages=ASKED, n=3) as stream:
        final = await stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["Grüße \u2028 🙂", "I add.", None]
    assert [choice.finish_reason for choice in final.choices] == ["stop", "tool_calls", "tool_calls"]
    assert endpoint.asked[0].n == 3


async def test_the_client_knows_a_completion_that_was_cut(served: Both) -> None:
    endpoint, client = served
    endpoint.completions = [CUT]
    with pytest.raises(openai.LengthFinishReasonError) as raised:
        await client.chat.completions.parse(model="policy", messages=ASKED)
    assert raised.value.completion.choices[0].message.content == "Half of"
    async with client.chat.completions.stream(model="policy", messages=ASKED) as stream:
        with pytest.raises(openai.LengthFinishReasonError):
            await stream.get_final_completion()


@pytest.mark.parametrize("completion", [SCORED, Completion("c7", "", calls=BARE_CALL.calls, finish="tool_calls",
                                                           token_logprobs=SCORED.token_logprobs)])  # fmt: skip
async def test_chat_logprobs(served: Both, completion: Completion) -> None:
    endpoint, client = served
    endpoint.completions = [completion]
    expected = [
        {"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": []},
        {"token": "!", "logprob": -9999.0, "bytes": [33], "top_logprobs": []},
    ]
    answer = await client.chat.completions.create(model="policy", messages=ASKED, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.model_dump() == {"content": expected, "refusal": None}
    async with client.chat.completions.stream(model="policy", messages=ASKED, logprobs=True) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].logprobs is not None
    assert [each.model_dump() for each in final.choices[0].logprobs.content or []] == expected


async def test_parsed_chat_answers(served: Both) -> None:
    endpoint, client = served
    endpoint.completions = [JSON_TEXT]
    parsed = await client.chat.completions.parse(model="policy", messages=ASKED, response_format=Answer)
    assert parsed.choices[0].message.parsed == Answer(answer=5)
    assert endpoint.asked[0].unenforced == ["response_format"]
    tool = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    endpoint.completions = [BARE_CALL]
    called = await client.chat.completions.parse(model="policy", messages=ASKED, tools=[tool])
    assert called.choices[0].message.tool_calls is not None
    assert called.choices[0].message.tool_calls[0].function.parsed_arguments == {"a": 3}
    async with client.chat.completions.stream(model="policy", messages=ASKED, tools=[tool]) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.tool_calls is not None
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == {"a": 3}


async def test_a_response(served: Both) -> None:
    _, client = served
    answer = await client.responses.create(model="policy", input="x")
    assert (answer.id, answer.status, answer.output_text) == ("resp_c1", "completed", "Grüße \u2028 🙂")
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (7, 3, 10)


async def test_items_of_a_response(served: Both) -> None:
    endpoint, client = served
    endpoint.completions = [CALLED]
    answer = await client.responses.create(model="policy", input="x", tools=[FLAT_TOOL])
    assert [item.model_dump(exclude_unset=True) for item in answer.output] == [
        {
            "id": "rs_c2",
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Think."}],
            "encrypted_content": None,
            "status": "completed",
        },
        {
            "id": "msg_c2",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I add.", "annotations": [], "logprobs": []}],
        },
        {
            "id": "fc_abcdefgh1",
            "type": "function_call",
            "status": "completed",
            "call_id": "abcdefgh1",
            "name": "add",
            "arguments": '{"a": 1}',
        },
        {
            "id": "fc_abcdefgh2",
            "type": "function_call",
            "status": "completed",
            "call_id": "abcdefgh2",
            "name": "add",
            "arguments": '{"a":2}',
        },
    ]
    # The items that the client sends back are one message again.
    await client.responses.create(
        model="policy",
        input=[
            {"role": "user", "content": "x"},
            *(item.model_dump(exclude_unset=True) for item in answer.output),  # type: ignore[list-item]
            {"type": "function_call_output", "call_id": "abcdefgh1", "output": "1"},
        ],
    )
    assert endpoint.asked[1].messages == [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "Think.",
            "tool_calls": [
                {"id": "abcdefgh1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                {"id": "abcdefgh2", "type": "function", "function": {"name": "add", "arguments": '{"a":2}'}},
            ],
        },
        {"role": "tool", "content": "1", "tool_call_id": "abcdefgh1"},
    ]


@pytest.mark.parametrize("completion", [SAID, CALLED, BARE_CALL, CUT], ids=["text", "calls", "bare call", "cut"])
async def test_a_response_stream_says_what_the_answer_says(served: Both, completion: Completion) -> None:
    endpoint, client = served
    endpoint.completions = [completion]
    whole = await client.responses.create(model="policy", input="x")
    raw = [event async for event in await client.responses.create(model="policy", input="x", stream=True)]
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    assert [event.type for event in raw[:2]] == ["response.created", "response.in_progress"]
    assert [event.item for event in raw if event.type == "response.output_item.done"] == whole.output
    async with client.responses.stream(model="policy", input="x") as stream:
        snapshot = {}
        async for event in stream:
            if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                snapshot[event.output_index] = event.snapshot
        final = await stream.get_final_response()
    assert final.model_dump(exclude={"output"}) == whole.model_dump(exclude={"output"})
    assert final.output_text == whole.output_text == completion.content
    texts = [completion.content] * bool(completion.content) + [call.arguments for call in completion.calls]
    assert list(snapshot.values()) == texts


async def test_a_cut_response_is_incomplete(served: Both) -> None:
    endpoint, client = served
    endpoint.completions = [CUT]
    answer = await client.responses.create(model="policy", input="x", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert endpoint.asked[0].max_tokens == 2


async def test_parsed_responses(served: Both) -> None:
    endpoint, client = served
    endpoint.completions = [JSON_TEXT]
    answer = await client.responses.parse(model="policy", input="x", text_format=Answer)
    assert answer.output_parsed == Answer(answer=5)
    assert endpoint.asked[0].unenforced == ["text.format"]
    async with client.responses.stream(model="policy", input="x", text_format=Answer) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == Answer(answer=5)


async def test_response_logprobs(served: Both) -> None:
    endpoint, client = served
    endpoint.completions = [SCORED]
    include: Any = ["message.output_text.logprobs"]
    answer = await client.responses.create(model="policy", input="x", include=include)
    part = answer.output[0].content[0]  # type: ignore[union-attr, index]
    assert [(each.token, each.logprob, each.bytes) for each in part.logprobs] == [  # type: ignore[union-attr]
        ("é", -0.5, [195, 169]),
        ("!", -9999.0, [33]),
    ]


async def test_a_custom_tool_gets_a_text(served: Both) -> None:
    endpoint, client = served
    patch: Any = {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": {"type": "text"}}
    endpoint.completions = [
        Completion(
            "c8",
            "",
            calls=[
                ToolCall("apply_patch", '{"input": "*** a\\n"}', "abcdefgh4"),
                ToolCall("apply_patch", "{}", "abcdefgh5"),
            ],
        )
    ]
    answer = await client.responses.create(model="policy", input="x", tools=[patch])
    assert [(item.type, item.call_id, item.input) for item in answer.output] == [  # type: ignore[union-attr]
        ("custom_tool_call", "abcdefgh4", "*** a\n"),
        ("custom_tool_call", "abcdefgh5", "{}"),
    ]
    async with client.responses.stream(model="policy", input="x", tools=[patch]) as stream:
        final = await stream.get_final_response()
    assert [item.to_dict() for item in final.output] == [item.to_dict() for item in answer.output]
    items: Any = [item.to_dict() for item in answer.output[:1]]
    output: Any = {"type": "custom_tool_call_output", "call_id": "abcdefgh4", "output": "done"}
    await client.responses.create(model="policy", input=[*ASKED, *items, output], tools=[patch])
    arguments = endpoint.asked[2].messages[1]["tool_calls"][0]["function"]["arguments"]
    assert arguments == '{"input": "*** a\\n"}'


TOO_LONG = ContextLengthError(40_000, 32_768)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long(served: Both, stream: bool) -> None:
    endpoint, client = served
    endpoint.refused = TOO_LONG
    for asking in (
        client.chat.completions.create(model="policy", messages=ASKED, stream=stream),
        client.responses.create(model="policy", input="x", stream=stream),
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            await asking
        assert raised.value.code == "context_length_exceeded"
        assert raised.value.type == "invalid_request_error"
        assert "maximum context length is 32768 tokens. However, your messages resulted in 40000" in str(raised.value)


async def consume_chat(client: openai.AsyncOpenAI) -> None:
    async for _ in await client.chat.completions.create(model="policy", messages=ASKED, stream=True):
        pass


async def consume_chat_helper(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="policy", messages=ASKED) as stream:
        await stream.until_done()


async def consume_response(client: openai.AsyncOpenAI) -> None:
    async for _ in await client.responses.create(model="policy", input="x", stream=True):
        pass


async def consume_response_helper(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model="policy", input="x") as stream:
        await stream.until_done()


@pytest.mark.parametrize(
    "consume", [consume_chat, consume_chat_helper, consume_response, consume_response_helper], ids=lambda f: f.__name__
)
async def test_an_error_in_a_stream_is_raised(served: Both, consume: Callable[..., Any]) -> None:
    endpoint, client = served
    endpoint.refused, endpoint.late = TOO_LONG, True
    with pytest.raises(openai.APIError, match="40000") as raised:
        await consume(client)
    assert raised.value.code == "context_length_exceeded"


async def test_models(served: Both) -> None:
    _, client = served
    assert [each.id async for each in client.models.list()] == ["policy"]
    assert (await client.models.retrieve("other")).id == "other"

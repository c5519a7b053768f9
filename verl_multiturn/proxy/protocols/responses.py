"""`POST /v1/responses`: OpenAI's Responses, without a store.

https://platform.openai.com/docs/api-reference/responses and …/responses-streaming. A reference to an earlier response
by its id is refused. An item of an earlier answer may be named by its id, as long as the session lasts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field, Tag

from verl_multiturn.chat.codec import Message
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.proxy.protocols import events as sse
from verl_multiturn.proxy.protocols import fields
from verl_multiturn.proxy.protocols.chat_completions import error_body
from verl_multiturn.proxy.protocols.fields import ABSENT, Array, Fields, Other
from verl_multiturn.proxy.protocols.requests import ChatRequest, Completion, RefusedError, Sent, nothing_sent
from verl_multiturn.proxy.protocols.response_items import Item, References, Turns
from verl_multiturn.proxy.protocols.validation import read_as, refused

_UNENFORCED = ("temperature", "top_p", "top_logprobs", "max_tool_calls")
_LOGPROBS = "message.output_text.logprobs"
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole text for the tool."}},
    "required": ["input"],
}


class _TextOptions(Fields):
    verbosity: object = None
    format: object = None


class _ReasoningOptions(Fields):
    effort: object = None


class _Custom(Fields):
    name: fields.Name = ABSENT
    description: str | None = None


_Tool = Annotated[
    Annotated[fields.Function, Tag("=function")] | Annotated[_Custom, Tag("=custom")] | Annotated[Other, Tag("=other")],
    fields.by("type", {"function": "function", "custom": "custom"}, "function or custom", other="other"),
]
_Stored = Annotated[
    object, fields.only(None, False, expected="nothing: responses are not stored here", todo="send the whole input")
]
_SOME_INPUT = "a text or a list with at least one message"
_Input = Annotated[
    Annotated[str, Tag("=text")]
    | Annotated[list[Item], fields.StopAtFirst(), Field(max_length=fields.MOST_MESSAGES), Tag("=list")],
    fields.choice(fields.text_or_list, _SOME_INPUT),
    fields.NULL_IS_EMPTY,
]


class _Body(Fields, extra="allow"):
    previous_response_id: _Stored = None
    conversation: _Stored = None
    prompt: _Stored = None
    background: _Stored = None
    instructions: str | None = None
    input: _Input = ABSENT
    tools: fields.Tools[_Tool] = ABSENT
    max_output_tokens: fields.MostTokens | None = None
    include: Array[object] = ABSENT
    tool_choice: object = None
    parallel_tool_calls: object = None
    truncation: object = None
    text: _TextOptions | None = None
    reasoning: _ReasoningOptions | None = None
    stream: bool | None = None
    model: str | None = None

    def request(self) -> ChatRequest:
        unenforced = [*fields.set_fields(self.model_extra or {}, _UNENFORCED), *self._unenforced()]
        tools = []
        custom: set[str] = set()
        for tool in self.tools:
            if isinstance(tool, Other):
                unenforced.append(fields.counted("tools", tool.type))
            elif isinstance(tool, _Custom):
                tools.append(fields.tool(tool.name, tool.description, _INPUT))
                custom.add(tool.name)
            else:
                tools.append(tool.tool())
        return ChatRequest(
            messages=self._messages(unenforced),
            protocol=Responses.name,
            tools=tools,
            custom_tools=frozenset(custom),
            max_tokens=self.max_output_tokens,
            logprobs=_LOGPROBS in self.include,
            reads_calls=self.tool_choice != "none",
            stream=bool(self.stream),
            model=self.model or "",
            unenforced=unenforced,
        )

    def _messages(self, unenforced: list[str]) -> list[Message]:
        """Return the messages, without the instructions."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        turns = Turns(unenforced)
        for item in self.input:
            item.add_to(turns)
        return turns.messages

    def _unenforced(self) -> Iterator[str]:
        if self.tool_choice not in (None, "auto", "none"):
            yield "tool_choice"
        if self.parallel_tool_calls is False:
            yield "parallel_tool_calls"
        if self.truncation not in (None, "disabled"):
            yield "truncation"
        if self.text and self.text.verbosity is not None:
            yield "text.verbosity"
        if self.reasoning and self.reasoning.effort is not None:
            yield "reasoning.effort"
        if self.text and self.text.format not in (None, {"type": "text"}):
            yield "text.format"


class Responses:
    """The protocol of Responses."""

    name = "responses"
    """Name of the protocol in records."""

    def read(self, body: Mapping[str, Any], sent: Sent = nothing_sent) -> ChatRequest:
        """Read a request.

        Args:
            body: The request.
            sent: Finds the completion that an item belongs to.

        Raises:
            RefusedError: A field does not fit the protocol, or requests something unsupported.
        """
        read = read_as(_Body, body, References(partial(_item_of, sent)))
        request = read.request()
        if not request.messages:
            raise refused("input", body.get("input"), _SOME_INPUT)
        if not read.instructions:
            return request
        return replace(request, messages=[{"role": "system", "content": read.instructions}, *request.messages])

    def answer(self, request: ChatRequest, completions: Sequence[Completion], created: int) -> dict[str, Any]:
        """Return the body of the answer."""
        (completion,) = completions
        return _finished(request, completion, created, [item for item, _ in _items(request, completion)])

    def events(self, request: ChatRequest, completions: Sequence[Completion], created: int) -> Iterator[bytes]:
        """Return the answer as a stream."""
        for number, each in enumerate(_events(request, completions, created)):
            yield sse.event({**each, "sequence_number": number})

    def ping(self) -> bytes:
        """Return bytes that keep the connection alive."""
        return sse.COMMENT

    def error(self, refused: RefusedError) -> dict[str, Any]:
        """Return the body of an error."""
        return error_body(refused)

    def error_events(self, refused: RefusedError) -> bytes:
        """Return an error for a stream that has begun.

        OpenAI's own client raises at the first event, Codex ends at the second; to each the other one is unknown.
        """
        body = error_body(refused)
        final = refused.status < 500 and refused.code != "context_length_exceeded"
        # Codex asks again after any code that it does not know.
        error = {"code": "invalid_prompt" if final else refused.code, "message": refused.message}
        response = {"object": "response", "status": "failed", "error": error, "output": []}
        first = {"type": "error", "sequence_number": 0, **body, "code": refused.code, "message": refused.message}
        second = {"type": "response.failed", "sequence_number": 1, "response": {"id": "resp_failed", **response}}
        return sse.event(first) + sse.event(second)


def _items(request: ChatRequest, completion: Completion) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return the items of the answer, each with the events between its beginning and its end."""
    index = 0
    if completion.reasoning:
        yield _reasoning(completion, index)
        index += 1
    if completion.content or not completion.calls:
        yield _message(request, completion, index)
        index += 1
    for call in completion.calls:
        yield _custom_call(call, index) if call.name in request.custom_tools else _function_call(call, index)
        index += 1


def _item_of(sent: Sent, name: str) -> dict[str, Any] | None:
    """Return the item of an earlier answer, from its id; None if there is none."""
    kind, _, own = name.partition("_")
    completion = sent(own)
    if completion is None:
        return None
    custom = frozenset(call.name for call in completion.calls) if kind == "ctc" else frozenset()
    items = _items(ChatRequest([], custom_tools=custom), completion)
    return next((item for item, _ in items if item["id"] == name), None)


def _reasoning(completion: Completion, index: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    part = {"type": "reasoning_text", "text": completion.reasoning}
    item = {
        "id": f"rs_{completion.id}",
        "type": "reasoning",
        "summary": [],
        "content": [part],
        "encrypted_content": None,
        "status": "completed",
    }
    return item, _part_events("reasoning_text", part, item["id"], index, {})


def _message(request: ChatRequest, completion: Completion, index: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    found = sse.logprobs(completion) if request.logprobs else []
    part = {"type": "output_text", "text": completion.content, "annotations": [], "logprobs": found}
    item = {
        "id": f"msg_{completion.id}",
        "type": "message",
        "role": "assistant",
        "status": "incomplete" if completion.finish == "length" else "completed",
        "content": [part],
    }
    return item, _part_events("output_text", part, item["id"], index, {"logprobs": found})


def _part_events(
    kind: str, part: dict[str, Any], item_id: Any, index: int, more: dict[str, Any]
) -> list[dict[str, Any]]:
    place = {"item_id": item_id, "output_index": index, "content_index": 0}
    empty = {**part, "text": ""} | {name: [] for name in more}
    return [
        {"type": "response.content_part.added", **place, "part": empty},
        {"type": f"response.{kind}.delta", **place, "delta": part["text"], **more},
        {"type": f"response.{kind}.done", **place, "text": part["text"], **more},
        {"type": "response.content_part.done", **place, "part": part},
    ]


def _function_call(call: ToolCall, index: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    item = {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }
    place = {"item_id": item["id"], "output_index": index}
    done = {"type": "response.function_call_arguments.done", **place, "name": call.name, "arguments": call.arguments}
    return item, [{"type": "response.function_call_arguments.delta", **place, "delta": call.arguments}, done]


def _custom_call(call: ToolCall, index: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    given = sse.arguments_of(call).get("input")
    # Arguments that are not as the schema has them reach the tool as they are.
    given = given if isinstance(given, str) else call.arguments
    item = {
        "id": f"ctc_{call.id}",
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "input": given,
    }
    place = {"item_id": item["id"], "output_index": index}
    done = {"type": "response.custom_tool_call_input.done", **place, "input": given}
    return item, [{"type": "response.custom_tool_call_input.delta", **place, "delta": given}, done]


def _events(request: ChatRequest, completions: Sequence[Completion], created: int) -> Iterator[dict[str, Any]]:
    """Return the events without their numbers."""
    (completion,) = completions
    begun = _response(request, completion, created, "in_progress")
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    items = []
    for index, (item, between) in enumerate(_items(request, completion)):
        empty = {name: type(item[name])() for name in ("content", "arguments", "input") if name in item}
        yield {
            "type": "response.output_item.added",
            "output_index": index,
            "item": {**item, "status": "in_progress", **empty},
        }
        yield from between
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
        items.append(item)
    # Not `response.incomplete` after a completion that was cut: OpenAI's own helper finds no final response there, and
    # Codex sends it again. The status shows that it was cut.
    yield {"type": "response.completed", "response": _finished(request, completion, created, items)}


def _finished(
    request: ChatRequest, completion: Completion, created: int, items: list[dict[str, Any]]
) -> dict[str, Any]:
    cut = completion.finish == "length"
    response = _response(request, completion, created, "incomplete" if cut else "completed")
    details = {"reason": "max_output_tokens"} if cut else None
    usage = {
        "input_tokens": completion.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": completion.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": completion.prompt_tokens + completion.completion_tokens,
    }
    return {**response, "incomplete_details": details, "output": items, "usage": usage}


def _response(request: ChatRequest, completion: Completion, created: int, status: str) -> dict[str, Any]:
    """Return a response without output, with the fields that clients' types require."""
    return {
        "id": f"resp_{completion.id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "metadata": {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "tool_choice": "auto" if request.reads_calls else "none",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }

"""`POST /v1/chat/completions`: OpenAI's chat completions.

https://platform.openai.com/docs/api-reference/chat; `reasoning_content` as other servers of open models have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Tag

from verl_multiturn.chat.codec import Message
from verl_multiturn.chat.messages import ROLES
from verl_multiturn.proxy.protocols import events as sse
from verl_multiturn.proxy.protocols import fields
from verl_multiturn.proxy.protocols.fields import ABSENT, MOST_COMPLETIONS, Array, Content, Fields, Other, Refusal, Text
from verl_multiturn.proxy.protocols.requests import ChatRequest, Completion, RefusedError, Sent, nothing_sent
from verl_multiturn.proxy.protocols.validation import read_as, wrong

_UNENFORCED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "top_logprobs", "prediction", "audio", "reasoning_effort", "verbosity", "web_search_options",
    "chat_template_kwargs",
)  # fmt: skip
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


_PARTS = {"text": "text", "refusal": "refusal", "image_url": "image"}
_KNOWN_PART = fields.by("type", _PARTS, "text or image_url", "send other media as text or images")
_ROLES = {**dict.fromkeys(ROLES, "other"), "assistant": "assistant", "tool": "tool"}
_Unused = Annotated[
    object, fields.only(None, expected="nothing: the field is deprecated", todo="use tools and tool_choice")
]


class _Url(Fields):
    url: fields.ImageUrl = ABSENT


class _Image(Fields):
    image_url: Annotated[_Url, BeforeValidator(lambda url: url if isinstance(url, dict) else {"url": url})] = ABSENT

    def part(self) -> dict[str, Any]:
        return fields.image(self.image_url.url)


_Said = Annotated[Text, Tag("=text")] | Annotated[Refusal, Tag("=refusal")]


class _Message(Fields):
    role: str = ABSENT
    content: Content[Annotated[_Said | Annotated[_Image, Tag("=image")], _KNOWN_PART]] = None

    def message(self) -> Message:
        return {"role": self.role, "content": fields.content_of(self.content)}


class _ToolMessage(_Message):
    tool_call_id: str | None = None
    name: str | None = None

    def message(self) -> Message:
        named = {"tool_call_id": self.tool_call_id, "name": self.name}
        return {**super().message(), **{name: value for name, value in named.items() if value is not None}}


class _Function(Fields):
    name: fields.Name = ABSENT
    arguments: fields.Arguments = ABSENT


class _FunctionCall(Fields):
    id: str | None = None
    function: _Function = ABSENT

    def call(self) -> dict[str, Any]:
        return fields.call(self.id, self.function.name, self.function.arguments)


class _Custom(Fields):
    name: fields.Name = ABSENT
    input: str | None = None


class _CustomCall(Fields):
    id: str | None = None
    custom: _Custom = ABSENT

    def call(self) -> dict[str, Any]:
        return fields.call(self.id, self.custom.name, fields.json_text({"input": self.custom.input or ""}))


_Call = Annotated[
    Annotated[_FunctionCall, Tag("=function")] | Annotated[_CustomCall, Tag("=custom")],
    fields.by("type", {"custom": "custom"}, "function or custom", other="function"),
]


class _AssistantMessage(Fields):
    content: Content[Annotated[_Said, _KNOWN_PART]] = None
    reasoning_content: str | None = None
    tool_calls: Array[_Call] = ABSENT

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": fields.content_of(self.content)}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [each.call() for each in self.tool_calls]
        return message


_AnyMessage = Annotated[
    Annotated[_AssistantMessage, Tag("=assistant")]
    | Annotated[_ToolMessage, Tag("=tool")]
    | Annotated[_Message, Tag("=other")],
    fields.by("role", _ROLES, f"one of {', '.join(ROLES)}"),
]


class _Tool(Fields):
    function: fields.Function = ABSENT


_AnyTool = Annotated[
    Annotated[_Tool, Tag("=function")] | Annotated[Other, Tag("=other")],
    fields.by("type", {"function": "function"}, "function", other="other"),
]


class _StreamOptions(Fields):
    include_usage: bool | None = None


def _count(number: int) -> int:
    if not 1 <= number <= MOST_COMPLETIONS:
        raise wrong(f"a number from 1 to {MOST_COMPLETIONS}")
    return number


class _Body(Fields, extra="allow"):
    functions: _Unused = None
    function_call: _Unused = None
    messages: fields.Messages[_AnyMessage] = ABSENT
    tools: fields.Tools[_AnyTool] = ABSENT
    n: Annotated[fields.WholeNumber, AfterValidator(_count)] | None = None
    max_completion_tokens: fields.MostTokens | None = None
    max_tokens: Annotated[fields.MostTokens | None, fields.unless("max_completion_tokens")] = None
    stream_options: _StreamOptions | None = None
    stop: fields.Stops = ABSENT
    logprobs: bool | None = None
    tool_choice: object = None
    parallel_tool_calls: object = None
    response_format: object = None
    stream: bool | None = None
    model: str | None = None

    def request(self) -> ChatRequest:
        unenforced = [*fields.set_fields(self.model_extra or {}, _UNENFORCED), *self._unenforced_choices()]
        tools = []
        for each in self.tools:
            if isinstance(each, Other):
                unenforced.append(fields.counted("tools", each.type))
            else:
                tools.append(each.function.tool())
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return ChatRequest(
            messages=[each.message() for each in self.messages],
            tools=tools,
            n=self.n or 1,
            stop=tuple(self.stop),
            max_tokens=most,
            logprobs=bool(self.logprobs),
            reads_calls=self.tool_choice != "none",
            stream=bool(self.stream),
            include_usage=bool(self.stream_options and self.stream_options.include_usage),
            model=self.model or "",
            unenforced=unenforced,
        )

    def _unenforced_choices(self) -> Iterator[str]:
        if self.tool_choice not in (None, "auto", "none"):
            yield "tool_choice"
        if self.parallel_tool_calls is False:
            yield "parallel_tool_calls"
        if self.response_format not in (None, {"type": "text"}):
            yield "response_format"


class ChatCompletions:
    """The protocol of chat completions."""

    name = "chat"
    """Name of the protocol in records."""

    def read(self, body: Mapping[str, Any], sent: Sent = nothing_sent) -> ChatRequest:
        """Read a request.

        Raises:
            RefusedError: A field does not fit the protocol, or requests something unsupported.
        """
        return read_as(_Body, body).request()

    def answer(self, request: ChatRequest, completions: Sequence[Completion], created: int) -> dict[str, Any]:
        """Return the body of the answer."""
        choices = [
            {
                "index": index,
                "message": _answered(each),
                "logprobs": _logprobs(request, each),
                "finish_reason": each.finish,
            }
            for index, each in enumerate(completions)
        ]
        head = _head(request, completions, created, "chat.completion")
        return {**head, "choices": choices, "usage": _usage(completions)}

    def events(self, request: ChatRequest, completions: Sequence[Completion], created: int) -> Iterator[bytes]:
        """Return the answer as a stream."""
        head = _head(request, completions, created, "chat.completion.chunk")
        usage: dict[str, Any] = {"usage": None} if request.include_usage else {}
        for index, each in enumerate(completions):
            found = _logprobs(request, each)
            for delta in _deltas(each):
                choice = {"index": index, "delta": delta, "logprobs": found, "finish_reason": None}
                yield sse.data({**head, "choices": [choice], **usage})
                found = None
            last = {"index": index, "delta": {}, "logprobs": None, "finish_reason": each.finish}
            yield sse.data({**head, "choices": [last], **usage})
        if request.include_usage:
            yield sse.data({**head, "choices": [], "usage": _usage(completions)})
        yield sse.DONE

    def ping(self) -> bytes:
        """Return bytes that keep the connection alive."""
        return sse.COMMENT

    def error(self, refused: RefusedError) -> dict[str, Any]:
        """Return the body of an error."""
        return error_body(refused)

    def error_events(self, refused: RefusedError) -> bytes:
        """Return an error for a stream that has begun."""
        return sse.data(error_body(refused))


def error_body(refused: RefusedError) -> dict[str, Any]:
    """Return the body of an error, as all of OpenAI's protocols have it."""
    kind = _ERROR_TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    return {"error": {"message": refused.message, "type": kind, "param": None, "code": refused.code}}


def _head(request: ChatRequest, completions: Sequence[Completion], created: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{completions[0].id}", "object": kind, "created": created, "model": request.model}


def _calls(completion: Completion) -> list[dict[str, Any]]:
    return [
        {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
        for each in completion.calls
    ]


def _answered(completion: Completion) -> Message:
    message: Message = {"role": "assistant", "content": completion.content or None, "refusal": None}
    if completion.reasoning:
        message["reasoning_content"] = completion.reasoning
    if completion.calls:
        message["tool_calls"] = _calls(completion)
    else:
        message["content"] = completion.content
    return message


def _deltas(completion: Completion) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": "" if not completion.calls else None}
    if completion.reasoning:
        yield {"reasoning_content": completion.reasoning}
    if completion.content:
        yield {"content": completion.content}
    for index, call in enumerate(_calls(completion)):
        yield {"tool_calls": [{"index": index, **call}]}


def _logprobs(request: ChatRequest, completion: Completion) -> dict[str, Any] | None:
    return {"content": sse.logprobs(completion), "refusal": None} if request.logprobs else None


def _usage(completions: Sequence[Completion]) -> dict[str, int]:
    prompt, completion = sse.total(completions)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's messages.

https://docs.anthropic.com/en/api/messages and …/build-with-claude/streaming.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Tag

from verl_multiturn.chat.codec import Message
from verl_multiturn.proxy.protocols import events as sse
from verl_multiturn.proxy.protocols import fields
from verl_multiturn.proxy.protocols.fields import ABSENT, Content, ContentPart, Fields, Other, Text
from verl_multiturn.proxy.protocols.requests import (
    ChatRequest,
    Completion,
    ContextLengthError,
    RefusedError,
    Sent,
    nothing_sent,
)
from verl_multiturn.proxy.protocols.validation import read_as

_ROLES = ("user", "assistant", "system")  # Claude Code sends `system` among the messages
_UNENFORCED = ("temperature", "top_p", "top_k", "thinking", "output_config", "output_format", "context_management")
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
_BILLING = "x-anthropic-billing-header:"
"""How the block of Claude Code's system prompt begins that changes with every request and has no meaning."""


_BLOCKS = {name: name for name in ("text", "image", "document", "tool_result")}
_KNOWN_BLOCK = fields.by("type", _BLOCKS, "text, image, document or tool_result", "send its text")
_NOT_FETCHED = "nothing is fetched; send it so"


class _Base64(Fields):
    media_type: Annotated[str, AfterValidator(lambda kind: fields.image_kind(kind.removeprefix("image/")))] = ABSENT
    data: fields.Base64 = ABSENT


class _Image(Fields):
    source: Annotated[
        Annotated[_Base64, Tag("=base64")], fields.by("type", {"base64": "base64"}, "base64", _NOT_FETCHED)
    ] = ABSENT

    def part(self) -> dict[str, Any]:
        return fields.image(f"data:image/{self.source.media_type};base64,{self.source.data}")


class _Plain(Fields):
    data: str = ABSENT


class _Document(Fields):
    source: Annotated[Annotated[_Plain, Tag("=text")], fields.by("type", {"text": "text"}, "text", _NOT_FETCHED)] = (
        ABSENT
    )

    def part(self) -> str:
        return self.source.data


_Media = Annotated[Text, Tag("=text")] | Annotated[_Image, Tag("=image")] | Annotated[_Document, Tag("=document")]


class _ToolResult(Fields):
    tool_use_id: str | None = None
    content: Content[Annotated[_Media, _KNOWN_BLOCK]] = None

    def message(self) -> Message:
        named = {} if self.tool_use_id is None else {"tool_call_id": self.tool_use_id}
        return {"role": "tool", **named, "content": fields.content_of(self.content)}


class _Message(Fields):
    role: str = ABSENT
    content: Content[Annotated[_Media | Annotated[_ToolResult, Tag("=tool_result")], _KNOWN_BLOCK]] = None

    def messages(self, unenforced: list[str]) -> list[Message]:
        """Return the messages that this one becomes: a tool's result is a message of its own."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        messages: list[Message] = []
        parts: list[ContentPart] = []
        for block in self.content or ():
            if not isinstance(block, _ToolResult):
                parts.append(block)
                continue
            if parts:
                messages.append({"role": self.role, "content": fields.content_of(parts)})
                parts = []
            messages.append(block.message())
        if parts or not messages:
            messages.append({"role": self.role, "content": fields.content_of(parts)})
        return messages


class _Thinking(Fields):
    thinking: str = ABSENT


class _ToolUse(Fields):
    id: str | None = None
    name: fields.Name = ABSENT
    input: dict[str, Any] = ABSENT


_Said = Annotated[
    Annotated[Text, Tag("=text")]
    | Annotated[_Thinking, Tag("=thinking")]
    | Annotated[_ToolUse, Tag("=tool_use")]
    | Annotated[Other, Tag("=other")],
    fields.by("type", {name: name for name in ("text", "thinking", "tool_use")}, "text", other="other"),
]


class _AssistantMessage(Fields):
    content: Content[_Said] = None

    def messages(self, unenforced: list[str]) -> list[Message]:
        """Return the message of the template, in a list."""
        if isinstance(self.content, str):
            return [{"role": "assistant", "content": self.content}]
        texts: list[Text] = []
        reasoning: list[str] = []
        calls = []
        for block in self.content or ():
            if isinstance(block, Text):
                texts.append(block)
            elif isinstance(block, _Thinking):
                reasoning.append(block.thinking)
            elif isinstance(block, _ToolUse):
                calls.append(fields.call(block.id, block.name, fields.json_text(block.input)))
            elif block.type != "redacted_thinking":
                unenforced.append(fields.counted("content", block.type))
        message: Message = {"role": "assistant", "content": fields.content_of(texts)}
        if reasoning:
            message["reasoning_content"] = "\n".join(reasoning)
        if calls:
            message["tool_calls"] = calls
        return [message]


_AnyMessage = Annotated[
    Annotated[_Message, Tag("=other")] | Annotated[_AssistantMessage, Tag("=assistant")],
    fields.by("role", {**dict.fromkeys(_ROLES, "other"), "assistant": "assistant"}, f"one of {', '.join(_ROLES)}"),
]


class _Tool(Fields):
    name: fields.Name = ABSENT
    description: str | None = None
    input_schema: dict[str, Any] | None = None


def _tool_tag(tool: Any) -> str | None:
    if not isinstance(tool, dict):
        return None
    return "=custom" if tool.get("type") in (None, "custom") else "=other"


_AnyTool = Annotated[
    Annotated[_Tool, Tag("=custom")] | Annotated[Other, Tag("=other")], fields.choice(_tool_tag, "custom", field="type")
]
_SystemText = Annotated[Annotated[Text, Tag("=text")], fields.by("type", {"text": "text"}, "text")]


class _ToolChoice(Fields):
    type: object = None
    disable_parallel_tool_use: object = None


class _Body(Fields, extra="allow"):
    messages: fields.Messages[_AnyMessage] = ABSENT
    system: Content[_SystemText] = None
    tool_choice: _ToolChoice | None = None
    tools: fields.Tools[_AnyTool] = ABSENT
    stop_sequences: fields.Stops = ABSENT
    max_tokens: fields.MostTokens | None = None
    stream: bool | None = None
    model: str | None = None

    def request(self) -> ChatRequest:
        unenforced = fields.set_fields(self.model_extra or {}, _UNENFORCED)
        messages = self._system()
        for each in self.messages:
            messages += each.messages(unenforced)
        if messages[-1]["role"] == "assistant":
            raise RefusedError(
                400,
                "invalid_request_error",
                "messages: the last one is of the assistant, and the beginning of a turn cannot be given; end with a "
                "message of the user",
            )
        choice = self.tool_choice or _ToolChoice(type="auto")
        if choice.type not in ("auto", "none"):
            unenforced.append("tool_choice")
        if choice.disable_parallel_tool_use is not None:
            unenforced.append("tool_choice.disable_parallel_tool_use")
        unenforced += [fields.counted("tools", tool.type) for tool in self.tools if isinstance(tool, Other)]
        tools = [tool for tool in self.tools if isinstance(tool, _Tool)]
        return ChatRequest(
            messages=messages,
            protocol=AnthropicMessages.name,
            tools=[fields.tool(tool.name, tool.description, tool.input_schema) for tool in tools],
            stop=tuple(self.stop_sequences),
            max_tokens=self.max_tokens,
            reads_calls=choice.type != "none",
            stream=bool(self.stream),
            model=self.model or "",
            unenforced=unenforced,
        )

    def _system(self) -> list[Message]:
        if self.system is None or isinstance(self.system, str):
            return [] if self.system is None else [{"role": "system", "content": self.system}]
        kept = [block for block in self.system if not block.text.startswith(_BILLING)]
        return [{"role": "system", "content": fields.content_of(kept)}] if kept else []


class AnthropicMessages:
    """The protocol of messages."""

    name = "messages"
    """Name of the protocol in records."""

    def read(self, body: Mapping[str, Any], sent: Sent = nothing_sent) -> ChatRequest:
        """Read a request.

        Raises:
            RefusedError: A field does not fit the protocol, or requests something unsupported.
        """
        return read_as(_Body, body).request()

    def answer(self, request: ChatRequest, completions: Sequence[Completion], created: int) -> dict[str, Any]:
        """Return the body of the answer."""
        (completion,) = completions
        stop_reason, stop = _stop(completion)
        return {
            **_head(request, completion),
            "content": _blocks(completion),
            "stop_reason": stop_reason,
            "stop_sequence": stop,
            "usage": _usage(completion, completion.completion_tokens),
        }

    def events(self, request: ChatRequest, completions: Sequence[Completion], created: int) -> Iterator[bytes]:
        """Return the answer as a stream."""
        (completion,) = completions
        begun = {**_head(request, completion), "content": [], "stop_reason": None, "stop_sequence": None}
        begun["usage"] = _usage(completion, 0)
        yield sse.event({"type": "message_start", "message": begun})
        for index, block in enumerate(_blocks(completion)):
            empty, deltas = _pieces(block, completion)
            yield sse.event({"type": "content_block_start", "index": index, "content_block": empty})
            for delta in deltas:
                yield sse.event({"type": "content_block_delta", "index": index, "delta": delta})
            yield sse.event({"type": "content_block_stop", "index": index})
        stop_reason, stop = _stop(completion)
        yield sse.event(
            {
                "type": "message_delta",
                "delta": {"stop_reason": stop_reason, "stop_sequence": stop},
                "usage": _usage(completion, completion.completion_tokens),
            }
        )
        yield sse.event({"type": "message_stop"})

    def ping(self) -> bytes:
        """Return bytes that keep the connection alive."""
        return sse.event({"type": "ping"})

    def error(self, refused: RefusedError) -> dict[str, Any]:
        """Return the body of an error."""
        kind = _ERROR_TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
        message = refused.message
        if isinstance(refused, ContextLengthError):  # the words by which Claude Code knows that it must compact
            message = f"prompt is too long: {refused.tokens} tokens > {refused.most} maximum"
        return {"type": "error", "error": {"type": kind, "message": message}}

    def error_events(self, refused: RefusedError) -> bytes:
        """Return an error for a stream that has begun."""
        return sse.event(self.error(refused))


def token_count(tokens: int) -> dict[str, int]:
    """Return the answer of `/v1/messages/count_tokens`."""
    return {"input_tokens": tokens}


def _head(request: ChatRequest, completion: Completion) -> dict[str, Any]:
    return {"id": f"msg_{completion.id}", "type": "message", "role": "assistant", "model": request.model}


def _blocks(completion: Completion) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if completion.reasoning:
        # Clients send a block back only with a signature.
        blocks.append({"type": "thinking", "thinking": completion.reasoning, "signature": completion.id})
    if completion.content or not completion.calls:
        blocks.append({"type": "text", "text": completion.content})
    for call in completion.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": sse.arguments_of(call)})
    return blocks


def _pieces(block: dict[str, Any], completion: Completion) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as it begins, and the additions to it."""
    if block["type"] == "text":
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
        return {"type": "thinking", "thinking": "", "signature": ""}, deltas
    arguments = next(call.arguments for call in completion.calls if call.id == block["id"])
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _stop(completion: Completion) -> tuple[str, str | None]:
    """Return `stop_reason` and `stop_sequence`."""
    if completion.finish == "stop" and completion.stop is not None:
        return "stop_sequence", completion.stop
    return _STOP_REASONS[completion.finish], None


def _usage(completion: Completion, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": completion.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output_tokens,
    }

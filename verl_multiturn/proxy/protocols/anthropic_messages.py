"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's messages.

https://docs.anthropic.com/en/api/messages and …/build-with-claude/streaming.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_multiturn.chat.codec import Message
from verl_multiturn.proxy.protocols import events as sse
from verl_multiturn.proxy.protocols import reading
from verl_multiturn.proxy.protocols.requests import (
    ChatRequest,
    Completion,
    ContextLengthError,
    RefusedError,
    Sent,
    nothing_sent,
)

_ROLES = ("user", "assistant", "system")  # Claude Code sends `system` among the messages
_UNENFORCED = ("temperature", "top_p", "top_k", "thinking", "output_config", "output_format", "context_management")
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
_BILLING = "x-anthropic-billing-header:"
"""How the block of Claude Code's system prompt begins that changes with every request and says nothing."""


class AnthropicMessages:
    """The protocol of messages."""

    def read(self, body: Mapping[str, Any], sent: Sent = nothing_sent) -> ChatRequest:
        """Read a request.

        Raises:
            RefusedError: A field holds something else than the protocol says, or asks for what cannot be had.
        """
        reading.check_depth(body)
        given = reading.array(body.get("messages"), "messages", reading.MOST_MESSAGES)
        if not given:
            raise reading.wrong("messages", body.get("messages"), "a list with at least one message")
        unenforced = reading.set_fields(body, _UNENFORCED)
        messages = _system(body.get("system"))
        for index, each in enumerate(given):
            messages += _messages(each, f"messages[{index}]", unenforced)
        if not messages or messages[-1]["role"] == "assistant":
            raise RefusedError(
                400,
                "invalid_request_error",
                "messages: the last one is of the assistant, and the beginning of a turn cannot be given; end with a "
                "message of the user",
            )
        choice = body.get("tool_choice")
        choice = {"type": "auto"} if choice is None else reading.mapping(choice, "tool_choice")
        if choice.get("type") not in ("auto", "none"):
            unenforced.append("tool_choice")
        unenforced += reading.set_fields(choice, ("disable_parallel_tool_use",), "tool_choice.")
        return ChatRequest(
            messages=messages,
            tools=_tools(body.get("tools"), unenforced),
            stop=reading.stop_texts(body.get("stop_sequences"), "stop_sequences"),
            max_tokens=reading.most_tokens(body.get("max_tokens"), "max_tokens"),
            reads_calls=choice.get("type") != "none",
            stream=reading.flag(body.get("stream"), "stream"),
            model=reading.text_or_empty(body.get("model"), "model"),
            unenforced=unenforced,
        )

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


def _system(value: Any) -> list[Message]:
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "system", "content": value}]
    blocks = []
    for index, each in enumerate(reading.array(value, "system")):
        where = f"system[{index}]"
        block = reading.mapping(each, where)
        if block.get("type") != "text":
            raise reading.wrong(f"{where}.type", block.get("type"), "text")
        blocks.append(reading.text(block.get("text"), f"{where}.text"))
    kept = [block for block in blocks if not block.startswith(_BILLING)]
    return [reading.user_or_system("system", kept)] if kept else []


def _messages(value: Any, where: str, unenforced: list[str]) -> list[Message]:
    """Return the messages that one message becomes: a tool's result is a message of its own."""
    message = reading.mapping(value, where)
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise reading.wrong(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = [reading.mapping(each, f"{where}.content") for each in reading.array(content, f"{where}.content")]
    if role == "assistant":
        return [_assistant(blocks, f"{where}.content", unenforced)]
    messages: list[Message] = []
    parts: list[str | dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            parts.append(_part(block, f"{where}.content[{index}]"))
            continue
        if parts:
            messages.append(reading.user_or_system(role, parts))
            parts = []
        messages.append(_tool_result(block, f"{where}.content[{index}]"))
    if parts or not messages:
        messages.append(reading.user_or_system(role, parts))
    return messages


def _assistant(blocks: list[dict[str, Any]], where: str, unenforced: list[str]) -> Message:
    texts: list[str | dict[str, Any]] = []
    reasoning: list[str] = []
    calls = []
    for index, block in enumerate(blocks):
        kind, here = block.get("type"), f"{where}[{index}]"
        if kind == "text":
            texts.append(reading.text(block.get("text"), f"{here}.text"))
        elif kind == "thinking":
            reasoning.append(reading.text(block.get("thinking"), f"{here}.thinking"))
        elif kind == "tool_use":
            arguments = reading.mapping(block.get("input"), f"{here}.input")
            calls.append(reading.call(block.get("id"), block.get("name"), arguments, here))
        elif kind != "redacted_thinking":
            unenforced.append(reading.counted("content", kind))
    message: Message = {"role": "assistant", "content": reading.content_of(texts)}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_result(block: dict[str, Any], where: str) -> Message:
    content = block.get("content")
    read: Message = {"role": "tool"}
    if block.get("tool_use_id") is not None:
        read["tool_call_id"] = reading.text(block["tool_use_id"], f"{where}.tool_use_id")
    if isinstance(content, str):
        return {**read, "content": content}
    parts = [
        _part(reading.mapping(each, f"{where}.content"), f"{where}.content[{index}]")
        for index, each in enumerate(reading.array(content, f"{where}.content"))
    ]
    return {**read, "content": reading.content_of(parts)}


def _part(block: dict[str, Any], where: str) -> str | dict[str, Any]:
    """Return the text or the image in a block of the user's or of a tool's result."""
    kind = block.get("type")
    if kind == "text":
        return reading.text(block.get("text"), f"{where}.text")
    if kind in ("image", "document"):
        source = reading.mapping(block.get("source"), f"{where}.source")
        if kind == "document" and source.get("type") == "text":
            return reading.text(source.get("data"), f"{where}.source.data")
        if kind == "image" and source.get("type") == "base64":
            media = reading.text(source.get("media_type"), f"{where}.source.media_type")
            return reading.image(media.removeprefix("image/"), source.get("data"), f"{where}.source")
        expected = "base64" if kind == "image" else "text"
        raise reading.wrong(f"{where}.source.type", source.get("type"), expected, "nothing is fetched; send it so")
    raise reading.wrong(f"{where}.type", kind, "text, image, document or tool_result", "send its text")


def _tools(value: Any, unenforced: list[str]) -> list[dict[str, Any]]:
    """Return the schemas of the client's own tools; those of other kinds are added to `unenforced`."""
    schemas = []
    for index, each in enumerate(reading.array(value, "tools", reading.MOST_TOOLS)):
        where = f"tools[{index}]"
        tool = reading.mapping(each, where)
        if tool.get("type") not in (None, "custom"):
            unenforced.append(reading.counted("tools", tool["type"]))
            continue
        schemas.append(
            reading.function_schema(tool.get("name"), tool.get("description"), tool.get("input_schema"), where)
        )
    return schemas


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
    """Return a block as it begins, and what is added to it."""
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

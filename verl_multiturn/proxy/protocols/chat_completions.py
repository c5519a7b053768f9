"""`POST /v1/chat/completions`: OpenAI's chat completions.

https://platform.openai.com/docs/api-reference/chat; `reasoning_content` as other servers of open models have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from verl_multiturn.chat.codec import Message
from verl_multiturn.chat.messages import ROLES
from verl_multiturn.proxy.protocols import events as sse
from verl_multiturn.proxy.protocols import reading
from verl_multiturn.proxy.protocols.requests import ChatRequest, Completion, RefusedError, Sent, nothing_sent

_UNENFORCED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "top_logprobs", "prediction", "audio", "reasoning_effort", "verbosity", "web_search_options",
    "chat_template_kwargs",
)  # fmt: skip
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


class ChatCompletions:
    """The protocol of chat completions."""

    def read(self, body: Mapping[str, Any], sent: Sent = nothing_sent) -> ChatRequest:
        """Read a request.

        Raises:
            RefusedError: A field holds something else than the protocol says, or asks for what cannot be had.
        """
        reading.check_depth(body)
        for name in ("functions", "function_call"):
            if body.get(name) is not None:
                raise reading.wrong(name, body[name], "nothing: the field is deprecated", "use tools and tool_choice")
        messages = reading.array(body.get("messages"), "messages", reading.MOST_MESSAGES)
        if not messages:
            raise reading.wrong("messages", body.get("messages"), "a list with at least one message")
        tools, unenforced = _tools(body.get("tools"))
        n = reading.whole_number(body.get("n"), "n")
        if n is not None and not 1 <= n <= reading.MOST_COMPLETIONS:
            raise reading.wrong("n", n, f"a number from 1 to {reading.MOST_COMPLETIONS}")
        most = reading.most_tokens(body.get("max_completion_tokens"), "max_completion_tokens")
        if most is None:
            most = reading.most_tokens(body.get("max_tokens"), "max_tokens")
        options = body.get("stream_options")
        options = {} if options is None else reading.mapping(options, "stream_options")
        return ChatRequest(
            messages=[_message(each, f"messages[{index}]") for index, each in enumerate(messages)],
            tools=tools,
            n=n or 1,
            stop=reading.stop_texts(body.get("stop"), "stop"),
            max_tokens=most,
            logprobs=reading.flag(body.get("logprobs"), "logprobs"),
            reads_calls=body.get("tool_choice") != "none",
            stream=reading.flag(body.get("stream"), "stream"),
            include_usage=reading.flag(options.get("include_usage"), "stream_options.include_usage"),
            model=reading.text_or_empty(body.get("model"), "model"),
            unenforced=[*reading.set_fields(body, _UNENFORCED), *_unenforced_choices(body), *unenforced],
        )

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


def _unenforced_choices(body: Mapping[str, Any]) -> Iterator[str]:
    if body.get("tool_choice") not in (None, "auto", "none"):
        yield "tool_choice"
    if body.get("parallel_tool_calls") is False:
        yield "parallel_tool_calls"
    if body.get("response_format") not in (None, {"type": "text"}):
        yield "response_format"


def _tools(value: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the schemas of the functions, and the names under which the other kinds of tools are counted."""
    schemas, left = [], []
    for index, each in enumerate(reading.array(value, "tools", reading.MOST_TOOLS)):
        where = f"tools[{index}]"
        tool = reading.mapping(each, where)
        if tool.get("type") != "function":
            left.append(reading.counted("tools", tool.get("type")))
            continue
        function = reading.mapping(tool.get("function"), f"{where}.function")
        schemas.append(
            reading.function_schema(
                function.get("name"), function.get("description"), function.get("parameters"), f"{where}.function"
            )
        )
    return schemas, left


def _message(value: Any, where: str) -> Message:
    message = reading.mapping(value, where)
    role = message.get("role")
    if role not in ROLES:
        raise reading.wrong(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    content = reading.content(message.get("content"), f"{where}.content", partial(_part, role=role))
    read: Message = {"role": role, "content": content}
    if role == "tool":
        for name in ("tool_call_id", "name"):
            if message.get(name) is not None:
                read[name] = reading.text(message[name], f"{where}.{name}")
    if role == "assistant":
        reasoning = message.get("reasoning_content")
        if reasoning is not None:
            read["reasoning_content"] = reading.text(reasoning, f"{where}.reasoning_content")
        calls = reading.array(message.get("tool_calls"), f"{where}.tool_calls")
        if calls:
            read["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return read


def _part(value: Any, where: str, role: str) -> str | dict[str, Any]:
    part = reading.mapping(value, where)
    kind = part.get("type")
    if kind in ("text", "refusal"):
        return reading.text(part.get(kind), f"{where}.{kind}")
    if kind == "image_url" and role != "assistant":
        address = part.get("image_url")
        url = address.get("url") if isinstance(address, dict) else address
        return reading.image_of_url(url, f"{where}.image_url.url")
    raise reading.wrong(f"{where}.type", kind, "text or image_url", "send other media as text or images")


def _call(value: Any, where: str) -> dict[str, Any]:
    given = reading.mapping(value, where)
    if given.get("type") == "custom":
        custom = reading.mapping(given.get("custom"), f"{where}.custom")
        arguments: Any = {"input": reading.text_or_empty(custom.get("input"), f"{where}.custom.input")}
        return reading.call(given.get("id"), custom.get("name"), arguments, f"{where}.custom")
    function = reading.mapping(given.get("function"), f"{where}.function")
    return reading.call(given.get("id"), function.get("name"), function.get("arguments"), f"{where}.function")


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

"""Messages of the clients of `benchmarks.proxy_fuzz`, in the words of each protocol. It imports no protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PATHS = (CHAT, RESPONSES, MESSAGES)

Message = dict[str, Any]


@dataclass(frozen=True)
class Received:
    """A completion, as a client got it."""

    id: str
    """Without the protocol's prefix."""
    content: str
    reasoning: str
    calls: tuple[tuple[str, str, str], ...]
    """Id, name and arguments of each call."""
    usage: tuple[int, int] | None
    """Tokens of the prompt and of all completions of the answer."""

    @property
    def text(self) -> str:
        """Return all texts attributed to the model."""
        return "\n".join([self.content, self.reasoning, *(f"{name} {given}" for _, name, given in self.calls)])


@dataclass(frozen=True)
class Ask:
    """A request, before it is written in the words of a protocol."""

    path: str
    messages: Sequence[Message]
    """In the form of chat completions."""
    tools: Sequence[Mapping[str, Any]] = ()
    n: int = 1
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    logprobs: bool = False
    forbids_calls: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further fields, as they are."""
    ids: Mapping[str, str] = field(default_factory=dict)
    """Ids of calls that the client writes in the place of the session's."""
    refers: Mapping[int, str] = field(default_factory=dict)
    """Completions whose items a client of the Responses API names by their ids, by the index of their message."""

    def body(self) -> bytes:
        """Return the body of the request."""
        write = {CHAT: _chat, RESPONSES: _responses, MESSAGES: _messages}[self.path]
        asked = replace(self, messages=[renamed(message, self.ids) for message in self.messages])
        return json.dumps({"model": "m", "stream": self.stream, **write(asked), **self.more}).encode()


def renamed(message: Message, ids: Mapping[str, str]) -> Message:
    """Return a message with other ids of calls."""
    if message.get("tool_calls"):
        calls = [
            {**call, "id": ids.get(call["id"], call["id"])} if "id" in call else call for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}
    if message.get("tool_call_id"):
        return {**message, "tool_call_id": ids.get(message["tool_call_id"], message["tool_call_id"])}
    return message


def _chat(ask: Ask) -> dict[str, Any]:
    limit = {} if ask.max_tokens is None else {"max_completion_tokens": ask.max_tokens}
    usage = {"stream_options": {"include_usage": True}} if ask.stream else {}
    choice = {"tool_choice": "none"} if ask.forbids_calls else {}
    return {
        "messages": list(ask.messages),
        "tools": list(ask.tools) or None,
        "n": ask.n,
        "stop": list(ask.stop) or None,
        "logprobs": ask.logprobs,
        **limit,
        **usage,
        **choice,
    }


def _responses(ask: Ask) -> dict[str, Any]:
    choice = {"tool_choice": "none"} if ask.forbids_calls else {}
    items = [item for index, message in enumerate(ask.messages) for item in _items(message, ask.refers.get(index))]
    tools = [{"type": "function", "strict": None, **tool["function"]} for tool in ask.tools]
    return {"input": items, "tools": tools, "max_output_tokens": ask.max_tokens, "store": False, **choice}


def _items(message: Message, completion: str | None) -> Iterator[dict[str, Any]]:
    role, content = message["role"], message.get("content")
    if completion is not None:
        calls = message.get("tool_calls") or []
        names = [f"rs_{completion}"] if message.get("reasoning_content") else []
        names += [f"msg_{completion}"] if content or not calls else []
        names += [f"fc_{call['id']}" for call in calls]
        yield from ({"type": "item_reference", "id": name} for name in names)
        return
    if role == "tool":
        yield {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": _text(content)}
        return
    if role != "assistant":
        yield {"type": "message", "role": role, "content": [{"type": "input_text", "text": _text(content)}]}
        return
    if message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": message["reasoning_content"]}
        yield {"type": "reasoning", "id": "rs_1", "summary": [], "content": [part]}
    calls = message.get("tool_calls") or []
    if _text(content) or not calls:
        yield {"type": "message", "role": role, "content": [{"type": "output_text", "text": _text(content)}]}
    for call in calls:
        yield {"type": "function_call", "call_id": call.get("id"), **call["function"]}


def _messages(ask: Ask) -> dict[str, Any]:
    given = list(ask.messages)
    system = [given.pop(0)] if given[0]["role"] in ("system", "developer") else []
    return {
        **({"system": _text(system[0].get("content"))} if system else {}),
        "messages": [_blocks(message) for message in given],
        "tools": [
            {
                "name": tool["function"]["name"],
                "description": tool["function"].get("description"),
                "input_schema": tool["function"]["parameters"],
            }
            for tool in ask.tools
        ],
        "stop_sequences": list(ask.stop),
        "max_tokens": ask.max_tokens,
        **({"tool_choice": {"type": "none"}} if ask.forbids_calls else {}),
    }


def _blocks(message: Message) -> dict[str, Any]:
    role, text = message["role"], _text(message.get("content"))
    if role == "tool":
        result = {"type": "tool_result", "tool_use_id": message.get("tool_call_id"), "content": text}
        return {"role": "user", "content": [result]}
    if role != "assistant":
        return {"role": "system" if role == "developer" else role, "content": text}
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": "s"})
    if text:
        blocks.append({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}})
    for call in message.get("tool_calls") or []:
        function = call["function"]
        given = json.loads(function["arguments"] or "{}")
        blocks.append({"type": "tool_use", "id": call.get("id"), "name": function["name"], "input": given})
    return {"role": role, "content": blocks}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


class RefusedInStreamError(Exception):
    """An error that came as an event."""


def read(ask: Ask, body: bytes) -> list[Received]:
    """Return the completions in the whole body of an answer.

    Raises:
        RefusedInStreamError: It is a stream whose only event is an error.
        ValueError: It is not an answer, or not a stream that ended by its protocol.
    """
    try:
        if ask.path == CHAT:
            return _read_chat(_chat_of_stream(body) if ask.stream else json.loads(body))
        if ask.path == RESPONSES:
            return [_read_response(_response_of_stream(body) if ask.stream else json.loads(body))]
        return [_read_message(_message_of_stream(body) if ask.stream else json.loads(body))]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error} in {body[:300]!r}") from error


def _read_chat(value: Any) -> list[Received]:
    usage = value["usage"]
    found = []
    for choice in value["choices"]:
        said = choice["message"]
        calls = [
            (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in said.get("tool_calls", ())
        ]
        # All completions of one answer have the first one's id.
        own = value["id"].removeprefix("chatcmpl-") if choice["index"] == 0 else ""
        count = usage["prompt_tokens"], usage["completion_tokens"]
        found.append(Received(own, said.get("content") or "", said.get("reasoning_content", ""), tuple(calls), count))
    return found


def _read_response(value: Any) -> Received:
    content = reasoning = ""
    calls = []
    for item in value["output"]:
        if item["type"] == "reasoning":
            reasoning += item["content"][0]["text"]
        elif item["type"] == "message":
            content += item["content"][0]["text"]
        else:
            calls.append((item["call_id"], item["name"], item["arguments"]))
    usage = value["usage"]["input_tokens"], value["usage"]["output_tokens"]
    return Received(value["id"].removeprefix("resp_"), content, reasoning, tuple(calls), usage)


def _read_message(value: Any) -> Received:
    content = reasoning = ""
    calls = []
    for block in value["content"]:
        if block["type"] == "thinking":
            reasoning += block["thinking"]
        elif block["type"] == "text":
            content += block["text"]
        else:
            calls.append((block["id"], block["name"], json.dumps(block["input"])))
    usage = value["usage"]["input_tokens"], value["usage"]["output_tokens"]
    return Received(value["id"].removeprefix("msg_"), content, reasoning, tuple(calls), usage)


def _events(body: bytes) -> list[Any]:
    """Return the data of a stream's events."""
    found = []
    for event in body.decode().split("\n\n"):
        for line in event.split("\n"):
            if line.startswith("data: "):
                found.append(line if line == "data: [DONE]" else json.loads(line[6:]))
    found = [each for each in found if not isinstance(each, dict) or each.get("type") != "ping"]
    if isinstance(found[0], dict) and "error" in found[0]:
        raise RefusedInStreamError(json.dumps(found[0]))
    return found


def _chat_of_stream(body: bytes) -> Any:
    *chunks, done = _events(body)
    if done != "data: [DONE]":
        raise ValueError(f"the stream ends with {done!r}")
    messages: dict[int, Message] = {}
    usage = None
    for chunk in chunks:
        usage = chunk["usage"] or usage
        for choice in chunk["choices"]:
            said = messages.setdefault(choice["index"], {"content": ""})
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                said[name] = said.get(name, "") + (delta.get(name) or "")
            for call in delta.get("tool_calls", ()):
                said.setdefault("tool_calls", []).append(call)
    choices = [{"index": index, "message": message} for index, message in sorted(messages.items())]
    return {"id": chunks[0]["id"], "choices": choices, "usage": usage}


def _response_of_stream(body: bytes) -> Any:
    events = _events(body)
    response = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    numbers = [event["sequence_number"] for event in events]
    if events[-1]["type"] != "response.completed" or done != response["output"] or numbers != [*range(len(events))]:
        raise ValueError(f"the stream does not end as it should: {events[-1]}")
    return response


def _message_of_stream(body: bytes) -> Any:
    message: Any = None
    given: dict[int, str] = {}
    events = _events(body)
    for event in events:
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            for name in ("text", "thinking", "signature"):
                if name in delta:
                    block[name] += delta[name]
            given[event["index"]] = given.get(event["index"], "") + delta.get("partial_json", "")
        elif event["type"] == "message_delta":
            message["usage"] |= event["usage"]
    if events[-1]["type"] != "message_stop":
        raise ValueError(f"the stream ends with {events[-1]}")
    for index, block in enumerate(message["content"]):
        if block["type"] == "tool_use":
            block["input"] = json.loads(given[index])
    return message

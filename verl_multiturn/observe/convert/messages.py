"""Messages of records as other programs want them: calls with an object as arguments, contents as text."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from verl_multiturn.records.json_text import dumps, plain


class MessageCall(NamedTuple):
    """A call that a message of the model has."""

    id: str
    name: str
    arguments: dict[str, Any]


def asked_of(message: dict[str, Any]) -> list[MessageCall]:
    """Return the calls of a message. Arguments that are not an object are under `arguments`."""
    calls = message.get("tool_calls")
    return [_asked(call, number) for number, call in enumerate(calls if isinstance(calls, list) else [])]


def _asked(call: Any, number: int) -> MessageCall:
    call = call if isinstance(call, dict) else {}
    function = call.get("function") if isinstance(call.get("function"), dict) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # OpenAI's form
        try:
            read = json.loads(arguments)
        except (ValueError, RecursionError):
            read = None
        arguments = read if isinstance(read, dict) else arguments
    return MessageCall(
        str(call.get("id") or number),
        str(function.get("name") or ""),
        arguments if isinstance(arguments, dict) else {} if arguments is None else {"arguments": arguments},
    )


def parts_of(content: Any) -> list[str]:
    """Return the texts of a message's content; an image is named by its digest, since records do not keep it."""
    parts = content if isinstance(content, list) else [] if content is None else [content]
    return [_part(part) for part in parts]


def _part(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    return part if isinstance(part, str) else as_json(part)


def as_json(value: Any) -> str:
    """Return a value as a text of JSON."""
    return dumps(plain(value)).decode().rstrip("\n")

"""Messages in the form in which they are compared.

Agents echo a turn in other words than those that they got: without content instead of an empty one, with arguments that
were parsed and written again, without ids. Two messages are the same if their keys are equal, the reasoning that both
of them send is equal, and so are the targets of their ids (`renaming`). Marks of caching and unknown fields do not
count.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any, NamedTuple

import orjson

from verl_multiturn.chat.codec import Message
from verl_multiturn.chat.images import is_image
from verl_multiturn.chat.messages import SYSTEM_ROLES
from verl_multiturn.proxy.protocols.validation import without_halves

_MOST_EXACT = 20_000
"""Commas in arguments beyond which their numbers are not looked at: a million of them would take half a second."""


class CanonicalMessage(NamedTuple):
    """A message as it is compared."""

    key: Hashable
    """Role, text, and the calls' names and parsed arguments."""
    ids: tuple[str, ...] = ()
    """Ids of the calls, or of the call that is answered; empty where one of them was not sent."""
    reasoning: str = ""
    """Text of the reasoning; "" where it was not sent."""
    answers: int | None = None
    """Index of the answered call in its turn; None where it is not known."""

    def fits(self, other: CanonicalMessage) -> bool:
        """Return whether two messages with equal keys can be the same one, but for their ids."""
        if self.answers is not None and other.answers is not None and self.answers != other.answers:
            return False
        return not self.reasoning or not other.reasoning or self.reasoning == other.reasoning


def compared(message: Message, answers: int | None = None) -> CanonicalMessage:
    """Return a message of a request as it is compared.

    Args:
        message: The message.
        answers: Index of the call that it answers in the turn before it, if it is known (`answered_calls`).
    """
    role, text = message["role"], content_key(message.get("content"))
    if role == "assistant":
        calls = message.get("tool_calls") or ()
        functions = [call["function"] for call in calls]
        named = tuple((function["name"], arguments_key(function.get("arguments", ""))) for function in functions)
        ids = tuple(call.get("id") or "" for call in calls)
        return CanonicalMessage(
            (role, text, named), ids if all(ids) else (), (message.get("reasoning_content") or "").strip()
        )
    if role == "tool":
        answered = message.get("tool_call_id")
        return CanonicalMessage((role, text), (answered,) if answered else (), answers=answers)
    return CanonicalMessage(("system" if role in SYSTEM_ROLES else role, text))


def content_key(content: Any) -> Hashable:
    """Return a content as it is compared: null, "" and absent are the same, and so are a text and its parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Hashable] = []
    for part in content:
        if is_image(part):
            parts.append(("image", json.dumps(part.get("image_url", part.get("image")), sort_keys=True, default=id)))
            continue
        text = part if isinstance(part, str) else part.get("text") or ""
        if parts and isinstance(parts[-1], str):
            text = f"{parts.pop()}{text}"
        parts.append(text)
    return parts[0] if len(parts) == 1 else tuple(parts) or ""


def _is_whole(text: str) -> bool:
    """Return whether a JSON text has no half of a surrogate pair alone; orjson looks at a million escapes in 1 ms."""
    try:
        orjson.loads(text if "\\ud" in text or "\\uD" in text else "0")
    except orjson.JSONDecodeError:
        return False
    return True


def arguments_key(text: str) -> str:
    """Return a call's arguments as they are compared: parsed, so that blanks and the order of the keys do not count.

    Numbers are those of JavaScript, which drops a point without a fraction and has 53 bits. Halves of surrogate pairs
    are U+FFFD, as in a body that holds the arguments as an object. Arguments that are not JSON are compared as text,
    and so are the numbers of very many arguments.
    """
    try:
        given = text if _is_whole(text) else without_halves(text.encode()).decode()
        if text.count(",") > _MOST_EXACT:
            return orjson.dumps(orjson.loads(given), option=orjson.OPT_SORT_KEYS).decode()
        parsed = json.loads(given, parse_float=_number, parse_int=_number) if text.strip() else {}
        return json.dumps(parsed, sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return text


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() else value

"""Reading of a body, as the protocols share it: types, bounds, tools, parts of a content.

A client may send any JSON. Each function returns a value of the type in its name, or raises a `RefusedError` that names
the field, what it holds, what was expected, and what to do.

No image is fetched: only those that the body itself holds become parts.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from verl_multiturn.chat.codec import Message
from verl_multiturn.describe import show
from verl_multiturn.proxy.protocols.requests import RefusedError

MOST_DEPTH = 64
MOST_MESSAGES = 4096
MOST_TOOLS = 1024
MOST_COMPLETIONS = 128
MOST_STOPS = 64
_MOST_STOP_CHARACTERS = 256
_MOST_SHOWN = 100

_IMAGE_KINDS = ("png", "jpeg", "jpg", "gif", "webp")
_DATA_URL = re.compile(r"data:image/([a-z]{3,4});base64,")
# A kind becomes a part of a metric's name.
_KIND = re.compile(r"[a-z][a-z0-9_]{0,39}")


def check_depth(body: Mapping[str, Any]) -> None:
    """Refuse a body that is nested deeper than `MOST_DEPTH`; templates and renderers would fail on it."""
    level: list[Any] = [body]
    for _ in range(MOST_DEPTH + 1):
        below: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                below += value.values()
            elif isinstance(value, list):
                below += value
        if not below:
            return
        level = below
    raise _too_deep()


def _too_deep() -> RefusedError:
    return RefusedError(
        400, "invalid_request_error", f"the body is nested deeper than {MOST_DEPTH} levels; send a flatter one"
    )


def wrong(where: str, value: object, expected: str, todo: str = "send that") -> RefusedError:
    """Return the error for a value that is not what was expected."""
    return RefusedError(
        400, "invalid_request_error", f"{where}: got {show(value, _MOST_SHOWN)}, expected {expected}; {todo}"
    )


def mapping(value: Any, where: str) -> dict[str, Any]:
    """Return a value that must be an object."""
    if not isinstance(value, dict):
        raise wrong(where, value, "an object")
    return value


def text(value: Any, where: str) -> str:
    """Return a value that must be a text."""
    if not isinstance(value, str):
        raise wrong(where, value, "a text")
    return value


def text_or_empty(value: Any, where: str) -> str:
    """Return a value that may be a text or null; "" for null."""
    return "" if value is None else text(value, where)


def name_of(value: Any, where: str) -> str:
    """Return a value that must be a text and not empty."""
    if not isinstance(value, str) or not value:
        raise wrong(where, value, "a name")
    return value


def array(value: Any, where: str, most: int | None = None) -> list[Any]:
    """Return a value that must be a list, of at most `most` items; [] for null."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong(where, value, "a list")
    if most is not None and len(value) > most:
        raise RefusedError(
            400, "invalid_request_error", f"{where}: got {len(value)} items, expected at most {most}; send fewer"
        )
    return value


def flag(value: Any, where: str) -> bool:
    """Return a value that must be true or false; false for null."""
    if value is None:
        return False
    if not isinstance(value, bool):
        raise wrong(where, value, "true or false")
    return value


def whole_number(value: Any, where: str) -> int | None:
    """Return a value that must be a whole number; None for null. 2.0 is one."""
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong(where, value, "a whole number")
    return value


def most_tokens(value: Any, where: str) -> int | None:
    """Return the most tokens of a completion; None for null. A number below 1 is clamped to 1, never refused."""
    number = whole_number(value, where)
    return None if number is None else max(1, number)


def stop_texts(value: Any, where: str) -> tuple[str, ...]:
    """Return the texts at which a completion ends, from one text or a list."""
    texts = [value] if isinstance(value, str) else array(value, where, MOST_STOPS)
    for index, each in enumerate(texts):
        if not isinstance(each, str) or not 0 < len(each) <= _MOST_STOP_CHARACTERS:
            raise wrong(f"{where}[{index}]", each, f"a text of 1 to {_MOST_STOP_CHARACTERS} characters")
    return tuple(texts)


def set_fields(body: Mapping[str, Any], names: Iterable[str], prefix: str = "") -> list[str]:
    """Return those of `names` that the client has set, for `ChatRequest.unenforced`."""
    return [prefix + name for name in names if body.get(name) is not None]


def counted(prefix: str, kind: Any) -> str:
    """Return the name under which something of an unknown kind is counted."""
    return f"{prefix}.{kind if isinstance(kind, str) and _KIND.fullmatch(kind) else 'other'}"


def function_schema(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """Return a tool in the form that templates take. Without parameters it takes none."""
    function: dict[str, Any] = {"name": name_of(name, f"{where}.name")}
    if description is not None:
        function["description"] = text(description, f"{where}.description")
    empty = {"type": "object", "properties": {}}
    function["parameters"] = empty if parameters is None else mapping(parameters, f"{where}.parameters")
    return {"type": "function", "function": function}


def json_text(value: Any) -> str:
    """Return a JSON value as text."""
    return json.dumps(value, ensure_ascii=False)


def call(id_: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """Return a tool call of an earlier assistant turn. Arguments are the client's text; an object becomes text."""
    given = json_text(arguments) if isinstance(arguments, dict) else text_or_empty(arguments, f"{where}.arguments")
    function = {"name": name_of(name, f"{where}.name"), "arguments": given}
    return {"id": text_or_empty(id_, f"{where}.id"), "type": "function", "function": function}


def image_of_url(url: Any, where: str) -> dict[str, Any]:
    """Return the part for an image in a `data:` address.

    Raises:
        RefusedError: The address is another one; it is not fetched.
    """
    address = text(url, where)
    found = _DATA_URL.match(address)
    if found is None:
        raise wrong(where, address, "an image as data:image/png;base64,…", "send the image itself; nothing is fetched")
    return image(found[1], address[found.end() :], where)


def image(kind: str, data: Any, where: str) -> dict[str, Any]:
    """Return the part for an image.

    Args:
        kind: Its format, such as `png`.
        data: Its bytes in base64.
        where: The field's name.
    """
    if kind not in _IMAGE_KINDS:
        raise wrong(where, kind, f"one of {', '.join(_IMAGE_KINDS)}", "convert the image")
    try:
        base64.b64decode(text(data, where), validate=True)
    except (binascii.Error, ValueError):
        raise wrong(where, data, "base64") from None
    return {"type": "image", "image": f"data:image/{kind};base64,{data}"}


def content(value: Any, where: str, part: Callable[[Any, str], str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a message that is a text, a list of parts, or nothing.

    Args:
        value: The content.
        where: Its place in the body.
        part: Returns the text or the image of a part, from the part and its place.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise wrong(where, value, "a text or a list of parts")
    return content_of([part(each, f"{where}[{index}]") for index, each in enumerate(value)])


def content_of(parts: Sequence[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a message from its texts and images: one text where there is no image.

    Texts are joined by line ends, as templates that take one text only would have them.
    """
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def user_or_system(role: str, parts: Sequence[str | dict[str, Any]]) -> Message:
    """Return a message of the client."""
    return {"role": role, "content": content_of(parts)}

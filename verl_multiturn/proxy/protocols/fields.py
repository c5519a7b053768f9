"""Fields that the bodies of all protocols share, as pydantic types: texts, numbers, images, tools, calls, contents.

A client may send any JSON. Types do not convert unless declared to: a number in quotes is a text. No image is
fetched: only those that the body itself holds become parts.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    ValidationInfo,
)

from verl_multiturn.chat.messages import joined_texts
from verl_multiturn.proxy.protocols.validation import wrong

MOST_MESSAGES = 4096
MOST_TOOLS = 1024
MOST_COMPLETIONS = 128
MOST_STOPS = 64
_MOST_STOP_CHARACTERS = 256

_IMAGE_KINDS = ("png", "jpeg", "jpg", "gif", "webp")
_DATA_URL = re.compile(r"data:image/([a-z]{3,4});base64,")
# A kind becomes a part of a metric's name.
_KIND = re.compile(r"[a-z][a-z0-9_]{0,39}")

_JSON = json.JSONEncoder(ensure_ascii=False)
Item = TypeVar("Item")
ABSENT: Any = None
"""Default of a field that must be there: an absent field is refused as null is."""


class Fields(BaseModel):
    """An object in a body. Fields that a model does not name are omitted."""

    model_config = ConfigDict(strict=True, validate_default=True)


class UnionChoice(Discriminator):
    """Distinguishes the models of a union; a union of such unions needs their hash."""

    __hash__ = object.__hash__


def choice(tag: Callable[[Any], str | None], expected: str, todo: str = "send that", field: str = "") -> UnionChoice:
    """Return the function that distinguishes the members of a union.

    Args:
        tag: Returns the `Tag` of the member for a value, which begins with "="; None for a value that is refused.
        expected: The expected value in a refusal.
        todo: The remedy in it.
        field: The field that it names, if the value is an object; "": the value itself.
    """
    said: dict[str, str | int | float] = {"expected": expected, "todo": todo}
    return UnionChoice(tag, "wrong", "{expected}; {todo}", {**said, "field": field} if field else said)


def by(
    field: str, kinds: Mapping[str, str], expected: str, todo: str = "send that", other: str | None = None
) -> UnionChoice:
    """Return the function that distinguishes the models of a union by the name of a kind.

    Args:
        field: The field that holds the name.
        kinds: The tags of the models by this name, without the "=" with which each `Tag` begins.
        expected: As for `choice`.
        todo: As for `choice`.
        other: Tag of the model of all other objects; None: they are refused.
    """
    tags = {kind: f"={name}" for kind, name in kinds.items()}
    unknown = other and f"={other}"

    def tag(value: Any) -> str | None:
        if not isinstance(value, dict):
            return None
        kind = value.get(field)
        return tags.get(kind, unknown) if isinstance(kind, str) else unknown

    return choice(tag, expected, todo, field)


def text_or_list(value: object) -> str | None:
    """Return the tag of a text, or of a list."""
    return "=text" if isinstance(value, str) else "=list" if isinstance(value, list) else None


def _not_empty(messages: list[Item]) -> list[Item]:
    if not messages:
        raise wrong("a list with at least one message")
    return messages


class StopAtFirst(FailFast):
    """Ends the reading of a list with the first wrong item, or a body of millions would give as many errors."""

    __hash__ = object.__hash__  # as of `UnionChoice`


NULL_IS_EMPTY = BeforeValidator(lambda value: [] if value is None else value)
Array = Annotated[list[Item], StopAtFirst(), NULL_IS_EMPTY]
"""A list; an empty one for null."""
Messages = Annotated[
    list[Item], StopAtFirst(), Field(max_length=MOST_MESSAGES), NULL_IS_EMPTY, AfterValidator(_not_empty)
]
"""The messages of a request, at least one."""
Tools = Annotated[list[Item], StopAtFirst(), Field(max_length=MOST_TOOLS), NULL_IS_EMPTY]
"""The tools of a request."""
Content = (
    Annotated[
        Annotated[str, Tag("=text")] | Annotated[list[Item], StopAtFirst(), Tag("=list")],
        choice(text_or_list, "a text or a list of parts"),
    ]
    | None
)
"""A content that is a text, a list of parts, or null."""


def only(*values: object, expected: str, todo: str) -> AfterValidator:
    """Return the validator of a field that may hold nothing but `values`."""

    def check(value: object) -> object:
        if value not in values:
            raise wrong(expected, todo)
        return value

    return AfterValidator(check)


def unless(name: str) -> BeforeValidator:
    """Return the validator of a field that counts only where the one with this name, before it, is absent."""

    def null(value: object, info: ValidationInfo) -> object:
        return None if info.data.get(name) else value

    return BeforeValidator(null)


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeNumber = Annotated[int, BeforeValidator(_whole)]
"""A whole number; 2.0 is one."""
MostTokens = Annotated[WholeNumber, AfterValidator(lambda number: max(1, number))]
"""The most tokens of a completion. A number below 1 is clamped to 1, never refused."""


def _name(value: object) -> object:
    if not isinstance(value, str) or not value:
        raise wrong("a name")
    return value


Name = Annotated[str, BeforeValidator(_name)]
"""A text that is not empty."""


def _stop(value: object) -> object:
    if not isinstance(value, str) or not 0 < len(value) <= _MOST_STOP_CHARACTERS:
        raise wrong(f"a text of 1 to {_MOST_STOP_CHARACTERS} characters")
    return value


_StopText = Annotated[str, BeforeValidator(_stop)]
Stops = Annotated[
    list[_StopText],
    StopAtFirst(),
    Field(max_length=MOST_STOPS),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else [] if value is None else value),
]
"""The texts at which a completion ends, from one text or a list."""


def json_text(value: Any) -> str:
    """Return a JSON value as text."""
    return _JSON.encode(value)


def _arguments(value: object) -> object:
    return json_text(value) if isinstance(value, dict) else "" if value is None else value


Arguments = Annotated[str, BeforeValidator(_arguments)]
"""Arguments of a call: the client's text; an object becomes text, null an empty one."""


def call(id_: str | None, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call of an earlier assistant turn."""
    return {"id": id_ or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return a tool in the form that templates take. Without parameters it takes none."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    return {"type": "function", "function": function}


class Function(Fields):
    """A tool of the client, as OpenAI's protocols have it."""

    name: Name = ABSENT
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def tool(self) -> dict[str, Any]:
        """Return it in the form that templates take."""
        return tool(self.name, self.description, self.parameters)


def set_fields(given: Mapping[str, Any], names: Iterable[str], prefix: str = "") -> list[str]:
    """Return those of `names` that the client has set, for `ChatRequest.unenforced`."""
    return [prefix + name for name in names if given.get(name) is not None]


def counted(prefix: str, kind: object) -> str:
    """Return the name under which something of an unknown kind is counted."""
    return f"{prefix}.{kind if isinstance(kind, str) and _KIND.fullmatch(kind) else 'other'}"


class Other(Fields):
    """An object of a kind that is counted and omitted."""

    type: object = None


class ContentPart(Protocol):
    """A part of a content."""

    def part(self) -> str | dict[str, Any]:
        """Return its text or its image."""
        ...


class Text(Fields):
    """A part with a text."""

    text: str = ABSENT

    def part(self) -> str:
        """Return the text."""
        return self.text


class Refusal(Fields):
    """A part with the model's refusal."""

    refusal: str = ABSENT

    def part(self) -> str:
        """Return its text."""
        return self.refusal


def image_kind(kind: str) -> str:
    """Return the format of an image, such as `png`."""
    if kind not in _IMAGE_KINDS:
        raise wrong(f"one of {', '.join(_IMAGE_KINDS)}", "convert the image")
    return kind


def _base64(data: str) -> str:
    try:
        base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise wrong("base64") from None
    return data


def _image_url(url: str) -> str:
    found = _DATA_URL.match(url)
    if found is None:
        raise wrong("an image as data:image/png;base64,…", "send the image itself; nothing is fetched")
    image_kind(found[1])
    _base64(url[found.end() :])
    return url


Base64 = Annotated[str, AfterValidator(_base64)]
ImageUrl = Annotated[str, AfterValidator(_image_url)]
"""An image in a `data:` address."""


def image(url: str) -> dict[str, Any]:
    """Return the part for an image, from its `data:` address."""
    return {"type": "image", "image": url}


def content_of(given: str | Sequence[ContentPart] | None) -> str | list[dict[str, Any]]:
    """Return the content of a message from its texts and images, as `joined_texts` does."""
    if given is None or isinstance(given, str):
        return given or ""
    parts = [each.part() for each in given]
    return joined_texts(parts)

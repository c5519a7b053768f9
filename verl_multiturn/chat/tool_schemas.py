"""Tool schemas as the chat template shows them.

Their text comes from a tool's author or from an MCP server, so it passes the firewall like any other text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from verl_multiturn.chat.control_tokens import Firewall

Schema = dict[str, Any]

_OTHER: Schema = {
    "type": "function",
    "function": {"name": "q7z", "description": "q7z", "parameters": {"type": "object", "properties": {}}},
}
"""A tool whose name occurs in no template."""

# Keys that templates look up. A property of the same name is not such a key.
_KNOWN_KEYS = frozenset(
    {
        *("type", "function", "name", "description", "parameters", "properties", "required", "items", "enum", "const"),
        *("default", "title", "format", "anyOf", "oneOf", "allOf", "not", "additionalProperties", "patternProperties"),
        *("prefixItems", "$defs", "definitions", "$ref", "$id", "$schema", "strict", "returns", "minimum", "maximum"),
        *("minLength", "maxLength", "minItems", "maxItems", "pattern", "examples", "nullable"),
    }
)
# Keys whose values are words of JSON Schema, names, or references.
_WORDS = frozenset({"type", "name", "$ref", "$id", "$schema"})
# Keys whose values map names to schemas.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def sealed(schemas: Sequence[Schema], firewall: Firewall) -> list[Schema]:
    """Seal each text of the schemas that may form a control token together with the template's text beside it.

    Keys and words that belong to JSON Schema itself stay as they are.
    """

    def part(text: str) -> str:
        return str(firewall.seal(text)) if firewall.may_join(text) else text

    return [_changed(schema, part) for schema in schemas]


def announcement(
    schemas: Sequence[Schema], prompt: Callable[[Sequence[Schema]], str], harmless: Callable[[str], str]
) -> str:
    """Return the text by which a user message offers further tools to a model.

    It is the template's text of them: the piece by which a prompt with another tool grows. Where there is no such
    piece (a template without tools, one that lists them in several places), or where a control token is in it, each
    tool is a line of JSON.

    Args:
        schemas: Schemas of the tools.
        prompt: Returns a prompt with tools as text.
        harmless: Returns a text with all control tokens in it broken.
    """
    try:
        before, after = (prompt(each) for each in ([_OTHER], [_OTHER, *schemas]))
    except Exception:  # a template is other people's code
        before = after = ""
    same = next((index for index, pair in enumerate(zip(before, after, strict=False)) if len({*pair}) > 1), len(before))
    rest = before[same:]
    piece = after[same : len(after) - len(rest)].strip(" \t\r\n,") if after.endswith(rest) else ""
    if piece and all(schema["function"]["name"] in piece for schema in schemas) and harmless(piece) == piece:
        return piece
    return "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)


def texts(value: Any) -> Iterator[str]:
    """Yield every text of a schema, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(item)


def must_stay(value: Any) -> Iterator[str]:
    """Yield the texts of a schema that a model has to write unchanged in a call.

    These are names of functions and arguments, and the values of `enum` and `const`.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key in _NAMED and isinstance(item, Mapping):
                yield from map(str, item)
                for inner in item.values():
                    yield from must_stay(inner)
            elif key in ("name", "enum", "const"):
                yield from texts(item)
            else:
                yield from must_stay(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from must_stay(item)


def _changed(value: Any, change: Callable[[str], str], names: bool = False) -> Any:
    if isinstance(value, Mapping):
        return {
            key if key in _KNOWN_KEYS and not names else change(str(key)): (
                item
                if key in _WORDS and isinstance(item, str) and not names
                else _changed(item, change, names=key in _NAMED and not names)
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_changed(item, change) for item in value]
    return change(value) if isinstance(value, str) else value

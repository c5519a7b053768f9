"""Tool schemas as the chat template shows them: text of an author, or of an MCP server, like any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from verl_multiturn.chat.control_tokens import Firewall

Schema = dict[str, Any]

# Keys that templates look for; a name of a property is none of them where it stands.
_KNOWN_KEYS = frozenset(
    {
        *("type", "function", "name", "description", "parameters", "properties", "required", "items", "enum", "const"),
        *("default", "title", "format", "anyOf", "oneOf", "allOf", "not", "additionalProperties", "patternProperties"),
        *("prefixItems", "$defs", "definitions", "$ref", "$id", "$schema", "strict", "returns", "minimum", "maximum"),
        *("minLength", "maxLength", "minItems", "maxItems", "pattern", "examples", "nullable"),
    }
)
# Their values are words of JSON Schema, or lead to another place.
_WORDS = frozenset({"type", "name", "$ref", "$id", "$schema"})
# Their keys are names.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def sealed(schemas: Sequence[Schema], firewall: Firewall) -> list[Schema]:
    """Schemas whose texts are parted from what a template may put beside them, for when both together form a token."""

    def part(text: str) -> str:
        return str(firewall.seal(text)) if firewall.may_join(text) else text

    return [_changed(schema, part) for schema in schemas]


def texts(value: Any) -> Iterator[str]:
    """Every text of a schema, keys included."""
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
    """What a model has to write as it is: names of functions and arguments, and values that are listed."""
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

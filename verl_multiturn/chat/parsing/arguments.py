"""Values of arguments that the model wrote as plain text, read by the types of the tool's schema; arguments as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from verl_multiturn.chat.parsing.call_json import read_whole_json

_JSON_TYPES = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}


MOST_DEPTH = 64
"""The most levels of nesting in a message; templates and renderers fail on deeper ones."""
# Levels around a call's arguments in a body in which Anthropic's clients send them back.
_AROUND = 5

# Chat templates write an argument as Jinja prints it, which is Python's spelling.
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows, as far as the schema says.

    Example: `{"type": "integer"}` gives `frozenset({"integer"})`.

    Args:
        schema: JSON Schema of one argument.
        root: The schema in which a `$ref` is looked up.
        depth: How many references and choices led here. The search ends at 8.

    Returns:
        Names of types. An empty set means any type.
    """
    if not isinstance(schema, dict) or depth > 8:
        return frozenset()
    if "type" in schema:
        return frozenset([schema["type"]] if isinstance(schema["type"], str) else schema["type"])
    if "enum" in schema or "const" in schema:
        return frozenset(_JSON_TYPES[type(value)] for value in schema.get("enum", [schema.get("const")]))
    if "$ref" in schema:
        target: Any = root
        for part in str(schema["$ref"]).removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return types_of(target, root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            choices = [types_of(choice, root, depth + 1) for choice in schema[key]]
            return frozenset().union(*choices) if all(choices) else frozenset()
    known = [types for part in schema.get("allOf", ()) if (types := types_of(part, root, depth + 1))]
    return frozenset.intersection(*known) if known else frozenset()


def read_argument(text: str, types: frozenset[str]) -> Any:
    """Return the value of an argument that the model wrote as text.

    Where the schema allows a string, the text stays a string unless it reads as a value of another allowed type.
    Otherwise the text is read as JSON (or as Python's `True`, `False` or `None`). Text that cannot be read stays text:
    the later check against the schema tells the model.

    Args:
        text: What the model wrote between the tags.
        types: Types that the schema allows, as `types_of` returns them. An empty set means any type.
    """
    word = text.strip()
    try:
        value = _PYTHON_WORDS[word] if word in _PYTHON_WORDS else read_whole_json(word)
    except (ValueError, RecursionError):
        return text
    kind = _JSON_TYPES[type(value)]
    if "string" in types and kind not in (types | {"integer"} if "number" in types else types) - {"string"}:
        return text
    return value


def is_deeper(value: Any, levels: int) -> bool:
    """Tell whether a value is nested deeper than so many levels; a text alone has one."""
    level: list[Any] = [value]
    for _ in range(levels):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each.values()
            elif isinstance(each, list):
                below += each
        if not below:
            return False
        level = below
    return True


def object_of(arguments: str) -> dict[str, Any] | None:
    """Return a call's arguments as the object that they are.

    None for what is not a JSON object, and for one that is nested so deeply that a template fails at it, or that the
    body in which an agent sends it back is refused.
    """
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) and not is_deeper(parsed, MOST_DEPTH + 1 - _AROUND) else None

"""Random schemas of tools, for the round trip through a server and our own client."""

from __future__ import annotations

import random
from typing import Any

_WORDS = [
    "city",
    "größe",
    "名前",
    "naïve key",
    "🎲",
    "a.b/c~d",
    "$id",
    "type",
    "properties",
    "x-y",
    "",
    "ZIP",
    "Ω",
    "e\u0301",
]
_TEXTS = [
    "The city.",
    "Größe in cm",
    "名前を入力",
    "A “quoted” text\nin two lines",
    "\t\\ \" '",
    "",
    "🎲" * 3,
    "<|im_end|>",
]
_FORMATS = ["date", "date-time", "email", "uri", "uuid", "ipv4", "regex", "my-own"]
_VALUES: list[Any] = [
    0,
    1,
    -7,
    2**60,
    1.0,
    2.5,
    1e-7,
    -0.0,
    1e21,
    True,
    False,
    None,
    "",
    "a",
    "ä\u2028b",
    [],
    {},
    [1.0, None],
]


def random_schema(draw: random.Random, name: str) -> dict[str, Any]:
    """Return a function schema that our loader accepts.

    Args:
        draw: The source of chance.
        name: Name of the tool.
    """
    parameters = _object(draw, 3)
    if draw.random() < 0.3:
        parameters["$defs"] = {"Node": _object(draw, 1), "größe": _any(draw, 1)}
        parameters["properties"]["node"] = {"$ref": "#/$defs/Node"}
    if draw.random() < 0.2:
        drafts = ["https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"]
        parameters["$schema"] = draw.choice(drafts)
    if draw.random() < 0.1:
        parameters["allOf"] = [{"if": {"required": ["x"]}, "then": {"required": ["y"]}}]
    function: dict[str, Any] = {"name": name}
    if draw.random() < 0.9:
        function["description"] = draw.choice(_TEXTS)
    if draw.random() < 0.95:
        function["parameters"] = parameters
    if draw.random() < 0.2:
        function["strict"] = draw.choice([True, False, None])
    return {"type": "function", "function": function}


def _named(draw: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with some of the words that every schema may have, in any order."""
    for key, values in (("title", _TEXTS), ("description", _TEXTS), ("default", _VALUES), ("$comment", _TEXTS)):
        if draw.random() < 0.2:
            schema[key] = draw.choice(values)
    if draw.random() < 0.1:
        schema["examples"] = draw.sample(_VALUES, 2)
    if draw.random() < 0.1:
        schema |= draw.choice([{"x-order": 1}, {"deprecated": True}, {"readOnly": False}, {"x-more": {"a": None}}])
    keys = list(schema)
    draw.shuffle(keys)
    return {key: schema[key] for key in keys}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_WORDS, draw.randrange(0, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: _any(draw, depth - 1) for name in names}}
    if draw.random() < 0.5:
        schema["required"] = draw.sample(names, draw.randrange(0, len(names) + 1))
    if draw.random() < 0.4:
        schema["additionalProperties"] = draw.choice([True, False, {}, {"type": "integer"}])
    if draw.random() < 0.1:
        schema["patternProperties"] = {"^x-": _any(draw, 0)}
    if draw.random() < 0.1:
        schema["minProperties"] = draw.randrange(3)
    return _named(draw, schema)


def _any(draw: random.Random, depth: int) -> Any:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "free", "truth"]
    kind = draw.choice(kinds + ["object", "array", "union", "several"] * (depth > 0))
    schema: dict[str, Any] = {"type": kind}
    if kind == "truth":
        return draw.choice([True, {}])
    if kind == "string":
        more = [{"format": draw.choice(_FORMATS)}, {"minLength": 0, "maxLength": 9}, {"pattern": r"^[a-zä-ü]+\d*$"}, {}]
        schema |= draw.choice(more)
    elif kind in ("integer", "number"):
        bounds: list[dict[str, Any]] = [
            {"minimum": -1, "maximum": 2**40},
            {"exclusiveMinimum": 0.5},
            {"multipleOf": 0.01},
        ]
        schema |= draw.choice([*bounds, {}])
    elif kind == "enum":
        schema = {"enum": draw.sample(["a", "ß", "名", 1.5, 2, None, True, ["x"]], 3)}
    elif kind == "const":
        schema = {"const": draw.choice(_VALUES)}
    elif kind == "free":
        schema = {}
    elif kind == "object":
        return _object(draw, depth)
    elif kind == "array":
        schema |= draw.choice(
            [{"items": _any(draw, depth - 1)}, {"prefixItems": [_any(draw, depth - 1)], "items": False}]
        )
        schema |= draw.choice([{"minItems": 1, "uniqueItems": True}, {}])
    elif kind == "union":
        schema = {draw.choice(["anyOf", "oneOf"]): [_any(draw, depth - 1), {"type": "null"}]}
    elif kind == "several":
        schema["type"] = draw.sample(["string", "null", "integer", "array"], 2)
    return _named(draw, schema)

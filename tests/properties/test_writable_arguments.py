"""In a format with tags a model can write each value that a tool's schema takes, and a text stays the text."""

import asyncio
import json
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from tests.call_texts import PLAIN_TAGS, write
from tests.conftest import CharTokenizer
from verl_multiturn import ToolSchema
from verl_multiturn.chat.parsing.formats import make_call_parser
from verl_multiturn.chat.parsing.reasoning import THINK
from verl_multiturn.chat.parsing.turns import ToolCall

Schema = Any
S, I = {"type": "string"}, {"type": "integer"}  # noqa: E741  # short, for the tables below
TEXTS = [
    *("42", "-1.5", "007", "3.10", "1e5", "null", "None", "true", "True", "a", "", "a b", " 42 ", "[1]", '["1"]', "{}"),
    *('{"a": 1}', '"a"', '"42"', '" 42 "', '"\\"42\\""', '"null"', "NaN", "9" * 30, "ü", "two\nlines"),
]
VALUES = [*TEXTS, 42, -1.5, 0, 10**20, True, False, None, [], [1], ["1"], ["a", None], {}, {"a": 1}, {"a": "1"}, 1e22]
LEAVES: list[Schema] = [
    *({"type": kind} for kind in ("string", "integer", "number", "boolean", "null", "array", "object")),
    *({"type": kinds} for kinds in (["string", "null"], ["string", "integer"], ["string", "array", "object"])),
    *(
        {},
        True,
        {"description": "any"},
        {"enum": ["1", "2", "42"]},
        {"enum": ["42", 42, None, "null"]},
        {"const": "42"},
    ),
    *(
        {"type": "string", "enum": ["42", "true"]},
        {"type": "array", "items": S},
        {"type": "string", "pattern": "^[0-9]"},
    ),
    *({"$ref": "#/$defs/text"}, {"$ref": "#/$defs/either"}, {"anyOf": [S, {"type": "null"}]}, {"oneOf": [I, S]}),
    *(
        {"allOf": [S, {"minLength": 2}]},
        {"not": I},
        {"type": "object", "additionalProperties": S},
        {"not": {"const": 42}},
    ),
    {"if": {"type": "integer"}, "then": {"minimum": 50}},
]
DEFS = {"text": S, "either": {"anyOf": [{"type": ["number", "boolean"]}, {"$ref": "#/$defs/text"}]}}


def both(a: Schema, b: Schema) -> Schema:
    return {"properties": {"a": a, "b": b}}


ROOTS = {
    "properties": both,
    "additionalProperties": lambda a, b: {"properties": {"a": a}, "additionalProperties": b},
    "patternProperties": lambda a, b: {"patternProperties": {"^a": a, "^b$": b}},
    "unevaluatedProperties": lambda a, b: {"allOf": [{"properties": {"a": a}}], "unevaluatedProperties": b},
    "allOf": lambda a, b: {"allOf": [{"properties": {"a": a}}, {"properties": {"b": b}}]},
    "anyOf": lambda a, b: {"anyOf": [both(a, b), both(b, a)]},
    "oneOf": lambda a, b: {
        "oneOf": [
            {"properties": {"k": {"const": "x"}, "a": a, "b": b}, "required": ["k"]},
            {"properties": {"k": {"const": "1"}, "a": b, "b": a}, "required": ["k"]},
        ]
    },
    "if": lambda a, b: {
        "if": {"properties": {"k": {"const": "x"}}, "required": ["k"]},
        "then": both(a, b),
        "else": {"properties": {"k": {"type": "string"}, "a": b, "b": a}},
    },
    "$ref": lambda a, b: {"$ref": "#/$defs/root", "$defs": {"root": both(a, b)}},
    "dependentSchemas": lambda a, b: {"properties": {"b": b}, "dependentSchemas": {"b": {"properties": {"a": a}}}},
    "not": lambda a, b: {"not": {"properties": {"a": {"not": a}}, "required": ["a"]}, "properties": {"b": b}},
}


# In the other formats with tags the model marks each value that is a text.
NAMES = sorted(name for name in PLAIN_TAGS if not name.startswith("deepseek"))


def tool(parameters: Schema) -> ToolSchema:
    made = {**parameters, "type": "object", "$defs": {**DEFS, **parameters.get("$defs", {})}}
    return ToolSchema.read({"type": "function", "function": {"name": "f", "parameters": made}}, "test")


def read(name: str, schema: ToolSchema, texts: dict[str, str]) -> dict[str, Any]:
    tokenizer = CharTokenizer()
    parser = make_call_parser(name, tokenizer, [tokenizer.eos_token_id], [THINK])
    turn = asyncio.run(parser.parse(tokenizer.turn(write(name, texts)), [schema.as_dict()], 0))
    (call,) = turn.calls
    assert isinstance(call, ToolCall)
    arguments: dict[str, Any] = json.loads(call.arguments)
    return arguments


def written(name: str, schema: ToolSchema, given: dict[str, Any]) -> dict[str, Any]:
    """Return the tool's arguments from a model that wants to give these arguments.

    The model writes each text as it is, and puts those in quotes that would be read as something else.
    """
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
    for _ in range(len(texts) + 1):
        found = read(name, schema, texts)
        for key, value in given.items():
            if isinstance(value, str) and found[key] != value:
                texts[key] = json.dumps(value, ensure_ascii=False) if texts[key] == value else value
    return found


def same(found: Any, given: Any) -> bool:
    return json.dumps(found, sort_keys=True) == json.dumps(given, sort_keys=True)


@given(
    st.sampled_from(NAMES),
    st.sampled_from(sorted(ROOTS)),
    st.sampled_from(LEAVES),
    st.sampled_from(LEAVES),
    st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(VALUES), min_size=1),
    st.sampled_from(["x", "1", None]),
)
def test_each_value_that_a_schema_takes_can_be_written(
    name: str, root: str, a: Schema, b: Schema, given: dict[str, Any], kind: str | None
) -> None:
    schema = tool(ROOTS[root](a, b))
    given = given if kind is None else {**given, "k": kind}
    assume(schema.read_arguments(json.dumps(given))[0] is not None)
    assert same(written(name, schema, given), given), (root, a, b)

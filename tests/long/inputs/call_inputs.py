"""Calls in formats with tags and in Python, and tools of MCP servers."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from tests.call_texts import write
from tests.conftest import CharTokenizer
from tests.long.inputs.input_cases import Case, Right, Seen, accept, models, refuse, run_command
from tests.long.inputs.input_files import in_folder
from verl_multiturn import ToolSchema
from verl_multiturn.chat.parsing.formats import make_call_parser
from verl_multiturn.chat.parsing.reasoning import THINK
from verl_multiturn.chat.parsing.turns import ToolCall

TAGS = ("qwen3_coder", "mimo", "seed", "glm45", "glm47", "hunyuan", "minimax", "step3", "deepseekv32")
"""One format of each form with tags."""
JSON = (
    "hermes",
    "mistral",
    "llama3",
    "kimi_k2",
    "deepseekv3",
    "deepseekv31",
    "gemma4",
    "gpt-oss",
    "interns1",
    "gigachat3",
)
SERVER = str(Path(__file__).parent / "mcp_tools_server.py")
TEXT: dict[str, Any] = {"type": "string"}
OBJECT: dict[str, Any] = {"type": "object", "properties": {}}


def parse(
    name: str, given: Mapping[str, Any], parameters: Mapping[str, Any], tool: str = "f", text: str | None = None
) -> Callable[[], Awaitable[Seen]]:
    """Return the door of a call that a model writes: the value is the tool's name and the arguments that it gets.

    Args:
        name: Name of the format.
        given: Arguments as the model writes them; a text is in tags as it is.
        parameters: The schema of the tool's arguments.
        tool: Name of the tool.
        text: The model's text; None: the call as the format writes it.
    """

    async def door() -> Seen:
        tokenizer = CharTokenizer()
        schema = ToolSchema.read(
            {"type": "function", "function": {"name": tool, "parameters": {"type": "object", **parameters}}}, "tool"
        )
        parser = make_call_parser(name, tokenizer, [tokenizer.eos_token_id], [THINK])
        said = write(name, dict(given), tool=tool) if text is None else text
        turn = await parser.parse(tokenizer.turn(said), [schema.as_dict()], 0)
        if not turn.calls:
            return Seen("accepted", turn.content, "no call")
        (call,) = turn.calls
        if not isinstance(call, ToolCall):
            return Seen("model", sentence=call.problem)
        arguments, problem = schema.read_arguments(call.arguments)
        if arguments is None:
            return Seen("model", sentence=problem)
        return Seen("accepted", (call.name, arguments), call.arguments)

    return door


def _tags() -> list[Case]:
    roots: list[tuple[str, dict[str, Any]]] = [
        ("additionalProperties", {"additionalProperties": TEXT}),
        ("allOf", {"allOf": [{"properties": {"code": TEXT}}, {"required": ["code"]}]}),
        ("$ref", {"$ref": "#/$defs/root", "$defs": {"root": {"properties": {"code": TEXT}}}}),
        ("patternProperties", {"patternProperties": {"^c": TEXT}}),
    ]
    found = [
        Case(
            "arguments",
            f"{name}: a text of digits under {root}",
            parse(name, {"code": digits}, parameters),
            accept(("f", {"code": digits})),
        )
        for name in TAGS
        for (root, parameters), digits in zip(roots, ("42", "007", "1e5", "null"), strict=True)
    ]
    pairs: list[tuple[str, str, dict[str, Any], Right]] = [
        ("an integer", "42", {"properties": {"x": {"type": "integer"}}}, accept(("f", {"x": 42}))),
        (
            "a number under additionalProperties",
            "1.5",
            {"additionalProperties": {"type": "number"}},
            accept(("f", {"x": 1.5})),
        ),
        ("a boolean", "true", {"properties": {"x": {"type": "boolean"}}}, accept(("f", {"x": True}))),
        ("a text that is true", "true", {"anyOf": [{"properties": {"x": TEXT}}]}, accept(("f", {"x": "true"}))),
        (
            "an array of texts",
            '["1", "2"]',
            {"properties": {"x": {"type": "array", "items": TEXT}}},
            accept(("f", {"x": ["1", "2"]})),
        ),
        ("a text that looks like an array", "[1, 2]", {"additionalProperties": TEXT}, accept(("f", {"x": "[1, 2]"}))),
        (
            "a text that looks like an object",
            '{"a": 1}',
            {"properties": {"x": {"$ref": "#/$defs/t"}}, "$defs": {"t": TEXT}},
            accept(("f", {"x": '{"a": 1}'})),
        ),
        ("an enum of texts with digits", "2", {"properties": {"x": {"enum": ["1", "2"]}}}, accept(("f", {"x": "2"}))),
        ("an enum of numbers", "2", {"properties": {"x": {"enum": [1, 2]}}}, accept(("f", {"x": 2}))),
        ("a const of digits", "7", {"properties": {"x": {"const": "7"}}}, accept(("f", {"x": "7"}))),
        ("unevaluatedProperties", "3", {"unevaluatedProperties": TEXT}, accept(("f", {"x": "3"}))),
        (
            "if and then",
            "3",
            {"if": {"required": ["x"]}, "then": {"properties": {"x": TEXT}}},
            accept(("f", {"x": "3"})),
        ),
        (
            "dependentSchemas",
            "3",
            {"dependentSchemas": {"x": {"properties": {"x": TEXT}}}},
            accept(("f", {"x": "3"})),
        ),
        (
            "not an integer",
            "3",
            {"properties": {"x": {"not": {"type": "integer"}, "type": ["integer", "string"]}}},
            accept(("f", {"x": "3"})),
        ),
        (
            "a pattern of digits",
            "00123",
            {"additionalProperties": {"type": "string", "pattern": "^[0-9]{5}$"}},
            accept(("f", {"x": "00123"})),
        ),
        ("a word for an integer", "ten", {"properties": {"x": {"type": "integer"}}}, models("x")),
        ("a number below its bound", "0", {"additionalProperties": {"type": "integer", "minimum": 1}}, models("x")),
        (
            "an object of texts",
            '{"a": "1"}',
            {"properties": {"x": {"type": "object", "additionalProperties": TEXT}}},
            accept(("f", {"x": {"a": "1"}})),
        ),
        (
            "null for text or null",
            "null",
            {"properties": {"x": {"type": ["integer", "null"]}}},
            accept(("f", {"x": None})),
        ),
        ("a long number", "9" * 25, {"additionalProperties": TEXT}, accept(("f", {"x": "9" * 25}))),
        ("an infinity", "Infinity", {"additionalProperties": TEXT}, accept(("f", {"x": "Infinity"}))),
        (
            "a name that the schema has not",
            "3",
            {"properties": {"y": TEXT}, "additionalProperties": False},
            models("x"),
        ),
    ]
    found += [
        Case("arguments", f"{name}: {given}", parse(name, {"x": text}, parameters), right)
        for name in ("qwen3_coder", "glm45")
        for given, text, parameters, right in pairs
    ]
    return found


def _names() -> list[Case]:
    tools = ("resolve-library-id", "get.docs", "3d-search", "class", "fetch_url-v2")
    keys = ("user-id", "from", "$top", "user name", "2nd", "filter[status]")
    any_value: dict[str, Any] = {"properties": {}}
    found = [
        Case(
            "names", f"{name}: the tool {tool!r}", parse(name, {"x": "a"}, any_value, tool), accept((tool, {"x": "a"}))
        )
        for name in ("pythonic", "lfm2", *JSON)
        for tool in (tools if name in ("pythonic", "lfm2") else tools[:1])
    ]
    wrap = {"pythonic": "[{}]", "lfm2": "<|tool_call_start|>[{}]<|tool_call_end|>"}
    found += [
        Case(
            "names",
            f"{name}: the argument {key!r}",
            parse(name, {}, {"properties": {key: {}}}, "f-x", wrap[name].replace("{}", f"f-x({key}='v', a=1)")),
            accept(("f-x", {key: "v", "a": 1})),
        )
        for name in wrap
        for key in keys
    ]
    for text in ("[f-x('a')]", "[f-x(**{'a': 1})]", "[f-x(a=b)]", "[f-x(a=1]"):
        found.append(Case("names", f"pythonic: {text}", parse("pythonic", {}, any_value, "f-x", text), models()))
    for text in ("See [well-known(ish)].", "It is [2(x)] there."):
        found.append(
            Case("names", f"pythonic, an answer: {text}", parse("pythonic", {}, any_value, "f-x", text), accept(text))
        )
    return found


def list_tools(tools: list[Any], *words: str, **settings: Any) -> Callable[[], Awaitable[Seen]]:
    """Return the door of `validate` with an MCP server that lists tools."""
    entry = {"command": sys.executable, "args": [SERVER, json.dumps(tools)], **settings}
    return in_folder(
        lambda folder: run_command("validate", "tools.yaml"), {"tools.yaml": json.dumps({"tools": [{"mcp": entry}]})}
    )


def _servers() -> list[Case]:
    good = {"name": "good", "inputSchema": OBJECT}
    bad: list[tuple[str, Any, tuple[str, ...]]] = [
        ("no type", {"name": "bad", "inputSchema": {"properties": {}}}, ("'bad'", "exclude")),
        ("another type", {"name": "bad", "inputSchema": {"type": "array"}}, ("'bad'", "exclude")),
        ("no inputSchema", {"name": "bad"}, ("'bad'", "exclude")),
        ("inputSchema null", {"name": "bad", "inputSchema": None}, ("'bad'", "exclude")),
        ("inputSchema text", {"name": "bad", "inputSchema": "{}"}, ("'bad'", "exclude")),
        (
            "a bad pattern",
            {"name": "bad", "inputSchema": {**OBJECT, "properties": {"p": {"pattern": "["}}}},
            ("'bad'", "'['"),
        ),
        (
            "a $ref to nothing",
            {"name": "bad", "inputSchema": {**OBJECT, "properties": {"p": {"$ref": "#/$defs/q"}}}},
            ("'bad'", "$ref"),
        ),
        (
            "an unknown draft",
            {"name": "bad", "inputSchema": {**OBJECT, "$schema": "http://127.0.0.1:9/x"}},
            ("'bad'", "draft"),
        ),
    ]
    fine: list[tuple[str, Any]] = [
        ("a hyphen", {"name": "resolve-library-id", "inputSchema": OBJECT}),
        (
            "draft-07 with a tuple",
            {
                "name": "t",
                "inputSchema": {
                    "$schema": "http://json-schema.org/draft-07/schema#",
                    **OBJECT,
                    "properties": {"p": {"items": [TEXT]}},
                },
            },
        ),
        ("a name of words", {"name": "get docs", "inputSchema": OBJECT}),
        (
            "a default null beside a type",
            {"name": "t", "inputSchema": {**OBJECT, "properties": {"p": {**TEXT, "default": None}}}},
        ),
        ("a description null", {"name": "t", "description": None, "inputSchema": OBJECT}),
    ]
    return [
        *(
            Case("names", f"an MCP tool with {name}", list_tools([good, tool]), refuse(*words), is_slow=True)
            for name, tool, words in bad
        ),
        *(
            Case(
                "names",
                f"excluded: an MCP tool with {name}",
                list_tools([good, tool], exclude=["bad"]),
                accept(),
                is_slow=True,
            )
            for name, tool, _ in bad[:4]
        ),
        *(
            Case("names", f"an MCP tool with {name}", list_tools([good, tool]), accept(), is_slow=True)
            for name, tool in fine
        ),
        Case(
            "names",
            "exclude names no tool",
            list_tools([good], exclude=["goad"]),
            refuse("'goad'", "'good'"),
            is_slow=True,
        ),
        Case("names", "an MCP tool twice", list_tools([good, good]), refuse("'good'"), is_slow=True),
        Case(
            "names",
            "two MCP tools that are one name",
            list_tools([{**good, "name": "a b"}, {**good, "name": "a/b"}]),
            refuse("a_b"),
            is_slow=True,
        ),
        Case("names", "an MCP server without tools", list_tools([]), refuse("tool"), is_slow=True),
    ]


def cases() -> list[Case]:
    """Return the inputs of this file."""
    return [*_tags(), *_names(), *_servers()]

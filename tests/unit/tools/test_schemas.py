"""A schema that cannot be used is refused by its path and its own cause, and nothing is fetched for it."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_multiturn import ConfigError, ToolSchema, load_tools
from verl_multiturn.json_schema.validators import SchemaError, compile_schema, without_draft

DRAFT = "http://json-schema.org/draft-0{}/schema#"
PARAMETERS = "x.function.parameters"


def holding(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def read(parameters: dict[str, Any]) -> ToolSchema:
    return ToolSchema.read({"type": "function", "function": {"name": "f", "parameters": parameters}}, "x")


@pytest.mark.parametrize(
    ("pattern", "fit", "unfit"),
    [
        (r"^[\w-.]+$", ["a-b.c_9"], ["é", "a/b"]),
        (r"^[\d-x]$", ["-", "x", "1"], ["2x", "w"]),
        (r"^[a-\d]$", ["-", "a", "1"], ["b"]),
        (r"^(?<y>\d{4})-\k<y>$", ["2020-2020"], ["2020-2021"]),
        (r"^(a)?(?<b>x)(?:y)(?<c>z)\k<c>1$", ["xyzz1"], ["xyzx1", "axyzz"]),
        (r"^[^]$", ["\n", "a"], ["", "aa"]),
        (r"x[]", [], ["x", "x[]"]),
        (r"^[\b]$", ["\b"], ["b"]),
        (r"^\0$", ["\0"], ["0"]),
        (r"^a}]$", ["a}]"], ["a"]),
        (r"^{a,b}$", ["{a,b}"], ["a"]),
        (r"^a{,3}$", ["a{,3}"], ["aaa"]),
        (r"^[[\w-.]+$", ["[a-."], ["]"]),
        (r"^\/\-\_$", ["/-_"], []),
        (r"^\u{1F600}\u0041$", ["😀A"], ["A"]),
        (r"^\d$", ["1"], ["٣", "1\n"]),
        (r"^(?!a)\p{L}(?<=b)$", ["b"], ["a"]),
        (r"^[a-z&&b]$", ["&", "c"], []),
        (r"^[a-z]{2,3}$", ["abc"], ["a"]),
    ],
)
def test_expressions_of_javascript(pattern: str, fit: list[str], unfit: list[str]) -> None:
    for schema in ({"pattern": pattern}, {"$schema": DRAFT.format(4), "pattern": pattern}):
        validator = compile_schema(schema)
        assert [text for text in fit if not validator.is_valid(text)] == []
        assert [text for text in unfit if validator.is_valid(text)] == []
    keyed = compile_schema({"patternProperties": {pattern: {}}, "additionalProperties": False})
    assert all(keyed.is_valid({text: 1}) for text in fit)
    assert not any(keyed.is_valid({text: 1}) for text in unfit)
    assert read(holding(p={"pattern": pattern})).as_dict()["function"]["parameters"] == holding(p={"pattern": pattern})


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("[", "a '[' is not closed"),
        ("(", "missing )"),
        ("a**", "multiple repeat"),
        ("[z-a]", "bad character range"),
        (r"a\Z", r"JavaScript has no \Z; write $"),
        (r"\h", r"JavaScript has no \h"),
        (r"(?<y>a)\k<z>", "there is no group 'z'"),
        ("(?>a)", "JavaScript's expressions, which JSON Schema uses, do not know it"),
        (r"\p{Foo}", "bad escape"),
    ],
)
def test_an_expression_that_is_none(pattern: str, why: str) -> None:
    for properties, path in (
        ({"p": {"type": "string", "pattern": pattern}}, "properties.p.pattern"),
        ({"p": {"anyOf": [{}, {"items": {"pattern": pattern}}]}}, "properties.p.anyOf.1.items.pattern"),
        ({"p": {"patternProperties": {pattern: {}}}}, f"properties.p.patternProperties.{pattern}"),
    ):
        with pytest.raises(ConfigError) as caught:
            read(holding(**properties))
        assert str(caught.value).startswith(f"{PARAMETERS}.{path}: the regular expression {pattern!r} cannot be ")
        assert why in str(caught.value)


def test_words_of_a_pattern_are_names_among_properties() -> None:
    read(holding(pattern={"type": "string"}, enum={"type": "string"}, patternProperties={"type": "object"}))
    read({**holding(), "required": ["["], "default": {"pattern": "["}, "examples": [{"pattern": "["}]})


@pytest.mark.parametrize(
    ("parameters", "fit", "unfit"),
    [
        (
            {"$schema": DRAFT.format(7), **holding(p={"items": [{"type": "number"}, {"type": "string"}]})},
            {"p": [1, "a"]},
            {"p": ["a", 1]},
        ),
        (
            {"$schema": "https://json-schema.org/draft/2019-09/schema", **holding(p={"items": [{"type": "string"}]})},
            {"p": ["a", 1]},
            {"p": [1]},
        ),
        (
            {"$schema": DRAFT.format(4), **holding(n={"type": "number", "minimum": 0, "exclusiveMinimum": True})},
            {"n": 0.5},
            {"n": 0},
        ),
        (
            {"$schema": DRAFT.format(4), "id": "http://x/y", "definitions": {"q": {"type": "string"}},
             **holding(n={"$ref": "#/definitions/q"})},
            {"n": "a"},
            {"n": 1},
        ),
        ({"definitions": {"q": {"type": "string"}}, **holding(n={"$ref": "#/definitions/q"})}, {"n": "a"}, {"n": 1}),
        ({"$schema": "https://json-schema.org/draft-07/schema", **holding(n={"const": 1})}, {"n": 1}, {"n": 2}),
        ({"$schema": "http://json-schema.org/schema", **holding(n={"prefixItems": [False]})}, {"n": []}, {"n": [1]}),
        ({"$id": "http://x/y", "$defs": {"q": {"const": 1}}, **holding(n={"$ref": "y#/$defs/q"})}, {"n": 1}, {"n": 2}),
    ],
)  # fmt: skip
def test_a_draft_is_honoured(parameters: dict[str, Any], fit: Any, unfit: Any) -> None:
    validator = compile_schema(parameters)
    assert validator.is_valid(fit)
    assert not validator.is_valid(unfit)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            holding(p={"items": [{}]}),
            "properties.p.items: no valid JSON Schema: [{}] is a tuple of an older draft; write",
        ),
        (
            holding(p={"minimum": 0, "exclusiveMinimum": True}),
            "properties.p.exclusiveMinimum: no valid JSON Schema: true",
        ),
        (holding(p={"maximum": 0, "exclusiveMaximum": False}), "write the bound itself, as exclusiveMaximum: 9"),
        (
            holding(p={"type": "string", "required": True}),
            "properties.p.required: no valid JSON Schema: true is draft-03",
        ),
        (
            holding(p={"type": "any"}),
            "properties.p.type: no valid JSON Schema: 'any' is no type; expected one or a list",
        ),
        (
            holding(p={"minLength": -1}),
            "properties.p.minLength: no valid JSON Schema: -1 is less than the minimum of 0",
        ),
        (holding(p=5), "properties.p: no valid JSON Schema: 5 is not of types"),
        ({**holding(), "$id": 5}, "$id: no valid JSON Schema"),
        (holding(p={"$ref": "#/$defs/q"}), "properties.p.$ref: a $ref cannot be resolved (Pointer '/$defs/q' does not"),
        (holding(p={"$dynamicRef": "#q"}), "properties.p.$dynamicRef: a $dynamicRef cannot be resolved"),
        (
            holding(p={"$ref": "q.json"}),
            "properties.p.$ref: a $ref cannot be resolved ('q.json' is not in the schema, and",
        ),
        (
            {**holding(), "$schema": "foo bar"},
            "$schema: the draft 'foo bar' is not known, and nothing is fetched; leave",
        ),
        ({**holding(), "$schema": ""}, "$schema: the draft '' is not known"),
        ({**holding(), "$schema": 7}, "$schema: the draft 7 is not known"),
        ({**holding(), "$schema": "http://json-schema.org/draft-03/schema#"}, "draft-03/schema#' is not known"),
        ({"type": None}, "type: no valid JSON Schema: None is no type"),
        ({}, "type: expected 'object', got None"),
        (holding(p={"minimum": float("inf")}), "properties.p.minimum: inf is no JSON"),
    ],
)
def test_what_a_schema_may_not_say(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(parameters)
    assert str(caught.value).startswith(f"{PARAMETERS}.")
    assert message in str(caught.value)


@pytest.fixture
def counted() -> Iterator[tuple[str, list[bytes]]]:
    """Serve a loopback address; the list has the requests."""
    server = socket.create_server(("127.0.0.1", 0))
    came: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                return
            with peer:
                came.append(b"connected")
                peer.sendall(b"HTTP/1.1 404 none\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}", came
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


def test_nothing_is_fetched(counted: tuple[str, list[bytes]], tmp_path: Path) -> None:
    address, came = counted
    for parameters in (
        {"$schema": f"{address}/schema", **holding()},
        {"$schema": f"{address}/draft-07/schema#", **holding()},
        holding(p={"$ref": f"{address}/x"}),
        {"$id": f"{address}/x", **holding(p={"$ref": "y"})},
        {"$schema": DRAFT.format(7), **holding(p={"$ref": f"{address}/x#/definitions/y"})},
        {"$schema": DRAFT.format(4), "id": f"{address}/x", **holding(p={"$ref": "y"})},
        holding(p={"$dynamicRef": f"{address}/x"}),
        holding(p={"$id": f"{address}/p", "$schema": f"{address}/q", "$ref": "r"}),
    ):
        with pytest.raises(ConfigError):
            read(parameters)
    read({"$id": f"{address}/x", **holding(p={"$id": "y", "$schema": f"{address}/q"})})
    read({"$schema": "https://json-schema.org/draft/2019-09/schema", **holding(p={"$recursiveRef": f"{address}/z"})})
    yaml = tmp_path / "tools.yaml"
    yaml.write_text(
        "tools: [{class_name: verl_multiturn.tools.calculator.CalculatorTool, tool_schema: {type: function, function: "
        f"{{name: f, parameters: {{type: object, $schema: '{address}/schema'}}}}}}}}]"
    )
    with pytest.raises(ConfigError, match="is not known, and nothing is fetched"):
        load_tools(yaml)
    assert came == []


def test_a_servers_draft_is_left_out_where_it_changes_nothing() -> None:
    plain = holding(p={"type": "string", "const": "a"})
    for draft in (DRAFT.format(7), "https://json-schema.org/draft/2020-12/schema", None):
        assert without_draft({"$schema": draft, **plain}) == plain
    for parameters in (
        {"$schema": DRAFT.format(7), **holding(p={"items": [{}]})},
        {"$schema": DRAFT.format(7), **holding(p={"$ref": "#", "minimum": 1})},
        {"$schema": DRAFT.format(4), **plain},
        {"$schema": "http://127.0.0.1:1/x", **plain},
    ):
        assert without_draft(parameters) == parameters


def test_a_schema_that_is_nested_too_deeply() -> None:
    nested: dict[str, Any] = {}
    for _ in range(3000):
        nested = {"not": nested}
    with pytest.raises(SchemaError, match="less nesting"):
        compile_schema(nested)


def load(folder: Path, properties: str) -> ToolSchema:
    path = folder / "tools.yaml"
    path.write_text(
        "tools:\n- class_name: verl_multiturn.tools.calculator.CalculatorTool\n  tool_schema:\n    type: function\n"
        f"    function: {{name: f, description: no, parameters: {{type: object, properties: {{{properties}}}}}}}\n"
    )
    (tool,) = load_tools(path).values()
    return tool.tool_schema


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ("x: {type: string, enum: [a, 1]}", "properties.x.enum.1: 1 is not of the type beside it, 'string'; quote it"),
        ("x: {type: string, enum: [true]}", "properties.x.enum.0: True is not of the type beside it"),
        ("x: {type: string, const: 014}", "properties.x.const: 14 is not"),
        ("x: {type: string, default: 1e-5}", "properties.x.default: 1e-05 is not"),
        ("x: {type: boolean, default: no}", "properties.x.default: 'no' is not of the type beside it, 'boolean'"),
        ("x: {type: integer, enum: [1_000]}", "properties.x.enum.0: '1_000' is not"),
        ("x: {type: string, examples: [a, 0x1F]}", "properties.x.examples.1: 31 is not"),
        ("x: {type: array, items: {type: string, enum: [null]}}", "properties.x.items.enum.0: None is not"),
        ("x: {anyOf: [{type: 'null'}, {type: [string, number], const: true}]}", "x.anyOf.1.const: True is not"),
        ("x: {type: string, enum: [a], enum: [b]}", "the key 'enum' is there twice"),
        ("x: {type: number, default: .inf}", "properties.x.default: inf is no JSON"),
        ("1: {type: string}", "properties: 1 is no JSON"),
    ],
)  # fmt: skip
def test_a_value_that_its_own_type_refuses(tmp_path: Path, properties: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, properties)
    assert message in str(caught.value)


def test_a_draft_may_have_examples_that_are_no_list() -> None:
    properties = {"x": {"type": "integer", "examples": 5}, "y": {"type": "integer", "examples": {"short": "5"}}}
    draft = "http://json-schema.org/draft-04/schema#"
    parameters = {"$schema": draft, "type": "object", "properties": properties}
    ToolSchema.read({"type": "function", "function": {"name": "f", "parameters": parameters}}, "here").check_values(
        "here"
    )


def test_texts_that_yaml_1_1_reads_as_something_else(tmp_path: Path) -> None:
    schema = load(tmp_path, "on: {enum: [se, no, dk, off, 12:30, 2024-05-01, 1_000]}, y: {type: string, default: null}")
    assert schema.function.description == "no"
    assert schema.function.parameters["properties"] == {
        "on": {"enum": ["se", "no", "dk", "off", "12:30", "2024-05-01", "1_000"]},
        "y": {"type": "string", "default": None},
    }
    assert schema.read_arguments('{"on": "no"}') == ({"on": "no"}, "")


@pytest.mark.parametrize(("levels", "is_taken"), [(14, True), (28, False), (4000, False)])
def test_references_that_unfold_without_end_are_refused(levels: int, is_taken: bool) -> None:
    """A schema of a server's would else keep the worker for years, at its start or at a call."""
    parts = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(levels)}
    schema = {"$defs": {**parts, f"a{levels}": {}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/a0"}}}
    if is_taken:
        assert compile_schema(schema).is_valid({"x": "y"})
    else:
        with pytest.raises(SchemaError, match=r"unfold to more than 100,000 schemas|with less nesting"):
            compile_schema(schema)
    tree = {"type": "object", "properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}}}
    assert compile_schema(tree).is_valid({"l": {"r": {}}})

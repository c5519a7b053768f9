"""Schemas and settings as YAML files have them."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.long.inputs.input_cases import Case, Right, Seen, accept, refuse, run_command
from tests.long.inputs.input_files import folder_of, in_folder
from verl_multiturn import load_tools

ENTRY = """\
tools:
- class_name: verl_multiturn.tools.calculator.CalculatorTool
  tool_schema:
    type: function
    function:
      name: f
      description: d
      parameters: {parameters}
"""
OWN = """\
from verl_multiturn import BaseTool


class T(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return "a"
"""


def validate(parameters: str) -> Callable[[], Awaitable[Seen]]:
    """Return the door of `validate` with a schema's parameters; the value is the properties that were read."""

    def run(folder: Any) -> Seen:
        seen = run_command("validate", "tools.yaml")
        if seen.kind != "accepted":
            return seen
        (tool,) = load_tools(folder / "tools.yaml").values()
        found = tool.tool_schema.function.parameters.get("properties")
        return Seen("accepted", found, seen.sentence, seen.status)

    return in_folder(run, {"tools.yaml": ENTRY.format(parameters=parameters)})


def load_setting(text: str) -> Callable[[], Awaitable[Seen]]:
    """Return the door of `validate` with the `config` of a tool of one's own; the value is that config."""
    entry = ENTRY.format(parameters="{type: object, properties: {}}").replace(
        "verl_multiturn.tools.calculator.CalculatorTool\n", f"own_inputs.T\n  config: {text}\n"
    )

    def run(folder: Any) -> Seen:
        sys.path.insert(0, str(folder))
        try:
            seen = run_command("validate", "tools.yaml")
            if seen.kind != "accepted":
                return seen
            (tool,) = load_tools(folder / "tools.yaml").values()
            return Seen("accepted", dict(tool.config), seen.sentence, seen.status)
        finally:
            sys.path.remove(str(folder))
            sys.modules.pop("own_inputs", None)

    return in_folder(run, {"tools.yaml": entry, "own_inputs.py": OWN})


@contextmanager
def count_requests() -> Iterator[tuple[str, list[str]]]:
    """Serve an address on loopback; the list has the paths that were requested."""
    came: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            came.append(self.path)
            body = b'{"$schema": "http://json-schema.org/draft-07/schema#"}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", came
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def fetch(parameters: str) -> Callable[[], Awaitable[Seen]]:
    """Return the door of `validate` with an address in a schema; texts fetched from it count as accepted."""

    async def door() -> Seen:
        with (
            count_requests() as (address, came),
            folder_of({"tools.yaml": ENTRY.format(parameters=parameters.replace("ADDRESS", address))}),
        ):
            seen = run_command("validate", "tools.yaml")
        return Seen("accepted", came, "it was fetched") if came else seen

    return door


def cases() -> list[Case]:
    """Return the inputs of this file."""
    of: list[tuple[str, Right]] = [
        ("x: {enum: [se, no, dk]}", accept({"x": {"enum": ["se", "no", "dk"]}})),
        ("x: {type: string, enum: [on, off]}", accept({"x": {"type": "string", "enum": ["on", "off"]}})),
        ("x: {type: string, enum: [12:30, 08:00]}", accept({"x": {"type": "string", "enum": ["12:30", "08:00"]}})),
        ("x: {type: string, default: 2024-05-01}", accept({"x": {"type": "string", "default": "2024-05-01"}})),
        ("x: {type: string, enum: [y, n]}", accept({"x": {"type": "string", "enum": ["y", "n"]}})),
        ("no: {type: string}", accept({"no": {"type": "string"}})),
        ("x: {type: number, enum: [1, 2.5]}", accept({"x": {"type": "number", "enum": [1, 2.5]}})),
        ("x: {type: string, enum: [null, a]}", refuse("enum", "None", "string")),
        ("x: {type: string, enum: [a, 1]}", refuse("enum", "1", "string")),
        ("x: {type: string, const: 007}", refuse("const", "7", "string")),
        ("x: {type: string, default: true}", refuse("default", "True", "string")),
        ("x: {type: boolean, default: yes}", refuse("default", "'yes'", "boolean")),
        ("x: {type: boolean, enum: [on, off]}", refuse("enum", "'on'", "boolean")),
        ("x: {type: integer, default: 1_000}", refuse("default", "'1_000'", "integer")),
        ("x: {type: integer, default: 1.5}", refuse("default", "1.5", "integer")),
        ("x: {type: integer, default: '5'}", refuse("default", "'5'", "integer")),
        ("x: {type: array, items: {type: string, enum: [1]}}", refuse("items", "enum", "1")),
        ("x: {type: array, items: {type: string}, default: a}", refuse("default", "'a'", "array")),
        ("x: {type: [string, 'null'], default: 3}", refuse("default", "3")),
        ("x: {anyOf: [{type: string, const: 3}]}", refuse("anyOf", "const", "3")),
        ("x: {type: string, pattern: '['}", refuse("pattern", "'['")),
        ("x: {type: string, pattern: '(?P<a>x)'}", refuse("pattern", "(?P<a>x)")),
        ("x: {type: string, pattern: '(?i)a'}", refuse("pattern", "(?i)a")),
        ("x: {type: string, pattern: '*'}", refuse("pattern", "'*'")),
        (r"x: {type: string, pattern: '^[\w-.]+$'}", accept()),
        (r"x: {type: string, pattern: '^(?<y>\d{4})-\k<y>$'}", accept()),
        ("x: {type: array, items: [{type: number}]}", refuse("items", "tuple")),
        ("x: {type: number, minimum: 0, exclusiveMinimum: true}", refuse("exclusiveMinimum", "true")),
        ("x: {type: string, required: true}", refuse("required", "true")),
        ("x: {type: strng}", refuse("'strng'", "type")),
        ("x: {type: str}", refuse("'str'", "type")),
        ("x: string", refuse("properties.x", '"string"')),
        ("x: {$ref: '#/$defs/y'}", refuse("$ref", "$defs/y")),
        ("x: {$ref: 'other.json'}", refuse("$ref", "other.json")),
        ("x: {type: string, minLength: -1}", refuse("minLength", "-1")),
        ("x: {type: string}, x: {type: integer}", refuse("'x'", "twice")),
        ("1: {type: string}", refuse("1")),
    ]
    roots: list[tuple[str, Right]] = [
        (
            "{type: object, $schema: 'http://json-schema.org/draft-07/schema#', "
            "properties: {x: {items: [{type: number}]}}}",
            accept({"x": {"items": [{"type": "number"}]}}),
        ),
        (
            "{type: object, $schema: 'http://json-schema.org/draft-04/schema#', "
            "properties: {x: {type: number, minimum: 0, exclusiveMinimum: true}}}",
            accept({"x": {"type": "number", "minimum": 0, "exclusiveMinimum": True}}),
        ),
        ("{type: object, $schema: 'http://json-schema.org/draft-03/schema#', properties: {}}", refuse("draft-03")),
        ("{type: object, $schema: draft7, properties: {}}", refuse("'draft7'")),
        ("{type: array}", refuse("type", "'array'")),
        ("{properties: {}}", refuse("type", "'object'")),
        ("{type: object, properties: {}, required: x}", refuse("required", '"x"')),
        ("{type: object, properties: [x]}", refuse("properties")),
        ("[]", refuse("parameters")),
    ]
    fetched = [
        "{type: object, $schema: 'ADDRESS/schema', properties: {}}",
        "{type: object, $schema: 'ADDRESS/draft-07/schema#', properties: {}}",
        "{type: object, properties: {x: {$ref: 'ADDRESS/x'}}}",
        "{type: object, $id: 'ADDRESS/x', properties: {x: {$ref: y}}}",
        "{type: object, properties: {x: {$dynamicRef: 'ADDRESS/x'}}}",
    ]
    settings: list[tuple[str, Right]] = [
        ("{mode: off}", refuse("mode", "'off'")),
        ("{at: 12:30}", refuse("at", "'12:30'")),
        ("{deep: {list: [a, yes]}}", refuse("deep", "'yes'")),
        ("{mode: 'off'}", accept({"mode": "off"})),
        ("{mode: false}", accept({"mode": False})),
        ("{code: '007'}", accept({"code": "007"})),
        ("{code: 014}", refuse("code", "'014'")),
        ("{day: 2024-05-01}", refuse("day", "2024-05-01")),
    ]
    return [
        *(
            Case("schemas", f"properties: {text}", validate(f"{{type: object, properties: {{{text}}}}}"), right)
            for text, right in of
        ),
        *(Case("schemas", f"parameters: {text}", validate(text), right) for text, right in roots),
        *(
            Case(
                "schemas",
                f"nothing is fetched: {text}",
                fetch(text),
                refuse("ref" if "Ref" in text or "$ref" in text else "draft"),
            )
            for text in fetched
        ),
        *(Case("schemas", f"config: {text}", load_setting(text), right) for text, right in settings),
    ]

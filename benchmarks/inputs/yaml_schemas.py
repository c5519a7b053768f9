"""Schemas and settings as they stand in YAML files: line 12."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.input_cases import Case, Right, Seen, accepted, refused, run_command
from benchmarks.input_files import folder_of, in_folder
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
OWN = "from verl_multiturn import BaseTool\nclass T(BaseTool):\n    async def execute(self, instance_id, parameters, **kwargs): return 'a'\n"


def validated(parameters: str) -> Callable[[], Awaitable[Seen]]:
    """Return the door of `validate` with a schema's parameters; the value is the properties that were read."""

    def run(folder: Any) -> Seen:
        seen = run_command("validate", "tools.yaml")
        if seen.kind != "accepted":
            return seen
        (tool,) = load_tools(folder / "tools.yaml").values()
        found = tool.tool_schema.function.parameters.get("properties")
        return Seen("accepted", found, seen.sentence, seen.status)

    return in_folder(run, {"tools.yaml": ENTRY.format(parameters=parameters)})


def setting(text: str) -> Callable[[], Awaitable[Seen]]:
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
def counting() -> Iterator[tuple[str, list[str]]]:
    """Serve an address on loopback; the list has the paths that were asked for."""
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


def unfetched(parameters: str) -> Callable[[], Awaitable[Seen]]:
    """Return the door of `validate` with an address in a schema; what is fetched from it counts as accepted."""

    async def door() -> Seen:
        with (
            counting() as (address, came),
            folder_of({"tools.yaml": ENTRY.format(parameters=parameters.replace("ADDRESS", address))}),
        ):
            seen = run_command("validate", "tools.yaml")
        return Seen("accepted", came, "it was fetched") if came else seen

    return door  # fmt: skip


def cases() -> list[Case]:
    """Return the inputs of this file."""
    of: list[tuple[str, Right]] = [
        ("x: {enum: [se, no, dk]}", accepted({"x": {"enum": ["se", "no", "dk"]}})),
        ("x: {type: string, enum: [on, off]}", accepted({"x": {"type": "string", "enum": ["on", "off"]}})),
        ("x: {type: string, enum: [12:30, 08:00]}", accepted({"x": {"type": "string", "enum": ["12:30", "08:00"]}})),
        ("x: {type: string, default: 2024-05-01}", accepted({"x": {"type": "string", "default": "2024-05-01"}})),
        ("x: {type: string, enum: [y, n]}", accepted({"x": {"type": "string", "enum": ["y", "n"]}})),
        ("no: {type: string}", accepted({"no": {"type": "string"}})),
        ("x: {type: number, enum: [1, 2.5]}", accepted({"x": {"type": "number", "enum": [1, 2.5]}})),
        ("x: {type: string, enum: [null, a]}", refused("enum", "None", "string")),
        ("x: {type: string, enum: [a, 1]}", refused("enum", "1", "string")),
        ("x: {type: string, const: 007}", refused("const", "7", "string")),
        ("x: {type: string, default: true}", refused("default", "True", "string")),
        ("x: {type: boolean, default: yes}", refused("default", "'yes'", "boolean")),
        ("x: {type: boolean, enum: [on, off]}", refused("enum", "'on'", "boolean")),
        ("x: {type: integer, default: 1_000}", refused("default", "'1_000'", "integer")),
        ("x: {type: integer, default: 1.5}", refused("default", "1.5", "integer")),
        ("x: {type: integer, default: '5'}", refused("default", "'5'", "integer")),
        ("x: {type: array, items: {type: string, enum: [1]}}", refused("items", "enum", "1")),
        ("x: {type: array, items: {type: string}, default: a}", refused("default", "'a'", "array")),
        ("x: {type: [string, 'null'], default: 3}", refused("default", "3")),
        ("x: {anyOf: [{type: string, const: 3}]}", refused("anyOf", "const", "3")),
        ("x: {type: string, pattern: '['}", refused("pattern", "'['")),
        ("x: {type: string, pattern: '(?P<a>x)'}", refused("pattern", "(?P<a>x)")),
        ("x: {type: string, pattern: '(?i)a'}", refused("pattern", "(?i)a")),
        ("x: {type: string, pattern: '*'}", refused("pattern", "'*'")),
        (r"x: {type: string, pattern: '^[\w-.]+$'}", accepted()),
        (r"x: {type: string, pattern: '^(?<y>\d{4})-\k<y>$'}", accepted()),
        ("x: {type: array, items: [{type: number}]}", refused("items", "tuple")),
        ("x: {type: number, minimum: 0, exclusiveMinimum: true}", refused("exclusiveMinimum", "true")),
        ("x: {type: string, required: true}", refused("required", "true")),
        ("x: {type: strng}", refused("'strng'", "type")),
        ("x: {type: str}", refused("'str'", "type")),
        ("x: string", refused("properties.x", '"string"')),
        ("x: {$ref: '#/$defs/y'}", refused("$ref", "$defs/y")),
        ("x: {$ref: 'other.json'}", refused("$ref", "other.json")),
        ("x: {type: string, minLength: -1}", refused("minLength", "-1")),
        ("x: {type: string}, x: {type: integer}", refused("'x'", "twice")),
        ("1: {type: string}", refused("1")),
    ]  # fmt: skip
    roots: list[tuple[str, Right]] = [
        ("{type: object, $schema: 'http://json-schema.org/draft-07/schema#', properties: {x: {items: [{type: number}]}}}",
         accepted({"x": {"items": [{"type": "number"}]}})),
        ("{type: object, $schema: 'http://json-schema.org/draft-04/schema#', properties: {x: {type: number, minimum: 0, "
         "exclusiveMinimum: true}}}", accepted({"x": {"type": "number", "minimum": 0, "exclusiveMinimum": True}})),
        ("{type: object, $schema: 'http://json-schema.org/draft-03/schema#', properties: {}}", refused("draft-03")),
        ("{type: object, $schema: draft7, properties: {}}", refused("'draft7'")),
        ("{type: array}", refused("type", "'array'")),
        ("{properties: {}}", refused("type", "'object'")),
        ("{type: object, properties: {}, required: x}", refused("required", '"x"')),
        ("{type: object, properties: [x]}", refused("properties")),
        ("[]", refused("parameters")),
    ]  # fmt: skip
    fetched = [
        "{type: object, $schema: 'ADDRESS/schema', properties: {}}",
        "{type: object, $schema: 'ADDRESS/draft-07/schema#', properties: {}}",
        "{type: object, properties: {x: {$ref: 'ADDRESS/x'}}}",
        "{type: object, $id: 'ADDRESS/x', properties: {x: {$ref: y}}}",
        "{type: object, properties: {x: {$dynamicRef: 'ADDRESS/x'}}}",
    ]
    settings: list[tuple[str, Right]] = [
        ("{mode: off}", refused("mode", "'off'")),
        ("{at: 12:30}", refused("at", "'12:30'")),
        ("{deep: {list: [a, yes]}}", refused("deep", "'yes'")),
        ("{mode: 'off'}", accepted({"mode": "off"})),
        ("{mode: false}", accepted({"mode": False})),
        ("{code: '007'}", accepted({"code": "007"})),
        ("{code: 014}", refused("code", "'014'")),
        ("{day: 2024-05-01}", refused("day", "2024-05-01")),
    ]
    return [
        *(Case(12, f"properties: {text}", validated(f"{{type: object, properties: {{{text}}}}}"), right) for text, right in of),
        *(Case(12, f"parameters: {text}", validated(text), right) for text, right in roots),
        *(Case(12, f"nothing is fetched: {text}", unfetched(text), refused("ref" if "Ref" in text or "$ref" in text else "draft"))
          for text in fetched),
        *(Case(12, f"config: {text}", setting(text), right) for text, right in settings),
    ]  # fmt: skip

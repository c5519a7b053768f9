"""Three kinds of call formats besides plain JSON: arguments in tags, calls written as Python, and Gemma's JSON.

`LlamaParser` is here, too: plain JSON, but most often without a mark around the call. `chat.call_formats` defines the
formats themselves.
"""

from __future__ import annotations

import ast
import html
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.chat.parsers import JsonParser, NoCallError, TextParser, Tokenizer
from verl_multiturn.chat.parsing.call_json import (
    NamedCall,
    UnreadableCallError,
    as_json,
    named_calls,
    read_json,
    read_problem,
    read_whole_json,
)

_JSON_TYPES = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}
# Llama 4 sometimes writes this after a list of calls.
_PYTHON_END = "<|python_end|>"
# Chat templates write an argument as Jinja prints it, which is Python's spelling.
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True)
class TagForm:
    """A format that writes a call in tags.

    Each argument stands between two tags, as text. The tool's schema gives its type.
    """

    begun: str
    """Regular expression for how a call begins."""
    close: str
    """Text that closes a call."""
    header: str
    """Regular expression for what stands before the arguments, with the group `name`."""
    argument: str
    """Regular expression for one argument, with the groups `key` and `value`.

    Where the model says whether a value is a string, the expression has the group `string`, too.
    """
    end: str
    """Regular expression for what stands after the arguments."""
    opening: str
    """Regular expression for every tag that begins a call or a part of one.

    A value that holds such a tag is not read: nobody can know whether the tag is text of the value, or the value was
    not closed.
    """
    closing: str
    """Regular expression for every tag that ends a call or a part of one."""
    written: str
    """Example of a call, shown to the model when a call cannot be read."""
    escaped: bool = False
    """True where values are escaped as in HTML."""


@dataclass(frozen=True)
class PythonForm:
    """A format that writes a list of calls as Python: `[name(key="value"), …]`."""

    begun: str
    """Regular expression for how a list of calls begins."""
    close: str
    """Text that closes the list; "" where the list's own `]` closes it."""


class TagParser(TextParser):
    """A parser for calls whose arguments stand in tags.

    Args:
        tokenizer: Decodes the model's turns.
        end_ids: Every token id that ends a turn.
        form: The format.
        marks: Pairs of texts that open and close the model's reasoning.
    """

    def __init__(
        self, tokenizer: Tokenizer, end_ids: Sequence[int], form: TagForm, marks: Sequence[tuple[str, str]]
    ) -> None:
        super().__init__(tokenizer, end_ids, marks, form.begun, form.close, form.closing)
        self._form = form
        self._header, self._end = re.compile(form.header), re.compile(form.end)
        self._argument = re.compile(form.argument, re.DOTALL)
        self._tag = re.compile(form.opening)

    def _call(self, text: str, found: re.Match[str], schemas: Sequence[dict[str, Any]]) -> tuple[list[NamedCall], int]:
        header = self._header.match(text, found.start())
        if header is None:
            raise UnreadableCallError(f"the call cannot be read; write it as {self._form.written}")
        parameters = _parameters(schemas, header["name"])
        arguments: dict[str, Any] = {}
        position = header.end()
        while one := self._argument.match(text, position):
            key = one["key"].strip()  # not in the expression: skipping white space there takes quadratic time
            if key in arguments:
                raise UnreadableCallError(f"the call has the argument {key!r:.100} twice")
            if tag := self._tag.search(one["value"]):
                raise UnreadableCallError(
                    f"the argument {key!r:.100} is not closed before {tag[0]!r}, or holds it, and none may"
                )
            arguments[key] = self._value(one, key, parameters)
            position = one.end()
        if not arguments and (opened := re.compile(r"\s*(?=\{)").match(text, position)):
            arguments, position = read_json(text, opened.end())  # DeepSeek's models may write one object instead
        end = self._end.match(text, position)
        if end is None:
            rest = text[position : position + 20].strip()
            where = f"from {rest!r} on" if rest else "to its end"
            written = self._form.written
            raise UnreadableCallError(f"the call of {header['name']!r} cannot be read {where}; write it as {written}")
        return [(header["name"], as_json(arguments))], end.end()

    def _unread_to(self, text: str, position: int) -> int:
        return len(text)  # nobody knows where an argument ends that cannot be read

    def _value(self, one: re.Match[str], key: str, parameters: Mapping[str, Any]) -> Any:
        text = html.unescape(one["value"]) if self._form.escaped else one["value"]
        if "string" in one.re.groupindex:
            return read_argument(text, frozenset({"string"} if one["string"] == "true" else ()))
        properties = parameters.get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        return read_argument(text, types_of(schema, parameters))


# A string of Python or JSON. A string that is not closed also matches, up to the end of its line or of the text, so
# that the search reads nothing twice.
_STRING = (
    r"""\"{3}(?:\\.|[^\\])*?(?:\"{3}|\\?\Z)|'{3}(?:\\.|[^\\])*?(?:'{3}|\\?\Z)"""
    r"""|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?"""
)


class PythonParser(TextParser):
    """A parser for calls written as Python. It reads a list of calls as a whole or not at all.

    Args:
        tokenizer: Decodes the model's turns.
        end_ids: Every token id that ends a turn.
        form: The format.
        marks: Pairs of texts that open and close the model's reasoning.
    """

    def __init__(
        self, tokenizer: Tokenizer, end_ids: Sequence[int], form: PythonForm, marks: Sequence[tuple[str, str]]
    ) -> None:
        super().__init__(tokenizer, end_ids, marks, form.begun, form.close)
        # Strings are matched first, because a mark within a string closes nothing.
        self._closed = re.compile(f"{_STRING}|(?P<close>{re.escape(form.close or ']')})", re.DOTALL)

    def _call(self, text: str, found: re.Match[str], schemas: Sequence[dict[str, Any]]) -> tuple[list[NamedCall], int]:
        start, close = found.end(), self._close or "]"
        end = self._close_at(text, start) if self._close else text.rfind(close)
        if end < start:
            raise UnreadableCallError(f"the list of calls is not closed; end it with {close}")
        position = end + len(close)
        source = text[start : end if self._close else position].strip()
        position += len(_PYTHON_END) if text.startswith(_PYTHON_END, position) else 0
        try:
            if source.startswith(("{", "[{")):
                return named_calls(read_whole_json(source)), position
            return _python_calls(source), position
        except UnreadableCallError:
            raise
        except SyntaxError as error:
            problem = str(error.msg)
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            problem = read_problem(error)
        raise UnreadableCallError(f'the calls cannot be read ({problem}); write them as [name(key="value")]')

    def _close_at(self, text: str, position: int) -> int:
        """Return the index of the mark that closes the calls; -1 when there is none."""
        marks = (found.start() for found in self._closed.finditer(text, position) if found["close"])
        return next(marks, -1)


class _JsonWords(ast.NodeTransformer):
    """Replace JSON's `true`, `false` and `null` by Python's constants: some templates write objects as JSON."""

    _WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace the name if it is one of JSON's words."""
        return ast.Constant(self._WORDS[node.id]) if node.id in self._WORDS else node


def _python_calls(source: str) -> list[NamedCall]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about style in the model's code
        tree = _JsonWords().visit(ast.parse(source, mode="eval")).body
    calls = []
    for call in tree.elts if isinstance(tree, ast.List) and tree.elts else [tree]:
        if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
            raise ValueError("not a call whose arguments are named")
        arguments = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
        if len(arguments) < len(call.keywords):
            raise ValueError("an argument is there twice")
        calls.append((ast.unparse(call.func), as_json(arguments)))
    return calls


def _literal(node: ast.expr) -> Any:
    """Return the value of a Python literal, if JSON can hold it unchanged.

    Raises:
        ValueError: The expression is not a literal, or the keys of an object are not texts or integers, or one key
            stands twice.
    """
    for each in ast.walk(node):
        if isinstance(each, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in each.keys]
            if not all(type(key) in (str, int) for key in keys) or len(set(map(str, keys))) < len(keys):
                raise ValueError("the keys of an object are words or numbers, each there once")
    return ast.literal_eval(node)


class GemmaParser(JsonParser):
    """A parser for Gemma 4: JSON with bare keys, and strings between tokens of their own (`<|"|>`)."""

    _QUOTE = '<|"|>'
    _KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:]+)(?=\s*:)")

    def _value(self, text: str, position: int) -> tuple[Any, int]:
        end = self._close_at(text, position)
        parts = text[position:end].split(self._QUOTE)
        strings = [
            json.dumps(part) if index % 2 else self._KEY.sub(r'\1"\2"', part) for index, part in enumerate(parts)
        ]
        value, length = super()._value("".join(strings), 0)
        if length < len("".join(strings).rstrip()):
            raise UnreadableCallError(
                f"the call's arguments are followed by something else; write {self._form.written}"
            )
        return value, end

    def _close_at(self, text: str, position: int) -> int:
        """Return the index of the mark that closes the call. A mark within a string closes nothing.

        Raises:
            UnreadableCallError: The call is not closed.
        """
        in_string = False
        for mark in re.finditer(f"{re.escape(self._QUOTE)}|{re.escape(self._close)}", text[position:]):
            if mark[0] == self._QUOTE:
                in_string = not in_string
            elif not in_string:
                return position + mark.start()
        raise UnreadableCallError(f"the call is not closed; write {self._form.written}")


class LlamaParser(JsonParser):
    """A parser for Llama 3: JSON that at most `<|python_tag|>` marks as a call.

    Without that mark, an object is a call in two cases: it names a tool of the request, or the request has tools and
    the object is a name and at least one argument and nothing else. Any other object that begins with a name is an
    answer.
    """

    _NAME = re.compile(
        r"""\s*\{\s*["'](?:type["']\s*:\s*["']function["']\s*,\s*["'])?name["']"""
        r"""\s*:\s*["'](?P<name>[^"']*)(?P<cut>\Z)?"""
    )

    def _call(self, text: str, found: re.Match[str], schemas: Sequence[dict[str, Any]]) -> tuple[list[NamedCall], int]:
        marked = "<|python_tag|>" in found[0]
        if not marked and not self._names_a_tool(text, found.end(), schemas):
            try:
                calls, end = super()._call(text, found, schemas)
            except UnreadableCallError:
                raise NoCallError from None
            if not schemas or not calls[0][1].startswith('{"'):
                raise NoCallError
            return calls, end
        return super()._call(text, found, schemas)

    def _names_a_tool(self, text: str, position: int, schemas: Sequence[dict[str, Any]]) -> bool:
        found = self._NAME.match(text, position)
        if found is None:
            return False
        tools = [schema["function"]["name"] for schema in schemas]
        return (
            any(tool.startswith(found["name"]) for tool in tools)
            if found["cut"] is not None
            else found["name"] in tools
        )


def _parameters(schemas: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the JSON Schema of a tool's arguments; an empty one for a tool that does not exist."""
    for schema in schemas:
        if schema["function"]["name"] == name:
            parameters = schema["function"].get("parameters")
            return parameters if isinstance(parameters, dict) else {}
    return {}


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

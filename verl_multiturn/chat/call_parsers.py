"""Three kinds of call formats beside plain JSON: arguments in tags, calls as Python writes them, and Gemma's JSON.

The formats themselves are in `chat.call_formats`.
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

from verl_multiturn.chat.call_json import (
    NamedCall,
    UnreadableCallError,
    as_json,
    named_calls,
    read_json,
    read_problem,
    read_whole_json,
)
from verl_multiturn.chat.parsers import JsonParser, NoCallError, TextParser, Tokenizer

_JSON_TYPES = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}
# What Llama 4 writes after a list of calls, now and then.
_PYTHON_END = "<|python_end|>"
# Chat templates write an argument as Jinja does, which is as Python does.
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True)
class TagForm:
    """A call in tags: each argument is between two of them, as text; what it means is in the tool's schema."""

    begun: str
    close: str
    header: str
    """Regular expression of what is before the arguments, with the group `name`."""
    argument: str
    """Regular expression with the groups `key` and `value`; `string`, where the model says whether it is one."""
    end: str
    """Regular expression of what is after the arguments."""
    opening: str
    """Regular expression of every tag that begins a call or a part of one. A value that holds one is not read: whether
    it is text of the value, or the value was not closed, is not to be known."""
    closing: str
    """Regular expression of every tag that ends a call or a part of one."""
    written: str
    escaped: bool = False
    """Whether values are escaped as in HTML."""


@dataclass(frozen=True)
class PythonForm:
    """A list of calls as Python writes them: `[name(key="value"), …]`."""

    begun: str
    close: str


class TagParser(TextParser):
    """Calls in tags."""

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
            key = one["key"].strip()  # here, since an expression that leaves white space out takes quadratic time
            if key in arguments:
                raise UnreadableCallError(f"the call has the argument {key!r:.100} twice")
            if tag := self._tag.search(one["value"]):
                raise UnreadableCallError(
                    f"the argument {key!r:.100} is not closed before {tag[0]!r}, or holds it, and none may"
                )
            arguments[key] = self._value(one, key, parameters)
            position = one.end()
        if not arguments and (opened := re.compile(r"\s*(?=\{)").match(text, position)):
            arguments, position = read_json(text, opened.end())  # DeepSeek's models write the whole object, too
        end = self._end.match(text, position)
        if end is None:
            rest = text[position : position + 20].strip()
            where = f"from {rest!r} on" if rest else "to its end"
            written = self._form.written
            raise UnreadableCallError(f"the call of {header['name']!r} cannot be read {where}; write it as {written}")
        return [(header["name"], as_json(arguments))], end.end()

    def _unread_to(self, text: str, position: int) -> int:
        return len(text)  # where an argument ends that cannot be read is not known

    def _value(self, one: re.Match[str], key: str, parameters: Mapping[str, Any]) -> Any:
        text = html.unescape(one["value"]) if self._form.escaped else one["value"]
        if "string" in one.re.groupindex:
            return read_argument(text, frozenset({"string"} if one["string"] == "true" else ()))
        properties = parameters.get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        return read_argument(text, types_of(schema, parameters))


# A string of Python, or of JSON. One that is not closed is none, and ends with the line or the text, so that nothing is
# looked at twice.
_STRING = (
    r"""\"{3}(?:\\.|[^\\])*?(?:\"{3}|\\?\Z)|'{3}(?:\\.|[^\\])*?(?:'{3}|\\?\Z)"""
    r"""|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?"""
)


class PythonParser(TextParser):
    """Calls as Python writes them; a list of them is read as a whole or not at all."""

    def __init__(
        self, tokenizer: Tokenizer, end_ids: Sequence[int], form: PythonForm, marks: Sequence[tuple[str, str]]
    ) -> None:
        super().__init__(tokenizer, end_ids, marks, form.begun, form.close)
        # A mark within a string closes nothing.
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
        """Where the mark stands that closes the calls; -1 where it does not."""
        marks = (found.start() for found in self._closed.finditer(text, position) if found["close"])
        return next(marks, -1)


class _JsonWords(ast.NodeTransformer):
    """Some templates write an object within a call as JSON does."""

    _WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._WORDS[node.id]) if node.id in self._WORDS else node


def _python_calls(source: str) -> list[NamedCall]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the code's style, to whom it may concern
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
    """The value of a literal that JSON can hold as it is."""
    for each in ast.walk(node):
        if isinstance(each, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in each.keys]
            if not all(type(key) in (str, int) for key in keys) or len(set(map(str, keys))) < len(keys):
                raise ValueError("the keys of an object are words or numbers, each there once")
    return ast.literal_eval(node)


class GemmaParser(JsonParser):
    """Gemma 4: JSON whose keys are bare, and whose strings are between tokens of their own."""

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
        """Where the mark stands that closes the call; within a string it closes nothing."""
        in_string = False
        for mark in re.finditer(f"{re.escape(self._QUOTE)}|{re.escape(self._close)}", text[position:]):
            if mark[0] == self._QUOTE:
                in_string = not in_string
            elif not in_string:
                return position + mark.start()
        raise UnreadableCallError(f"the call is not closed; write {self._form.written}")


class LlamaParser(JsonParser):
    """Llama 3: JSON that nothing marks but, sometimes, `<|python_tag|>`.

    Without that mark an object is a call where it names a tool of the request, or is a name and arguments and nothing
    else; another object that begins with a name is an answer.
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
    """The JSON Schema of a tool's arguments; an empty one for a tool that does not exist."""
    for schema in schemas:
        if schema["function"]["name"] == name:
            parameters = schema["function"].get("parameters")
            return parameters if isinstance(parameters, dict) else {}
    return {}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows, as far as it says so; empty: any.

    Args:
        root: where a `$ref` leads to.
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
    """What an argument's text means.

    A string stays as it is, anything else is JSON. Text that is not what the schema asks for stays text too: the check
    against the schema then tells the model.
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

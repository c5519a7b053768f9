"""Calls written as Python.

A tool and its arguments may have names that are none in Python: of words of the language, with a hyphen, a dot or a
digit in front. They are read as the model wrote them, character by character.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any
from unicodedata import normalize

from verl_multiturn.chat.parsing.call_json import (
    NamedCall,
    UnreadableCallError,
    as_json,
    named_calls,
    read_problem,
    read_whole_json,
)
from verl_multiturn.chat.parsing.text_parser import NoCallError, TextParser
from verl_multiturn.chat.parsing.turns import ParserTokenizer
from verl_multiturn.syntax import parse_expression

# Llama 4 sometimes writes this after a list of calls.
_PYTHON_END = "<|python_end|>"


@dataclass(frozen=True)
class PythonForm:
    """A format that writes a list of calls as Python: `[name(key="value"), …]`."""

    begun: str
    """Regular expression for how a list of calls begins."""
    close: str
    """Text that closes the list; "" where the list's own `]` closes it."""
    mark: str = ""
    """Text that marks a list of calls, in a format where a list may also come without it.

    Then a list whose first element is not a call is an answer.
    """


# A string of Python or JSON. A string that is not closed also matches, up to the end of its line or of the text, so
# that the search reads nothing twice.
_STRING = (
    r"""\"{3}(?:\\.|[^\\])*?(?:\"{3}|\\?\Z)|'{3}(?:\\.|[^\\])*?(?:'{3}|\\?\Z)"""
    r"""|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?"""
)


# The beginning of a list of calls: a name, and the sign that it is a call for sure (no argument, or a named one) or
# likely (a named one whose name holds spaces).
_FIRST = re.compile(
    r"""\[\s*(?P<name>[\w.-]+)\(\s*(?:(?P<sure>\)|[^\s=()\[\]{},'"]+\s*=(?!=))|(?P<likely>[^=()\[\]{},'"]+=(?!=)))?"""
)
_SIMPLE_NAME = re.compile(r"[A-Za-z_][\w.]*")
_TOKEN = re.compile(
    rf"(?P<string>{_STRING})|(?P<open>[(\[{{])|(?P<close>[)\]}}])|(?P<comma>,)|(?P<equals>=)", re.DOTALL
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
        self, tokenizer: ParserTokenizer, end_ids: Sequence[int], form: PythonForm, marks: Sequence[tuple[str, str]]
    ) -> None:
        super().__init__(tokenizer, end_ids, marks, form.begun, form.close)
        # Strings are matched first, because a mark within a string closes nothing.
        self._mark = form.mark
        self._closed = re.compile(f"{_STRING}|(?P<close>{re.escape(form.close or ']')})", re.DOTALL)

    def _call(self, text: str, found: re.Match[str], schemas: Sequence[dict[str, Any]]) -> tuple[list[NamedCall], int]:
        if self._mark and not found[0].startswith(self._mark):
            _check_first(text, found, schemas)
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
            return _python_calls(source, schemas), position
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


def _check_first(text: str, found: re.Match[str], schemas: Sequence[dict[str, Any]]) -> None:
    """Refuse a list without a mark that is text of an answer.

    Raises:
        NoCallError: Its first element is not certainly a call. At the beginning of a turn, a name and a bracket are
            enough.
    """
    first = _FIRST.match(text, text.index("[", found.start()))
    if first is None:
        raise NoCallError
    is_known = any(schema["function"]["name"] == first["name"] for schema in schemas)
    is_name = is_known or re.search(r"[^\W\d]", first["name"])
    is_odd = is_known and _argument_at(text, text.index("(", first.start()) + 1, _odd_arguments(schemas))
    is_at_begin = (is_known or _SIMPLE_NAME.fullmatch(first["name"])) and not text[: found.start()].strip()
    if not ((first["sure"] and is_name) or (first["likely"] and is_known) or is_odd or is_at_begin):
        raise NoCallError


# Names that are not keywords, and yet are read as something else or not at all.
_CHANGED = frozenset({*_JsonWords._WORDS, "__debug__"})


def _python_calls(source: str, schemas: Sequence[dict[str, Any]]) -> list[NamedCall]:
    names = _CallNames(source, schemas)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about style in the model's code
        tree = _JsonWords().visit(parse_expression(names.source))
    calls = []
    for call in tree.elts if isinstance(tree, ast.List) and tree.elts else [tree]:
        if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
            raise ValueError("not a call whose arguments are named")
        name = ast.unparse(call.func)
        if not re.fullmatch(r"[\w.]+", name):
            raise ValueError(f"{names.written(name)[:100]!r} is no name of a tool")
        arguments = {names.written(str(keyword.arg)): _literal(keyword.value) for keyword in call.keywords}
        if len(arguments) < len(call.keywords):
            raise ValueError("an argument is there twice")
        calls.append((names.written(name), as_json(arguments)))
    return calls


class _CallNames:
    """The names of calls and arguments in a list of calls, those that Python would not keep replaced.

    Args:
        source: The list, or one call.
        schemas: Schemas of the request's tools. Their arguments' names may hold any character.

    Attributes:
        source: The list, with a name of Python in the place of each name that is none.
    """

    def __init__(self, source: str, schemas: Sequence[dict[str, Any]]) -> None:
        self._replaced: dict[str, str] = {}
        self._prefix = "q_"
        while self._prefix in source:
            self._prefix = f"q{self._prefix}"
        self._odd = _odd_arguments(schemas)
        parts: list[str] = []
        position = 0
        for start, end, is_call in self._spans(source):
            parts += source[position:start], self._stand_in(source[start:end], is_call)
            position = end
        self.source = "".join([*parts, source[position:]])

    def written(self, text: str) -> str:
        """Return a name of the tree, or a longer text of it, with the names that the model wrote."""
        return re.sub(rf"{self._prefix}\d+", lambda found: self._replaced.get(found[0], found[0]), text)

    def _stand_in(self, name: str, is_call: bool) -> str:
        if all(map(_is_kept, map(str.strip, name.split(".")) if is_call else (name,))):
            return name
        stand_in = f"{self._prefix}{len(self._replaced)}"
        self._replaced[stand_in] = name
        return stand_in

    def _spans(self, source: str) -> Iterator[tuple[int, int, bool]]:
        """Yield the places of names, and whether each is that of a call.

        A name comes before the bracket of a call, and before the `=` of an argument of a call.
        """
        outer = 1 if source.startswith("[") else 0
        depth, position, begin = 0, 0, 0
        while True:
            if depth == outer + 1 and begin == position and (odd := _argument_at(source, begin, self._odd)):
                yield *odd, False
                position, begin = odd[1], -1
            found = _TOKEN.search(source, position)
            if found is None:
                return
            position = found.end()
            kind, start = found.lastgroup, found.start()
            if kind == "open":
                if depth == outer and found[0] == "(":
                    yield from ((*span, True) for span in _stripped(source, begin, start))
                depth += 1
            elif kind == "close":
                depth -= 1
            elif kind == "equals" and depth == outer + 1 and not _is_comparison(source, start):
                yield from ((*span, False) for span in _stripped(source, begin, start))
            # A name is at the beginning of an element: behind a bracket or a comma.
            begin = position if kind in ("open", "comma") and depth in (outer, outer + 1) else -1


def _argument_at(source: str, position: int, names: Sequence[str]) -> tuple[int, int] | None:
    """Return where the name of an argument is at a position; None if none of these names does."""
    if names:
        position += len(source[position : position + 100]) - len(source[position : position + 100].lstrip())
    for name in names:
        end = position + len(name)
        if source.startswith(name, position) and re.compile(r"\s*=(?!=)").match(source, end):
            return position, end
    return None


def _is_comparison(source: str, position: int) -> bool:
    return source[position + 1 : position + 2] == "=" or source[position - 1] in "!<>:="


def _stripped(source: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the place of the text between two places, without the white space around it; nothing if that is empty.

    Nothing is there, either, where `start` is negative.
    """
    if start < 0:
        return
    text = source[start:end]
    if text.strip():
        start += len(text) - len(text.lstrip())
        yield start, start + len(text.strip())


def _odd_arguments(schemas: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of arguments that a search for brackets and quotes could not find, the longest first."""
    found = set()
    for schema in schemas:
        parameters = schema["function"].get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        found |= {
            name
            for name in (properties if isinstance(properties, dict) else ())
            if re.search(r"[()\[\]{},='\"]|[!<>:]\Z", name)
        }
    return sorted(found, key=lambda name: (-len(name), name))


def _is_kept(name: str) -> bool:
    """Return whether the reading keeps a name as it is written."""
    return name.isidentifier() and not iskeyword(name) and name not in _CHANGED and normalize("NFKC", name) == name


def _literal(node: ast.expr) -> Any:
    """Return the value of a Python literal, if JSON can hold it unchanged.

    Raises:
        ValueError: The expression is not a literal (the text shows the part that is none), or the keys of an object are
            not texts or integers, or one key occurs twice.
    """
    for each in ast.walk(node):
        if isinstance(each, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in each.keys]
            if not all(type(key) in (str, int) for key in keys) or len(set(map(str, keys))) < len(keys):
                raise ValueError("the keys of an object are words or numbers, each there once")
    try:
        return ast.literal_eval(node)
    except ValueError:  # whose text has the address of a node
        raise ValueError(f"{ast.unparse(_no_literal(node)):.100} is no plain value") from None


def _no_literal(node: ast.AST) -> ast.AST:
    """Return the smallest part of an expression because of which the whole is not a literal."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.expr):
            try:
                ast.literal_eval(part)
            except ValueError:
                return _no_literal(part)
    return node

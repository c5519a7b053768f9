"""Calls written as Python."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.chat.parsing.call_json import (
    NamedCall,
    UnreadableCallError,
    as_json,
    named_calls,
    read_problem,
    read_whole_json,
)
from verl_multiturn.chat.parsing.text_parser import TextParser
from verl_multiturn.chat.parsing.turns import Tokenizer
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
        tree = _JsonWords().visit(parse_expression(source))
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
        ValueError: The expression is not a literal (the text shows the part that is none), or the keys of an object are
            not texts or integers, or one key stands twice.
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
    """Return the smallest part of an expression because of which the whole is no literal."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.expr):
            try:
                ast.literal_eval(part)
            except ValueError:
                return _no_literal(part)
    return node

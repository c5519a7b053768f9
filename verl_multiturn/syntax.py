"""Python text as a tree, in any thread: verdicts, rewards, parsers of calls and task sets read others' text with it.

`ast.parse` of CPython 3.11 and 3.12 counts its depth once for all threads, so that two at once may end in `SystemError`
though the text is sound (cpython#106905). Both are right at the next try.
"""

from __future__ import annotations

import ast

_TRIES = 20  # of 600 texts in six threads that did nothing else, nine hit it once


def parse_module(source: str | bytes) -> ast.Module:
    """Return the tree of a file.

    Args:
        source: Its text.

    Raises:
        SyntaxError: It is not Python.
        RecursionError: It is nested too deeply.
        MemoryError: As before, for some texts.
    """
    tree = _parse(source, "exec")
    assert isinstance(tree, ast.Module)
    return tree


def parse_expression(text: str) -> ast.expr:
    """Return the tree of one expression.

    Args:
        text: The expression.

    Raises:
        SyntaxError: It is none, or more than one.
        RecursionError: It is nested too deeply.
        MemoryError: As before, for some texts.
    """
    tree = _parse(text, "eval")
    assert isinstance(tree, ast.Expression)
    return tree.body


def _parse(source: str | bytes, mode: str) -> ast.AST:
    for _ in range(_TRIES - 1):
        try:
            return ast.parse(source, mode=mode)
        except SystemError:
            continue
    return ast.parse(source, mode=mode)

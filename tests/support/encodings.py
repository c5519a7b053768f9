"""Calls that read or write text in the machine's encoding, found in a file's syntax.

The result of such a call depends on the locale: under `LC_ALL=C` or in Latin-1 a file of ours is torn, or refused.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

_SUBPROCESS = {"run", "Popen", "check_output", "check_call", "call"}
_FILES = {"NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile"}
_OF_OTHER_FILES = {"os", "tarfile", "zipfile"}
"""Modules whose `open` takes a mode, and opens no text."""
_PATHS = ("path", "file", "log")


def calls_without_encoding(text: str) -> Iterator[ast.Call]:
    """Yield the calls of a file that open, read or write text and name no encoding.

    Args:
        text: The source of a Python file.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and _reads_text(node):
            names = {keyword.arg for keyword in node.keywords}
            if not names & {"encoding", None}:  # None: `**arguments`
                yield node


def _reads_text(call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id == "open" and _is_text(_mode(call, 1), "r")
    if not isinstance(function, ast.Attribute):
        return False
    name, count = function.attr, len(call.args)
    if name in ("read_text", "write_text"):
        return count <= (name == "write_text")
    if name == "fdopen":
        return _is_text(_mode(call, 1), "r")
    if name in _FILES:
        return _is_text(_mode(call, 0), "w+b")
    if name in ("getoutput", "getstatusoutput", "TextIOWrapper"):
        return True
    if name in _SUBPROCESS:
        return any(keyword.arg in ("text", "universal_newlines") for keyword in call.keywords)
    if name == "open":
        return _opens_path(function.value, call)
    return False


def _opens_path(value: ast.expr, call: ast.Call) -> bool:
    """Return whether a call of a method `open` opens a file as text: it names a mode, or is that of a path."""
    mode = _mode(call, 0)
    if isinstance(value, ast.Name) and value.id in _OF_OTHER_FILES:
        return False
    if mode is not None:
        is_mode = isinstance(mode, ast.Constant) and isinstance(mode.value, str) and set(mode.value) <= set("rwaxt+b")
        return is_mode and _is_text(mode, "r")
    return not call.args and ast.unparse(value).endswith(_PATHS)


def _mode(call: ast.Call, place: int) -> ast.expr | None:
    named = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    return named[0] if named else call.args[place] if len(call.args) > place else None


def _is_text(mode: ast.expr | None, default: str) -> bool:
    if mode is None:
        return "b" not in default
    return not (isinstance(mode, ast.Constant) and "b" in str(mode.value))

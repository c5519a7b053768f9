"""Docstrings of functions: the description of the function, and of each parameter.

| style | a parameter |
|---|---|
| Google | in a section `Args:`, as `limit (int): At most so many.` |
| NumPy | in a section `Parameters` with a line of dashes below, as `limit : int` and an indented text |
| reStructuredText | as `:param int limit: At most so many.` |
| Epytext | as `@param limit: At most so many.` |

Invariant: any text can be read. Text of no style is part of the description of the function, up to the first section or
field.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

_GOOGLE = re.compile(
    r"^(Args|Arguments|Parameters|Params|Keyword Args|Keyword Arguments|Other Parameters|"
    r"Returns?|Yields?|Raises|Examples?|Notes?|Warnings?|See Also|References?|Todo|Attributes):\s*$"
)
_OF_PARAMETERS = re.compile(r"^(Args|Arguments|Parameters|Params|Keyword Args|Keyword Arguments|Other Parameters)\b")
_NAMES = r"[`*]*\w+`*(?:\s*,\s*[`*]*\w+`*)*"
_ITEM = re.compile(rf"^(?:[-*]\s+)?({_NAMES})\s*(?:\((?:[^()]|\([^()]*\))*\))?\s*:\s*(.*)$")
_NUMPY_ITEM = re.compile(rf"^({_NAMES})\s*(?::.*)?$")
_FIELD = re.compile(r"^[:@](\w+)(?:\s+([^:]*?))?\s*:\s*(.*)$")
_FIELD_BEGINS = re.compile(
    r"^[:@](?:param|parameter|arg|argument|key|keyword|kwarg|type|raise|raises|except|exception|return|returns|rtype|"
    r"yield|yields|ytype|var|ivar|meta)\b[^:]*:"
)
_PARAMETER_FIELDS = ("param", "parameter", "arg", "argument", "key", "keyword", "kwarg")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Read a docstring in the style of Google, NumPy, reStructuredText or Epytext.

    Args:
        text: The docstring.

    Returns:
        The text before the first section or field, and the description of each parameter by name.
    """
    lines = inspect.cleandoc(text).splitlines()
    begin = next((index for index in range(len(lines)) if _begins(lines, index)), len(lines))
    described: dict[str, str] = {}
    while begin < len(lines):
        end = next((index for index in range(begin + 1, len(lines)) if _begins(lines, index)), len(lines))
        described |= _described(lines[begin:end])
        begin = end
    first = next((index for index in range(len(lines)) if _begins(lines, index)), len(lines))
    return "\n".join(lines[:first]).strip(), described


def _begins(lines: Sequence[str], index: int) -> bool:
    """Return whether a section or a field begins at a line."""
    return bool(_GOOGLE.match(lines[index]) or _FIELD_BEGINS.match(lines[index]) or _is_underlined(lines, index))


def _is_underlined(lines: Sequence[str], index: int) -> bool:
    below = lines[index + 1] if index + 1 < len(lines) else ""
    return bool(re.match(r"^[A-Z][A-Za-z ]*$", lines[index]) and re.match(r"^-{3,}\s*$", below))


def _described(section: Sequence[str]) -> dict[str, str]:
    """Return the descriptions in one section or field, by name."""
    head, *rest = section
    if _FIELD_BEGINS.match(head):
        found = _FIELD.match(head)
        if found is None or found[1] not in _PARAMETER_FIELDS or not found[2]:
            return {}
        name = found[2].split()[-1].strip("`*")
        apart = next((index for index in range(1, len(rest)) if _is_apart(rest, index)), len(rest))
        said = " ".join(filter(None, [found[3], *(line.strip() for line in rest[:apart])]))
        return {name: said} if said else {}
    if not _OF_PARAMETERS.match(head):
        return {}
    is_numpy = _is_underlined(section, 0)
    lines = [line for line in (rest[1:] if is_numpy else rest) if line.strip()]
    if not is_numpy:  # text that is not indented belongs to no section
        lines = lines[: next((index for index, line in enumerate(lines) if not line[0].isspace()), len(lines))]
    return _items(lines, _NUMPY_ITEM if is_numpy else _ITEM)


def _is_apart(lines: Sequence[str], index: int) -> bool:
    """Return whether a paragraph that is not indented begins at a line."""
    return bool(lines[index].strip()) and not lines[index][0].isspace() and not lines[index - 1].strip()


def _items(lines: Sequence[str], item: re.Pattern[str]) -> dict[str, str]:
    """Return the items of a section; an item begins at the indentation of the first line."""
    described: dict[str, str] = {}
    current: list[str] = []
    indent = min((len(line) - len(line.lstrip()) for line in lines[:1]), default=0)
    for line in lines:
        found = item.match(line.strip()) if len(line) - len(line.lstrip()) == indent else None
        if found:
            current = [name.strip().strip("`*") for name in found[1].split(",")]
            described |= dict.fromkeys(current, found[2] if found.re.groups > 1 else "")
        else:
            described |= {name: f"{described[name]} {line.strip()}".strip() for name in current}
    return {name: text for name, text in described.items() if text}

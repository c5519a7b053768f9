"""Problems of many rows, reported once where they differ in numbers alone."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"(?<![\w.'\"-])-?\d+(?:\.\d+)?(?![\w'\"-]|\.\d)")
"""A number by itself. Digits of a name, a text, a version or a date are none."""
_ROW = re.compile(r"row (\d+)(?:: | )")
_NAMED = 5
"""Rows of a group of problems that are named."""


def gather_alike(problems: Iterable[str]) -> list[str]:
    """Return one line for each kind of problem, in the order of the first of each.

    Problems are of one kind if their texts differ in numbers alone. A number that differs becomes a range.

    Example: `row 0: 385 tokens, may have 320` and `row 3: 387 tokens, may have 320` become
    `rows 0, 3: 385 to 387 tokens, may have 320`.

    Args:
        problems: One message for each row, as `validate_dataset` returns them.
    """
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(_NUMBER.sub("#", problem) if _ROW.match(problem) else problem, []).append(problem)
    return [_line(alike) for alike in kinds.values()]


def _line(alike: list[str]) -> str:
    if len(alike) == 1:
        return alike[0]
    rows = [int(match[1]) for match in map(_ROW.match, alike) if match]
    texts = [_ROW.sub("", problem, count=1) for problem in alike]
    if not rows:
        return alike[0]
    numbers = iter(zip(*map(_NUMBER.findall, texts), strict=True))

    def bounds(match: re.Match[str]) -> str:
        column = next(numbers)
        return match[0] if len(set(column)) == 1 else f"{min(column, key=float)} to {max(column, key=float)}"

    text = _NUMBER.sub(bounds, texts[0])
    named = ", ".join(map(str, rows[:_NAMED]))
    return f"rows {named}{f' and {len(rows) - _NAMED} more' if len(rows) > _NAMED else ''}: {text}"

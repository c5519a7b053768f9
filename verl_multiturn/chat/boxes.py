r"""Where a text has its first answer in a box: `\boxed{…}`, closed, in text mode.

    So it is \boxed{\frac{1}{2}}. In other words
                               └ the box is closed here

A box counts by the rules of the reward for mathematics (`rewards/answers.py`, `last_boxed`), and outside code alone:

| text | is it an answer |
|---|---|
| `\boxed{\frac{1}{2}}`, `\boxed{\{1\}}` | yes: braces are balanced, and one behind a backslash is text |
| `\boxed{}`, `\boxed{ }`, `\boxed{\boxed{}}` | no: it repeats the task's words |
| `\boxed 5`, `\boxed {5}`, `\fbox{5}` | no |
| `\boxed{6 \boxed{5}` | no: the first one is open, and takes in the rest of its line |
| a box in a ```` ```python ```` block, also in one that is not closed | no: it is code |
| a box in reasoning, or in a block of another language | yes: text mode knows neither |

Invariant: a text that goes on from one with a closed box has the same first box.
"""

from __future__ import annotations

from typing import NamedTuple

OPENS = "```python"
"""The line that begins a block of code."""
FENCE = "```"
"""The line that ends it."""
_BOX = r"\boxed{"
BOX_OPENS, BOX_CLOSES = r"\\boxed\{", r"\}"
"""Regular expressions of the texts at which a box may begin, and at which one may end."""


class FirstBox(NamedTuple):
    """The first box of a text."""

    end: int | None
    """Place behind its last brace; None: no box of the text is closed."""
    is_open: bool = False
    """Whether a box is open at the end of the text."""


class _Brace(NamedTuple):
    start: int
    """Place behind it."""
    line: int | None
    """Number of its line; None: it opens no box."""


def first_box(text: str) -> FirstBox:
    r"""Return the first closed box of a text that no other box on its line holds.

    Args:
        text: All text of a turn.
    """
    opened: list[_Brace] = []
    in_code, start = False, 0
    for number, line in enumerate(text.split("\n")):
        bare = line.rstrip()
        if in_code or bare == OPENS:
            in_code = not in_code or bare != FENCE
        elif (end := _closes(text, start, start + len(line), number, opened)) is not None:
            return FirstBox(end)
        start += len(line) + 1
    return FirstBox(None, bool(opened))


def _closes(text: str, at: int, end: int, number: int, opened: list[_Brace]) -> int | None:
    """Return the place behind the brace of a line that closes a box; None: none does. `opened` is carried on.

    Args:
        text: The whole text.
        at: Begin of the line.
        end: End of the line.
        number: Number of the line.
        opened: The braces of boxes, and within boxes, that are open.
    """
    while at < end:
        if text.startswith(_BOX, at):
            at += len(_BOX)
            opened.append(_Brace(at, number))
        elif not opened:
            found = text.find(_BOX, at, end)
            if found < 0:
                return None
            at = found
        elif text[at] == "\\":
            at += 2
        else:
            if text[at] == "{":
                opened.append(_Brace(at + 1, None))
            elif text[at] == "}" and (brace := opened.pop()).line is not None:
                is_inner = any(outer.line == brace.line for outer in opened)
                if not is_inner and _is_answer(text[brace.start : at]):
                    return at + 1
            at += 1
    return None


def _is_answer(held: str) -> bool:
    """Return whether the text that a box holds is an answer: not where it is empty, or holds empty boxes alone."""
    while (held := held.strip()).startswith(_BOX) and held.endswith("}"):
        held = held[len(_BOX) : -1]
    return bool(held)

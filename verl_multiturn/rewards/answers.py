"""Functions that find an answer in a text, and that check the format of the text.

Every function accepts any text, and needs time in proportion to its length.
"""

from __future__ import annotations

THINK = ("<think>", "</think>")
_BOX = r"\boxed{"


def has_one(text: str, tag: str) -> bool:
    """Return whether there is exactly one `<tag>…</tag>`."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    return text.count(opening) == text.count(closing) == 1 and text.index(opening) < text.index(closing)


def thinks_first(text: str) -> bool:
    """Return whether there is exactly one section of reasoning, at the beginning.

    Some chat templates open that section before the turn. Then the turn holds only its closing tag, which is accepted.
    """
    opening, closing = THINK
    if text.count(closing) != 1 or text.count(opening) > 1:
        return False
    return opening not in text or text.lstrip().startswith(opening)


def last_boxed(text: str) -> str | None:
    r"""Return the text in the last `\boxed{…}` that is in no other one, with balanced braces.

    A box within it loses its name: `\boxed{x=\boxed{5}}` holds `x={5}`, and `\boxed{\boxed{5}}` holds `5`.

    Returns:
        None when there is no box, or the last one is not closed. One that is not closed takes in the rest of its line:
        `\boxed{6 \boxed{5}` is none.
    """
    found, at, closings = None, 0, _closings(text)
    while (start := text.find(_BOX, at)) >= 0:
        start += len(_BOX)
        end = closings.get(start)
        found = None if end is None else (start, end)
        at = end if end is not None else text.find("\n", start)
        if at < 0:
            break
    if found is None:
        return None
    start, end = _trimmed(text, *found)
    while text.startswith(_BOX, start) and closings.get(start + len(_BOX)) == end - 1:
        start, end = _trimmed(text, start + len(_BOX), end - 1)
    return text[start:end].replace(_BOX, "{")


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the bounds of a part of a text without its blanks at either end."""
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end


def _closings(text: str) -> dict[int, int]:
    r"""Return where each brace is closed, by the place behind it; the brace in `\{` is text."""
    opened, found, skip = [], {}, False
    for at, character in enumerate(text):
        if skip:
            skip = False
        elif character == "\\":
            skip = True
        elif character == "{":
            opened.append(at + 1)
        elif character == "}" and opened:
            found[opened.pop()] = at
    return found


def last_block(text: str, languages: tuple[str, ...]) -> str | None:
    """Return the last fenced block of some languages; None when there is none or it is not closed.

    Args:
        text: The text.
        languages: Words after the opening backticks that are accepted, in lower case.
    """
    found: str | None = None
    lines: list[str] | None = None
    wanted = False
    for line in text.split("\n"):
        mark = line.strip()
        if lines is None:
            if mark.startswith("```"):
                lines, wanted = [], mark[3:].strip().lower() in languages
                found = None if wanted else found
        elif mark == "```":
            found, lines = ("\n".join(lines) if wanted else found), None
        else:
            lines.append(line)
    return found

"""Functions that find an answer in a text, and that check the format of the text.

Every function accepts any text, and needs time in proportion to its length.
"""

from __future__ import annotations

THINK = ("<think>", "</think>")


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
    r"""Return the text in the last `\boxed{…}`, with balanced braces; None when there is none or it is not closed."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth, skip = 1, False
    for at in range(start, len(text)):
        character = text[at]
        if skip:  # the brace in `\{` is text
            skip = False
        elif character == "\\":
            skip = True
        elif character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[start:at].strip()
    return None


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

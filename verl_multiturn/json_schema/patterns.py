r"""Regular expressions of JavaScript, as JSON Schema has them, in the words that the validator knows.

The validator reads nearly all of them. Syntax that it refuses, or that JavaScript reads without its flag `u`, has a
plain equal in most cases: a hyphen beside `\w`, `\k<name>`, `[^]`, `\0`, a brace that counts nothing.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"(?P<name>\\k<(?P<named>[^>]*)>)|(?P<escape>\\(?:[pP]\{[^}]*\}|u\{[0-9a-fA-F]+\}|c[A-Za-z]|x[0-9a-fA-F]{2}"
    r"|u[0-9a-fA-F]{4}|[0-9]+|.))|(?P<all>\[\^\])|(?P<none>\[\])|(?P<set>\[\^?)"
    r"|(?P<count>\{\d+(?:,\d*)?\})|(?P<group>\((?:\?(?:<(?P<called>[^=!>][^>]*)>|P<[^>]*>|[^(]?))?)|.",
    re.DOTALL,
)
_IN_SET = re.compile(
    r"(?P<kind>\\(?:[dDwWsS]|[pP]\{[^}]*\}))|(?P<escape>\\(?:u\{[0-9a-fA-F]+\}|c[A-Za-z]|x[0-9a-fA-F]{2}"
    r"|u[0-9a-fA-F]{4}|.))|(?P<end>\])|(?P<hyphen>-)|.",
    re.DOTALL,
)
# The meaning of a letter after a backslash; JavaScript reads every other one as the letter itself.
_LETTERS = frozenset("dDwWsSbBfnrtvpPuxckA")


def plain_pattern(pattern: str) -> str:
    """Return an equal expression in the words of the validator.

    Args:
        pattern: A regular expression of JavaScript, with or without its flag `u`.

    Raises:
        ValueError: It has no plain equal; the text gives the reason.
    """
    names = _names(pattern)
    parts: list[str] = []
    position = 0
    while found := _TOKEN.match(pattern, position):
        position = found.end()
        if found["name"]:
            if found["named"] not in names:
                raise ValueError(f"there is no group {found['named']!r}; name it as (?<{found['named']}>…)")
            parts.append(rf"(?:\{names[found['named']]})")
        elif found["escape"]:
            parts.append(_escape(found["escape"]))
        elif found["all"] or found["none"]:
            parts.append(r"[\s\S]" if found["all"] else "(?!)")
        elif found["set"]:
            text, position = _set(pattern, position)
            parts.append(found["set"] + text)
        else:
            parts.append("\\" + found[0] if found[0] in "{}]" else found[0])
    return "".join(parts)


def _names(pattern: str) -> dict[str, int]:
    """Return the numbers of the named groups."""
    number, names, position = 0, {}, 0
    while found := _TOKEN.match(pattern, position):
        position = found.end()
        if found["set"]:
            position = _set(pattern, position)[1]
        elif found["group"] == "(" or (found["group"] or "").startswith("(?P<") or found["called"]:
            number += 1
            if found["called"]:
                names[found["called"]] = number
    return names


def _escape(text: str) -> str:
    if text == r"\0":
        return r"\x00"
    letter = text[1]
    if letter.isalpha() and letter not in _LETTERS:
        remedy = {"Z": "write $ for the end of the text", "z": "write $ for the end of the text"}
        raise ValueError(f"JavaScript has no {text}; {remedy.get(letter, 'leave the backslash out')}")
    return text


def _set(pattern: str, position: int) -> tuple[str, int]:
    """Return the contents of the brackets that were opened before a position, and the position after them."""
    parts: list[str] = []
    after_kind = False
    while found := _IN_SET.match(pattern, position):
        position = found.end()
        if found["end"]:
            return "".join(parts) + "]", position
        if found["hyphen"]:
            # A hyphen beside a kind of characters is not a range: JavaScript reads the character itself.
            parts.append(r"\-" if after_kind or re.match(r"\\(?:[dDwWsS]|[pP]\{)", pattern[position:]) else "-")
        elif found["escape"]:
            parts.append({r"\b": r"\x08", r"\0": r"\x00"}.get(found["escape"]) or _escape(found["escape"]))
        else:
            parts.append(r"\[" if found[0] == "[" else found[0])
        after_kind = bool(found["kind"])
    raise ValueError("a '[' is not closed; close it with ']', or write \\[ for the character")

"""Strict reading of a call's JSON: nothing that the model wrote is lost or changed."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from verl_multiturn.describe import message_of

NamedCall = tuple[str, str]
"""`(name, arguments)` of a call. The arguments are JSON text."""
MOST_DEPTH = 64
"""The most levels of nesting in a message; templates and renderers fail on deeper ones."""
# Levels around a call's arguments in a body in which Anthropic's clients send them back.
_AROUND = 5


class UnreadableCallError(ValueError):
    """Text in the place of a call that cannot be read as one. The message gives the model the reason."""


def read_json(text: str, position: int = 0) -> tuple[Any, int]:
    """Read the JSON value at a position of a text.

    This reader refuses values that would change on the way to the tool: an object with the same key twice (one value
    would be lost), NaN, infinity, and a number too large for a float.

    Args:
        text: The text, with anything before and after the value.
        position: Index of the value's first character.

    Returns:
        The value, and the index after its last character.

    Raises:
        UnreadableCallError: There is no such value at this position.
    """
    try:
        return _JSON.raw_decode(text, position)
    except (ValueError, RecursionError) as error:
        raise UnreadableCallError(f"the call is no valid JSON ({read_problem(error)})") from None


def read_whole_json(text: str) -> Any:
    """Read a text that is one JSON value and nothing else.

    Raises:
        UnreadableCallError: The text is not JSON, or more text follows the value.
    """
    value, end = read_json(text)
    if text[end:].strip():
        raise UnreadableCallError(f"the call's JSON is followed by {text[end : end + 20]!r}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r:.100} is there twice")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.100} is no number that can be had")
    return value


_JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
# Every key that the object of a call may have.
_CALL_KEYS = frozenset({"name", "arguments", "parameters", "id", "type", "index"})


def named_calls(value: Any) -> list[NamedCall]:
    """Return the call that a JSON object describes, or the calls of a list of such objects.

    Example: `{"name": "lookup", "arguments": {"key": "a"}}` becomes `[("lookup", '{"key": "a"}')]`.

    Raises:
        UnreadableCallError: An object is not a call, has an unknown key, or has both `arguments` and `parameters`.
    """
    found = value if isinstance(value, list) and value else [value]
    calls = []
    for call in found:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise UnreadableCallError('a call is a JSON object {"name": …, "arguments": {…}}')
        if unknown := sorted(call.keys() - _CALL_KEYS):
            raise UnreadableCallError(
                f'a call is a JSON object {{"name": …, "arguments": {{…}}}}, and has no {unknown[0]!r:.100} beside them'
            )
        if "arguments" in call and "parameters" in call:
            raise UnreadableCallError('a call has "arguments" or "parameters", not both')
        calls.append((call["name"], written_arguments(call.get("arguments", call.get("parameters", {})))))
    return calls


def written_arguments(arguments: Any) -> str:
    """Return the arguments of a call as JSON text.

    Arguments that the model wrote as a JSON string, as in the OpenAI API, stay exactly as they are. A string that is
    not JSON stays, too: the later check against the tool's schema reports it to the model.

    Raises:
        UnreadableCallError: The arguments would not reach the tool unchanged, for example since a key occurs twice.
    """
    if not isinstance(arguments, str):
        return as_json(arguments)
    # Some models write the arguments as a JSON string, as the OpenAI API does.
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments  # the check against the tool's schema reports it to the model later
    as_json(read_json(arguments.lstrip())[0])
    return arguments


def read_problem(error: Exception) -> str:
    """Return the reason why a text could not be read, in words for the model.

    Args:
        error: The reader's error.
    """
    if isinstance(error, json.JSONDecodeError):
        rest = error.doc[error.pos : error.pos + 20]
        return f"{error.msg} at {rest!r}" if rest else f"{error.msg} at its end"
    return "nested too deeply" if isinstance(error, RecursionError | MemoryError) else message_of(error)


def as_json(value: Any) -> str:
    """Write a call's arguments as JSON text.

    Raises:
        UnreadableCallError: JSON cannot hold the value, or it contains half a character (a lone surrogate), which no
            tokenizer, file or socket accepts.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        if not text.isascii():
            text.encode()
        return text
    except UnicodeEncodeError:
        raise UnreadableCallError("the call's arguments hold half a character, a lone surrogate") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise UnreadableCallError(f"the call's arguments are no JSON ({message_of(error)})") from None


def is_deeper(value: Any, levels: int) -> bool:
    """Return whether a value is nested deeper than so many levels; a text alone has one."""
    level: list[Any] = [value]
    for _ in range(levels):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each.values()
            elif isinstance(each, list):
                below += each
        if not below:
            return False
        level = below
    return True


def object_of(arguments: str) -> dict[str, Any] | None:
    """Return a call's arguments as the object that they are.

    None for a value that is not a JSON object, and for one that is nested so deeply that a template fails at it, or
    that the body in which an agent sends it back is refused.
    """
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) and not is_deeper(parsed, MOST_DEPTH + 1 - _AROUND) else None

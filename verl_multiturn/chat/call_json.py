"""JSON of a call, read so strictly that nothing of it is lost: what is read is all that the model wrote."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

NamedCall = tuple[str, str]
"""Name and arguments, these as JSON text."""


class UnreadableCallError(ValueError):
    """What the model wrote in the place of a call is none; the text says why, to the model."""


def read_json(text: str, position: int = 0) -> tuple[Any, int]:
    """What the JSON at a position says, and where it ends. A key that an object has twice is no JSON here: one of its
    values would be lost; neither is NaN, nor a number that is too large.

    Raises:
        UnreadableCallError: it is none.
    """
    try:
        return _JSON.raw_decode(text, position)
    except (ValueError, RecursionError) as error:
        raise UnreadableCallError(f"the call is no valid JSON ({read_problem(error)})") from None


def read_whole_json(text: str) -> Any:
    """What a text says that is JSON and nothing else.

    Raises:
        UnreadableCallError: it is none.
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
# What a call may have beside its name and its arguments.
_CALL_KEYS = frozenset({"name", "arguments", "parameters", "id", "type", "index"})


def named_calls(value: Any) -> list[NamedCall]:
    """The call that an object is, or those of a list.

    Raises:
        UnreadableCallError: one of them is none.
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
    """A call's arguments as JSON text.

    Raises:
        UnreadableCallError: they are none, or would not reach the tool as they are.
    """
    if not isinstance(arguments, str):
        return as_json(arguments)
    # Some models write the arguments as a JSON string, as the OpenAI API does.
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments  # the tool's schema says so, later
    as_json(read_json(arguments.lstrip())[0])
    return arguments


def read_problem(error: Exception) -> str:
    """What is wrong with a text that was to be read, in words for the model."""
    if isinstance(error, json.JSONDecodeError):
        rest = error.doc[error.pos : error.pos + 20]
        return f"{error.msg} at {rest!r}" if rest else f"{error.msg} at its end"
    return "nested too deeply" if isinstance(error, RecursionError | MemoryError) else str(error)


def as_json(value: Any) -> str:
    """Arguments as JSON text.

    Raises:
        UnreadableCallError: they cannot be written so, or hold half a character (a lone surrogate), which no tokenizer,
            file or socket takes.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        if not text.isascii():
            text.encode()
        return text
    except UnicodeEncodeError:
        raise UnreadableCallError("the call's arguments hold half a character, a lone surrogate") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise UnreadableCallError(f"the call's arguments are no JSON ({error})") from None

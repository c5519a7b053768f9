"""Records as lines of JSON that every reader takes: jq, DuckDB and orjson refuse some output of Python's own module.

- Text is valid UTF-8. Half of a surrogate pair becomes U+FFFD.
- NaN and infinities become the texts `nan`, `inf` and `-inf`.
- A float32 is written as the shortest decimal that is read as the same float32.
- An image becomes its size and a digest (`schema.Image`).
- A key that is not text becomes text. A value of a type that JSON does not have becomes its `repr`, shortened; so does
  an integer of more than 64 bits, and a value that is nested too deeply or contains itself.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import orjson

from verl_multiturn.chat.images import is_pil
from verl_multiturn.describe import show

_DEEPEST = 200
_INTEGERS = range(-(1 << 63), 1 << 64)
_ARRAYS = frozenset(["<i4", "<i8", "<u4", "<u8", "<f4", "<f8"])
"""Types of array that orjson writes, and that keep their numbers."""


def line_of(value: dict[str, Any]) -> bytes:
    """Return an object as one line of JSON, with its line end."""
    return dumps(plain(value))


def dumps(value: Any) -> bytes:
    """Return a result of `plain` as one line of JSON, with its line end."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def parse_strictly(text: str, parse_int: Callable[[str], Any] = int) -> Any:
    """Return the value of a JSON text in which no object has a key twice: a line, or arguments of a call.

    With a key twice, two readers could see different values.

    Args:
        text: The text.
        parse_int: Reads an integer.

    Raises:
        ValueError: It is not JSON (`json.JSONDecodeError`), has a key twice, or `parse_int` refuses an integer.
        RecursionError: It is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_with_each_key_once, parse_int=parse_int)


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has the key {twice!r} twice")
    return found


def digest_of(image: Any) -> dict[str, Any]:
    """Return the record of a PIL image, a `schema.Image`."""
    made = hashlib.blake2b(f"{image.mode} {image.width} {image.height} ".encode(), digest_size=16)
    made.update(image.tobytes())
    return {"digest": made.hexdigest(), "size": [image.width, image.height]}


def plain(value: Any, image: Callable[[Any], Any] = digest_of) -> Any:
    """Return a value as JSON has it, a copy. Arrays of finite numbers stay arrays.

    Args:
        value: Any value.
        image: Returns the replacement of a PIL image. It is called once for each.
    """
    known: dict[int, Any] = {}

    def instead(found: Any) -> Any:
        if id(found) not in known:
            known[id(found)] = image(found)
        return known[id(found)]

    return _plain(value, set(), instead)


def _plain(value: Any, above: set[int], image: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind is str:  # the most frequent type goes first
        return value if value.isascii() else _text(value)
    if kind is int:
        return value if value in _INTEGERS else show(value)
    if kind is float:
        return value if math.isfinite(value) else str(value)
    if value is None or kind is bool:
        return value
    if kind is dict or kind is list or isinstance(value, Mapping | list | tuple | set | frozenset):
        if id(value) in above or len(above) == _DEEPEST:
            return show(value)
        above.add(id(value))
        made: Any
        if kind is dict or isinstance(value, Mapping):
            made = {_key(key): _plain(item, above, image) for key, item in value.items()}
        else:
            made = [_plain(item, above, image) for item in value]
        above.remove(id(value))
        return made
    if isinstance(value, np.ndarray):
        return _array(value, above, image)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):  # a range looks for other kinds of int one by one
        return int(value) if int(value) in _INTEGERS else show(value)
    if isinstance(value, float | np.floating):
        return _number(value)
    if is_pil(value):
        return image(value)
    return value.item() if isinstance(value, np.integer | np.bool_) else _text(show(value))


def _key(key: Any) -> str:
    return key if type(key) is str and key.isascii() else _text(key if isinstance(key, str) else show(key))


def _text(value: str) -> str:
    value = str.__str__(value)
    try:
        value.encode()
    except UnicodeEncodeError:  # two halves side by side are one character, as in a JSON text
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return value


def _number(value: float | np.floating[Any]) -> float | str:
    if not math.isfinite(value):
        return str(float(value))
    return float(str(value)) if isinstance(value, np.float32) else float(value)


def _array(value: np.ndarray[Any, Any], above: set[int], image: Callable[[Any], Any]) -> Any:
    if value.dtype.str in _ARRAYS and (value.dtype.kind != "f" or np.isfinite(value).all()):
        return np.ascontiguousarray(value)
    return [_plain(item, above, image) for item in (list(value) if value.ndim else [value.item()])]

"""`plain`: values in JSON's types, for records, traces and whatever else leaves the process as text.

JSON has neither NaN nor infinity, and no text with half of a surrogate pair. Readers refuse both (jq, DuckDB, orjson),
so that one such value would cost a whole record. Rows, tools and agents may hold any of them.

Invariants:
- nothing is raised, whatever the value is;
- the value itself is not changed, and nothing of it is shared that can be.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from verl_multiturn.chat.images import is_pil
from verl_multiturn.describe import show

_DEEPEST = 100
"""Levels of lists and objects; what lies deeper becomes its `repr`. Readers of JSON stop at some depth, too."""
_LARGEST = (1 << 63) - 1
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")


def valid_text(text: str) -> str:
    """Return a text of whole characters: U+FFFD stands for half of a surrogate pair."""
    text = str.__str__(text)
    return text if text.isascii() else _HALF_A_PAIR.sub("\ufffd", text)


def digest_of(image: Any) -> dict[str, Any]:
    """Return what a record keeps of a PIL image: its size, and a digest (blake2b-128) of its mode, size and pixels."""
    made = hashlib.blake2b(f"{image.mode} {image.width} {image.height} ".encode(), digest_size=16)
    made.update(image.tobytes())
    return {"digest": made.hexdigest(), "size": [image.width, image.height]}


def plain(value: Any, image: Callable[[Any], Any] = digest_of, levels: int = _DEEPEST) -> Any:
    """Return a value in the types of JSON, with text of whole characters.

    A number that JSON does not have becomes its name (`nan`, `inf`, `-inf`), an array of NumPy a list, and any other
    value its `repr`, shortened; so does an integer of more than 64 bits.

    Args:
        value: Any value.
        image: Returns what stands for a PIL image.
        levels: How deep lists and objects may lie in one another.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, int):
        return int(value) if -_LARGEST <= value <= _LARGEST else show(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if levels and isinstance(value, Mapping):
        return {
            valid_text(key) if isinstance(key, str) else valid_text(show(key)): plain(item, image, levels - 1)
            for key, item in value.items()
        }
    if levels and isinstance(value, list | tuple | set | frozenset):
        return [plain(item, image, levels - 1) for item in value]
    if is_pil(value):
        return image(value)
    if callable(as_list := getattr(value, "tolist", None)) and hasattr(value, "ndim"):  # NumPy's, PyTorch's
        return plain(as_list(), image, levels - 1) if levels else valid_text(show(value))
    return valid_text(show(value))

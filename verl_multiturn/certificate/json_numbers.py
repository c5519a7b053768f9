"""Columns of numbers from the JSON of a record, which anybody may have written."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_multiturn.describe import show

_NAMED = ("nan", "inf", "-inf")
"""Texts in the place of numbers that JSON does not have, as `records.json_line` writes them."""


def read_integers(name: str, value: Any) -> NDArray[np.int64]:
    """Return a list of integers as an array; `true` and `1.0` are none.

    Raises:
        ValueError: It is no such list.
    """
    _check_list(name, value, {int}, "integers")
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        raise ValueError(f"{name} has {show(max(value, key=abs), 100)}, expected integers of 64 bits") from None


def read_numbers(name: str, value: Any) -> NDArray[np.float64]:
    """Return a list of numbers as an array.

    Raises:
        ValueError: It is no such list.
    """
    _check_list(name, value, {int, float, str}, "numbers")
    if wrong := [each for each in value if isinstance(each, str) and each not in _NAMED]:
        raise ValueError(f"{name} has {show(wrong[0], 100)}, expected numbers")
    try:
        return np.array([float(each) for each in value])
    except OverflowError:
        raise ValueError(f"{name} has an integer that is no number of a computer") from None


def _check_list(name: str, value: Any, types: set[type], kind: str) -> None:
    if not isinstance(value, list):
        raise ValueError(f"{name} is {show(value, 100)}, expected a list of {kind}")
    if not set(map(type, value)) <= types:
        wrong = next(each for each in value if type(each) not in types)
        raise ValueError(f"{name} has {show(wrong, 100)}, expected {kind}")

"""`json_value`: the one rule that turns an author's value into JSON.

| value | JSON |
|---|---|
| text, number, bool, None; a dataclass, a pydantic model, a mapping, a list and its like | the usual JSON |
| an Enum | its value |
| NaN, an infinity | the texts `nan`, `inf`, `-inf` |
| a Decimal, a Fraction, a complex number, an integer of more than 4,000 digits | its digits as text |
| a date, a time, a UUID, a path, an address | its text |
| bytes | their text; Base64 where they are not UTF-8 |
| a scalar or an array of NumPy, a tensor | its numbers; a float32 as the shortest decimal that is read as it |
| a data frame | a list of its rows |
| a set | a sorted list |
| an error | its type and message |
| a key that is not text | its text, or its JSON |

Whatever else it is (a lock, a function, an object of a class of one's own), JSON has no form for it.

Invariants:
- a value with a plain form becomes JSON that every reader takes, whatever the data are: only a type is refused, two
  keys with one name, and a value that contains itself, is nested too deeply or never ends;
- equal values have equal JSON in every process.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import enum
import io
import json
import math
import os
from collections import Counter, UserString, deque
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, Set, ValuesView
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import orjson
from pydantic_core import to_jsonable_python

from verl_multiturn.describe import describe, show, type_name

_DEEPEST = 200
_STRICT = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_MOST_DRAWN = 1_000_000
"""Most items taken from anything but a list: a range takes no memory for them, and other code may have no end."""
_MOST_BITS = 13_000
"""Most bits of an integer that `json` writes: Python turns no more than 4,300 digits into text."""
_LONGEST_PATH = 100
_MISSING = ("NAType", "NaTType")
"""Classes of pandas' missing values."""
_FIELD_NAMES = ("__attrs_attrs__", "__struct_fields__")
"""Where attrs and msgspec name the fields of a class."""
_TABLES = ("to_pylist", "to_dicts")
"""Methods of Arrow's and polars' tables that return a list of rows."""


class NoJsonError(TypeError):
    """JSON has no form for a value; the text names the part and its place."""


def json_text(value: Any) -> str:
    """Return a value as JSON text.

    Raises:
        NoJsonError: As in `json_value`.
    """
    if _is_plain(value):
        with contextlib.suppress(TypeError):  # of an Enum or a UUID, which orjson writes
            return _dumped(value)
    return _dumped(json_value(value))


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _is_plain(value: Any) -> bool:
    """Return whether a value surely has the types of JSON alone; a large one is then written twenty times as fast."""
    try:
        return b"null" not in orjson.dumps(value, default=_refuse, option=_STRICT)  # which NaN becomes there, too
    except TypeError:
        return False


def _refuse(part: Any) -> Any:
    raise TypeError


def json_value(value: Any) -> Any:
    """Return a value in the types that JSON has, as a copy.

    Example: `json_value({1: {numpy.float32(0.1)}})` is `{"1": [0.1]}`.

    Args:
        value: Any value.

    Raises:
        NoJsonError: JSON has no form for it; for example a lock, or a list that contains itself.
    """
    return _plain(value, "", ())


def _plain(value: Any, path: str, above: tuple[int, ...]) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, enum.Enum):
        return _plain(value.value, path, above)
    if isinstance(value, str):
        return str.__str__(value)  # a plain text: a subclass may have methods of the author's
    if isinstance(value, UserString):
        return _plain(value.data, path, above)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if number.bit_length() <= _MOST_BITS else str(Decimal(number))
    if isinstance(value, float):
        decimal = float.__float__(value)
        return decimal if math.isfinite(decimal) else str(decimal)
    if isinstance(value, Fraction):
        return "/".join(str(Decimal(part)) for part in value.as_integer_ratio()).removesuffix("/1")
    if isinstance(value, Decimal | complex):
        return str(value).strip("()")
    if isinstance(value, bytes | bytearray | memoryview):
        return _text_of(bytes(value))
    if isinstance(value, BaseException):
        return describe(value)
    if isinstance(value, os.PathLike):
        return _plain(os.fspath(value), path, above)
    if isinstance(value, np.generic):
        return _plain(_of_numpy(value), path, above)
    if id(value) in above:
        raise _no_json(value, path, "which contains itself")
    if len(above) == _DEEPEST:
        raise _no_json(value, path, f"more than {_DEEPEST} levels deep")
    return _plain_parts(value, path, (*above, id(value)))


def _plain_parts(value: Any, path: str, above: tuple[int, ...]) -> Any:
    """Return the plain form of a value that has parts."""
    if isinstance(value, Mapping):
        return _plain_mapping(value, path, above)
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "iub" and not isinstance(value, np.ma.MaskedArray):
            return value.tolist()
        return _plain(value.tolist() if isinstance(value, np.ma.MaskedArray) else _items(value), path, above)
    if isinstance(value, KeysView | ValuesView | ItemsView | deque | range) or (
        isinstance(value, Sequence) and not hasattr(value, "dtype")
    ):
        return _plain_items(value, path, above)
    if isinstance(value, Set):
        items = _plain_items(value, path, above)
        is_number = all(isinstance(item, int | float) for item in items)
        return sorted(items) if is_number else sorted(items, key=_sorting_text)
    if isinstance(value, io.IOBase):  # an open file is an iterator, too
        raise _no_json(value, path)
    if isinstance(value, Iterator):
        return _plain_items(value, path, above)
    if not isinstance(value, type) and (found := _fields(value)) is not None:
        return _plain_mapping(found, path, above)
    if (found := _table(value, path)) is not None:
        return _plain(found, path, above)
    return _of_pydantic(value, path, above)


def _plain_items(items: Iterable[Any], path: str, above: tuple[int, ...]) -> list[Any]:
    held = items if isinstance(items, list | tuple) else _drawn(items, path)
    return [_plain(item, f"{path}[{index}]", above) for index, item in enumerate(held)]


def _plain_mapping(value: Mapping[Any, Any], path: str, above: tuple[int, ...]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, item in value.items() if isinstance(value, dict) else _drawn(value.items(), path):
        where = f"{path}[{show(key, 60)}]"
        named = _plain(key, where, above)
        name = named if isinstance(named, str) else _dumped(named)
        if name in plain:
            raise _no_json(value, path, f"two of whose keys are {show(name, 60)}")
        plain[name] = _plain(item, where, above)
    return plain


def _no_json(value: Any, path: str, why: str = "") -> NoJsonError:
    place = f" at {path if len(path) <= _LONGEST_PATH else path[:_LONGEST_PATH] + '…'}" if path else ""
    return NoJsonError(f"{show(value, 100)} of type {type_name(value)}{place}{f', {why}' if why else ''}")


def _sorting_text(item: Any) -> str:
    return item if isinstance(item, str) else json.dumps(item)


def _text_of(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


def _of_numpy(value: np.generic) -> Any:
    """Return the value of a scalar of NumPy."""
    if value.dtype.kind == "f":
        return float(str(value))  # the shortest decimal, which `item` does not give
    if value.dtype.kind == "c":
        return complex(value)  # for one of 256 bits, `item` returns the scalar itself
    if isinstance(value, np.datetime64 | np.timedelta64):
        return str(value)
    if isinstance(value, np.void) and value.dtype.names:
        return {name: value[name] for name in value.dtype.names}
    return value.tobytes() if isinstance(value, np.void) else value.item()


def _items(value: np.ndarray[Any, Any]) -> Any:
    return list(value) if value.ndim else value[()]


def _drawn(value: Iterable[Any], path: str) -> Iterator[Any]:
    for index, item in enumerate(value):
        if index == _MOST_DRAWN:
            raise _no_json(value, path, f"which has more than {_MOST_DRAWN:,} items")
        yield item


def _fields(value: Any) -> Any:
    """Return the fields of an object whose class declares them; None for another one, and for pydantic's."""
    if hasattr(value, "__pydantic_serializer__"):
        return None
    if dataclasses.is_dataclass(value):
        return _parts_of_model(value)
    for listed in _FIELD_NAMES:
        if (names := getattr(type(value), listed, None)) is not None:
            return {name: getattr(value, name) for name in (getattr(each, "name", each) for each in names)}
    return None


def _table(value: Any, path: str) -> Any:
    """Return an array, a tensor or a table as arrays and lists; None for anything else."""
    if isinstance(value, type):
        return None
    try:
        _check_columns(value, path)
        if hasattr(value, "to_dict") and hasattr(value, "columns"):  # a data frame of pandas
            return value.to_dict(orient="records")
        for name in _TABLES:
            if callable(method := getattr(value, name, None)):
                return method()
        return _array(value) if callable(getattr(value, "tolist", None)) else None
    except NoJsonError:
        raise
    except Exception as error:  # somebody else's code, such as that of a tensor without data
        raise _no_json(value, path, describe(error)) from error


def _check_columns(value: Any, path: str) -> None:
    """Refuse a table of pandas or Arrow with two columns of one name: a row would keep the last of them alone."""
    names = getattr(value, "columns" if hasattr(value, "to_dict") else "column_names", ())
    if isinstance(names, Iterable) and (twice := [name for name, count in Counter(names).items() if count > 1]):
        raise _no_json(value, path, f"two of whose columns are {show(twice[0], 60)}")


def _array(value: Any) -> Any:
    """Return an array or a tensor as an array of NumPy, or as lists where NumPy does not have its type."""
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except Exception:  # such as torch's for bfloat16
        return value.tolist()
    return value.tolist() if array.dtype.kind == "O" else array


def _of_pydantic(value: Any, path: str, above: tuple[int, ...]) -> Any:
    """Return pydantic's form of a value that it knows: a model, a date, a UUID, a path, an address."""
    if type(value).__name__ in _MISSING:
        return None

    def unknown(part: Any) -> Any:
        if part is value:
            raise _no_json(value, path)
        return _plain(part, path, above)

    try:
        found = to_jsonable_python(value, fallback=unknown)
    except NoJsonError:
        raise
    except Exception as error:  # bytes that are not UTF-8, for example; or an error of a model's own serializer
        if (parts := _parts_of_model(value)) is None:
            raise _no_json(value, path, describe(error)) from error
        return _plain(parts, path, above)
    return _plain(found, path, above)


def _parts_of_model(value: Any) -> Any:
    """Return the parts of a model or a dataclass of pydantic as they are; None for anything else."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value.model_dump(by_alias=True) if hasattr(value, "model_dump") else None

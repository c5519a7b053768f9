"""JSON from an author's value."""

import dataclasses
import datetime
import enum
import ipaddress
import itertools
import json
import os
import re
import threading
import uuid
from collections import Counter, UserString, deque, namedtuple
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

import attrs
import numpy as np
import orjson
import pandas as pd
import pyarrow as pa
import pytest
from pydantic import BaseModel, ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass

from verl_multiturn.calls import json_values
from verl_multiturn.calls.json_values import NoJsonError, json_text, json_value


class Colour(enum.Enum):
    RED = "red"
    PAIR = (1, 2)


class Level(enum.IntEnum):
    HIGH = 3


class Text(str):
    def __str__(self) -> str:
        raise RuntimeError


@dataclasses.dataclass
class Point:
    x: Any = 1


@attrs.define
class Place:
    name: Any


class Model(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    a: Any = None


@pydantic_dataclass
class Checked:
    a: bytes


class Tensor:
    """Act as a tensor of torch: not an array, but convertible to one."""

    def __init__(self, *numbers: float, is_array: bool = True) -> None:
        self.numbers, self.is_array = numbers, is_array

    def tolist(self) -> list[float]:
        return list(self.numbers)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if not self.is_array:
            raise TypeError("bfloat16")
        return np.array(self.numbers, np.float32)


def kind(value: Any) -> str:
    return type(value).__name__


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": [1, 2.5, "µ", True, None]}, {"a": [1, 2.5, "µ", True, None]}),
        (Text("a"), "a"),
        (float("nan"), "nan"),
        ([float("inf"), -np.inf], ["inf", "-inf"]),
        (10**30, 10**30),
        (10**5000, "1" + "0" * 5000),
        (Decimal("1.50"), "1.50"),
        (Fraction(1, 3), "1/3"),
        (Fraction(3), "3"),
        (Fraction(10**5000, 3), "1" + "0" * 5000 + "/3"),
        (1 + 2j, "1+2j"),
        (np.array([1 + 2j], np.clongdouble), ["1+2j"]),
        ({UserString("a"): UserString("b")}, {"a": "b"}),
        (Colour.RED, "red"),
        ({Colour.PAIR: Level.HIGH}, {"[1,2]": 3}),
        (datetime.datetime(2026, 1, 2, 3), "2026-01-02T03:00:00"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (datetime.timedelta(days=1), "P1D"),
        (uuid.UUID(int=3), "00000000-0000-0000-0000-000000000003"),
        (PurePosixPath("a/b"), "a/b"),
        (ipaddress.ip_address("::1"), "::1"),
        (re.compile("a+"), "a+"),
        (b"text", "text"),
        (bytearray(b"\xff"), "/w=="),
        (memoryview(b"a"), "a"),
        ({3, 20, 1}, [1, 3, 20]),
        (frozenset(["b", "a"]), ["a", "b"]),
        ({1, "a", (2, 3)}, [1, [2, 3], "a"]),
        (deque([1]), [1]),
        (range(2), [0, 1]),
        ({"b": 1, "a": 2}.keys(), ["b", "a"]),
        ({"b": 1}.items(), [["b", 1]]),
        ((x for x in (1, 2)), [1, 2]),
        (zip("ab", (1, 2), strict=True), [["a", 1], ["b", 2]]),
        (Counter("aab"), {"a": 2, "b": 1}),
        (Pair(1, 2), [1, 2]),
        (Point(Point({1})), {"x": {"x": [1]}}),
        (Place(b"a"), {"name": "a"}),
        (Model(a=np.float32(0.1)), {"a": 0.1}),
        (Model(a=Point(np.int64(2))), {"a": {"x": 2}}),
        (Model(a=b"\xff"), {"a": "/w=="}),
        (Checked(a=b"\xff"), {"a": "/w=="}),
        ({"error": KeyError("a")}, {"error": "KeyError: 'a'"}),
        ({2: "a", None: "b", 1.5: "c"}, {"2": "a", "null": "b", "1.5": "c"}),
        ({datetime.date(2026, 1, 2): 1, (1, "a"): 2}, {"2026-01-02": 1, '[1,"a"]': 2}),
        ([np.int64(3), np.bool_(True), np.str_("x"), np.float64(0.1)], [3, True, "x", 0.1]),
        ([np.float32(0.1), np.float16(0.1), np.float32("nan")], [0.1, 0.1, "nan"]),
        (np.datetime64("2026-01-02"), "2026-01-02"),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.array([0.1, np.nan], np.float32), [0.1, "nan"]),
        (np.array(3), 3),
        (np.array([b"\xff", b"a"]), ["/w==", "a"]),
        (np.array([{"a": {1}}], dtype=object), [{"a": [1]}]),
        (np.zeros(1, [("a", "i4"), ("b", "f4")]), [{"a": 0, "b": 0.0}]),
        (np.ma.array([1, 2], mask=[False, True]), [1, None]),
        (Tensor(0.1, 2), [0.1, 2.0]),
        (Tensor(0.5, is_array=False), [0.5]),
        (pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}), [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]),
        (pd.Series([1, 2]), [1, 2]),
        ([pd.Timestamp("2026-01-02"), pd.NaT, pd.NA], ["2026-01-02T00:00:00", None, None]),
        (pa.table({"a": [1]}), [{"a": 1}]),
    ],
    ids=kind,
)
def test_what_has_a_plain_form(value: Any, expected: Any) -> None:
    text = json_text(value)
    assert text == json.dumps(expected, ensure_ascii=False, separators=(",", ":"))  # also where True == 1
    if expected != 10**30:
        orjson.loads(text)


def test_half_a_character_stays_for_the_firewall() -> None:
    assert json_text({"a": "\ud800", "\udc00": 1}) == '{"a":"\ud800","\udc00":1}'


CIRCLE: list[Any] = []
CIRCLE.append({"again": CIRCLE})
DEEP: Any = 1
for _ in range(300):
    DEEP = [DEEP]


class Endless(Sequence[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return 1


class EndlessKeys(Mapping[int, int]):
    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        return itertools.count()

    def __getitem__(self, key: int) -> int:
        return 1


class Loop(BaseModel):
    a: Any = None


LOOP = Loop()
LOOP.a = LOOP


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (threading.Lock(), "<unlocked _thread.lock object> of type _thread.lock"),
        ({"a": [1, threading.Lock()]}, "<unlocked _thread.lock object> of type _thread.lock at ['a'][1]"),
        ({("a", 1): object()}, "<object object> of type object at [('a', 1)]"),
        ({object(): 1}, "<object object> of type object at [<object object>]"),
        ([test_what_has_a_plain_form], "of type function at [0]"),
        (int, "<class 'int'> of type type"),
        (CIRCLE, "of type list at [0]['again'], which contains itself"),
        (LOOP, "which contains itself"),
        (DEEP, "more than 200 levels deep"),
        ({1: "a", "1": "b"}, "two of whose keys are '1'"),
        (itertools.count(), "of type itertools.count, which has more than 1,000 items"),
        (Endless(), "which has more than 1,000 items"),
        (EndlessKeys(), "which has more than 1,000 items"),
        ([range(10**12)], "of type range at [0], which has more than 1,000 items"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "of type pandas.DataFrame, two of whose columns are 'a'"),
        (pa.table([[1], [2]], names=["a", "a"]), "two of whose columns are 'a'"),
        (Model(a=threading.Lock()), "_thread.lock"),
        (np.array([object()]), "<object object> of type object at [0]"),
    ],
    ids=kind,
)
def test_what_has_none_is_named(value: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "_MOST_DRAWN", 1000)  # a million takes seconds
    with pytest.raises(NoJsonError) as caught:
        json_value(value)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400
    assert " at 0x" not in str(caught.value)


def test_an_open_file_is_not_read() -> None:
    with open(os.devnull) as file, pytest.raises(NoJsonError, match=r"of type _io\.TextIOWrapper"):
        json_value(file)


def test_what_a_generator_raises_is_its_own() -> None:
    def pages() -> Any:
        yield 1
        raise ValueError("no such page")

    with pytest.raises(ValueError, match="no such page"):
        json_value(pages())

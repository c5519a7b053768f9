"""Answers of tools: which may be a reward, which becomes JSON, and how the model reads Python's."""

from __future__ import annotations

import array
import asyncio
import collections
import concurrent.futures
import dataclasses
import datetime
import enum
import ipaddress
import itertools
import json
import pathlib
import re
import sys
import threading
import types
import uuid
from collections.abc import Awaitable, Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel

from tests.long.inputs.input_cases import Case, Right, Seen, accept, call, models, refuse
from verl_multiturn import BaseTool, ToolResponse, ToolSchema, load_tools

ROOT = pathlib.Path(__file__).parents[3]
CHECK = ToolSchema.read(
    {"type": "function", "function": {"name": "check", "parameters": {"type": "object", "properties": {}}}}, "check"
)


class Class(BaseTool):
    """A tool's class that returns its input."""

    def __init__(self, returned: Any) -> None:
        super().__init__({}, CHECK)
        self.returned = returned

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Return it."""
        return self.returned


class Colour(enum.Enum):
    """An enumeration."""

    RED = "red"


@dataclasses.dataclass
class Point:
    """A dataclass with an array in it."""

    x: Any
    y: int = 2


class Model(BaseModel):
    """A model of pydantic."""

    day: datetime.date


class Pair(NamedTuple):
    """A pair with names."""

    city: str
    temperature: float


class Opaque:
    """An object without a plain form."""


def returns(make: Callable[[], Any], annotation: Any = None) -> Callable[[], Any]:
    """Return a typed function that returns the result of `make`."""

    def check() -> Any:
        """Check."""
        return make()

    if annotation is not None:
        check.__annotations__["return"] = annotation
    return check


def raises(error: Exception) -> Callable[[], Any]:
    """Return a typed function that raises."""

    def check() -> Any:
        """Check."""
        raise error

    return check


def _reward(text: str, reward: float) -> Right:
    return accept((text, reward))


def _rewards() -> list[Case]:
    said = ToolResponse("fine")
    tuples: list[tuple[str, Any, Right]] = [
        ("(text, 0.5, None)", ("fine", 0.5, None), _reward("fine", 0.5)),
        ("(text, 0.5, {})", ("fine", 0.5, {}), _reward("fine", 0.5)),
        ("(text, -1, None)", ("fine", -1, None), _reward("fine", -1.0)),
        ("(text, True, {})", ("fine", True, {}), _reward("fine", 1.0)),
        ("(text, None, {})", ("fine", None, {}), _reward("fine", 0.0)),
        ("(text, np.float32, {})", ("fine", np.float32(0.5), {}), _reward("fine", 0.5)),
        ("(text, np.int64, None)", ("fine", np.int64(2), None), _reward("fine", 2.0)),
        ("(text, Decimal, None)", ("fine", Decimal("0.25"), None), _reward("fine", 0.25)),
        ("(ToolResponse, 0.5, None)", (said, 0.5, None), _reward("fine", 0.5)),
        ("(text, '0.5', {})", ("fine", "0.5", {}), refuse("'0.5'", "number")),
        ("(text, '0.5', None)", ("fine", "0.5", None), refuse("'0.5'", "number")),
        ("(text, [0.5], {})", ("fine", [0.5], {}), refuse("[0.5]", "number")),
        ("(text, array of one, None)", ("fine", np.array([0.5]), None), refuse("0.5", "number")),
        ("(text, {}, {})", ("fine", {}, {}), refuse("number")),
        ("(text, 0.5)", ("fine", 0.5), refuse("(text, reward, {})")),
        ("(text, 1)", ("fine", 1), refuse("(text, reward, {})")),
        ("[text, 0.5, {}]", ["fine", 0.5, {}], refuse()),
        ("(ToolResponse, 0.5)", (said, 0.5), refuse()),
    ]
    classes = [
        each
        for each in tuples
        if each[0]
        in {
            "(text, 0.5, None)",
            "(text, 0.5, {})",
            "(text, '0.5', {})",
            "(text, np.float32, {})",
            "(text, [0.5], {})",
            "(ToolResponse, 0.5, None)",
        }
    ]
    data: list[tuple[str, Any, Any, str]] = [
        ("two numbers", (48.9, 2.4), None, "[48.9, 2.4]"),
        ("two texts", ("a", "high"), None, '["a", "high"]'),
        ("a list of text and number", ["Paris", 2.1], None, '["Paris", 2.1]'),
        ("a mapping with reward", {"text": "a", "reward": 1}, None, '{"text": "a", "reward": 1}'),
        ("three numbers, annotated", ("a", 0.5, 1.5), tuple[str, float, float], '["a", 0.5, 1.5]'),
    ]
    return [
        *(
            Case("returns", f"a function returns {name}", call(returns(lambda v=value: v), {}), right)
            for name, value, right in tuples
        ),
        *(Case("returns", f"a class returns {name}", call(Class(value), {}), right) for name, value, right in classes),
        *(
            Case("returns", f"data: {name}", _read(returns(lambda v=value: v, annotation)), _json(text))
            for name, value, annotation, text in data
        ),
        Case(
            "returns",
            "-> tuple[str, float]",
            call(returns(lambda: ("fine", 0.5), tuple[str, float]), {}),
            refuse("reward"),
        ),
        Case(
            "returns",
            "a function without async returns a coroutine",
            call(returns(lambda: asyncio.sleep(0, ("fine", 0.5, None))), {}),
            _reward("fine", 0.5),
        ),
    ]


def _json(text: str) -> Right:
    return accept((json.loads(text), 0.0))


def _read(function: Callable[[], Any]) -> Callable[[], Awaitable[Seen]]:
    """Return the door of a call whose answer is read as JSON."""
    open_door = call(function, {})

    async def door() -> Seen:
        seen = await open_door()
        if seen.kind != "accepted":
            return seen
        text, reward = seen.value
        return Seen("accepted", (json.loads(text), reward), text)

    return door


def _cycle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def _deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


def _values() -> list[Case]:
    plain: list[tuple[str, Callable[[], Any], str]] = [
        ("half a character", lambda: "a\ud83d", '"a?"'),
        ("half a character in a key", lambda: {"k\ude00": 1}, '{"v": {"k?": 1}}'),
        ("np.int64", lambda: np.int64(7), "7"),
        ("np.bool_", lambda: np.bool_(True), "true"),
        ("np.float32(0.1)", lambda: np.float32(0.1), "0.1"),
        ("np.float64 nan", lambda: np.float64("nan"), '"nan"'),
        ("-inf", lambda: float("-inf"), '"-inf"'),
        ("an array", lambda: np.arange(4).reshape(2, 2), "[[0, 1], [2, 3]]"),
        ("an array of texts", lambda: np.array(["a", "b"]), '["a", "b"]'),
        ("an array of objects", lambda: np.array([np.int64(1), None], dtype=object), "[1, null]"),
        ("an empty array", lambda: np.array([]), "[]"),
        ("np.str_", lambda: np.str_("a"), '"a"'),
        ("bytes", lambda: "ü".encode(), '"ü"'),
        ("bytes that are no text", lambda: b"\xff\xfe\x00", '"//4A"'),
        ("bytearray", lambda: bytearray(b"a"), '"a"'),
        ("memoryview", lambda: memoryview(b"a"), '"a"'),
        ("a set", lambda: {3, 1, 2}, "[1, 2, 3]"),
        ("a frozenset", lambda: frozenset(["b", "a"]), '["a", "b"]'),
        ("a range", lambda: range(3), "[0, 1, 2]"),
        ("a deque", lambda: collections.deque([1, 2]), "[1, 2]"),
        ("a generator", lambda: (each for each in (1, 2)), "[1, 2]"),
        ("keys of a mapping", lambda: {"a": 1}.keys(), '["a"]'),
        ("a mapping proxy", lambda: types.MappingProxyType({"a": 1}), '{"a": 1}'),
        ("a Counter", lambda: collections.Counter("aab"), '{"a": 2, "b": 1}'),
        ("a ChainMap", lambda: collections.ChainMap({"a": 1}, {"b": 2}), '{"a": 1, "b": 2}'),
        ("array.array", lambda: array.array("i", [1, 2]), "[1, 2]"),
        ("a date", lambda: datetime.date(2024, 5, 1), '"2024-05-01"'),
        ("np.datetime64", lambda: np.datetime64("2024-05-01"), '"2024-05-01"'),
        ("a Decimal", lambda: Decimal("1.10"), '"1.10"'),
        ("a Fraction", lambda: Fraction(1, 3), '"1/3"'),
        ("a UUID", lambda: uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        ("a path", lambda: pathlib.PurePosixPath("/a/b"), '"/a/b"'),
        ("an address", lambda: ipaddress.ip_address("10.0.0.1"), '"10.0.0.1"'),
        ("an Enum", lambda: Colour.RED, '"red"'),
        ("a dataclass with an array", lambda: Point(np.array([1])), '{"x": [1], "y": 2}'),
        ("a model of pydantic", lambda: Model(day=datetime.date(2024, 5, 1)), '{"day": "2024-05-01"}'),
        ("keys that are numbers", lambda: {1: "a", 2: "b"}, '{"1": "a", "2": "b"}'),
        ("a key of np.int64", lambda: {np.int64(1): "a"}, '{"1": "a"}'),
        ("a tuple in a mapping", lambda: (1, None), "[1, null]"),
        ("a long number", lambda: 10**30, str(10**30)),
        ("a complex number", lambda: 1 + 2j, '"1+2j"'),
    ]
    without: list[tuple[str, Callable[[], Any]]] = [
        ("a lock", threading.Lock),
        ("an object of one's own", Opaque),
        ("a function", lambda: len),
        ("a class", lambda: Opaque),
        ("a module", lambda: sys),
        ("an Ellipsis", lambda: ...),
        ("a future", concurrent.futures.Future),
        ("a match", lambda: re.match("a", "a")),
        ("what holds itself", _cycle),
        ("500 levels", lambda: _deep(500)),
        ("a generator without end", itertools.count),
        ("two keys of one name", lambda: {1: "a", "1": "b"}),
        ("an array of objects of one's own", lambda: np.array([Opaque()], dtype=object)),
    ]
    return [
        *(
            Case(
                "answers",
                f"in a dictionary: {name}",
                _read(returns(lambda m=make: {"v": m()})),
                _json(text if text.startswith('{"v"') else f'{{"v": {text}}}'),
            )
            for name, make, text in plain
            if "in a key" not in name
        ),
        Case(
            "answers",
            "in a dictionary: half a character in a key",
            _read(returns(lambda: {"v": {"k\ude00": 1}})),
            _json('{"v": {"k?": 1}}'),
        ),
        *(
            Case(
                "answers", f"in a dictionary: {name}", call(returns(lambda m=make: {"rows": [m()]}), {}), refuse("rows")
            )
            for name, make in without
        ),
    ]


def _said() -> list[Case]:
    """Return errors and expressions whose message would hold an address or a name of Python's inside."""
    (calculator,) = load_tools(ROOT / "tool_configs" / "calculator.yaml").values()
    expressions = [
        "f'{1}'",
        "lambda x: x",
        "a.b",
        "[x for x in y]",
        "{**a}",
        "await x",
        "(y := 1)",
        "yield 1",
        "b'x'",
        "...",
        "x[1:2]",
        "1 if 2 else 3",
        "not 1",
        "1 @ 2",
        "'a' * 3",
        "f(*a)",
    ]
    errors: list[tuple[str, Exception]] = [
        ("ValueError with an object", ValueError(f"cannot use {Opaque()!r}")),
        ("ValueError of an object", ValueError(Opaque())),
        ("RuntimeError with a lock", RuntimeError(f"held: {threading.Lock()!r}")),
        ("KeyError of an object", KeyError(Opaque())),
        ("a bound method", ValueError(f"not {Class(1).execute!r}")),
        ("a function", TypeError(f"{returns(int)!r} is not it")),
        ("an address in capitals", ValueError("at 0X7F00DEADBEEF <thing at 0x7F00DEADBEEF>")),
    ]
    return [
        *(
            Case("messages", f"calculator: {text}", call(calculator, {"expression": text}), models())
            for text in expressions
        ),
        *(Case("messages", f"a tool raises: {name}", call(raises(error), {}), models()) for name, error in errors),
    ]


def cases() -> list[Case]:
    """Return the inputs of this file."""
    return [*_rewards(), *_values(), *_said()]

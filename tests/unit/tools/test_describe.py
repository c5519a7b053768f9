"""Messages about objects of others, for all behaviours of these objects at conversion to text."""

import inspect
import json
from typing import Any

import numpy as np
import pytest

from verl_multiturn.describe import describe, did_you_mean, message_of, place_of, show, unbound


class Broken(Exception):
    def __str__(self) -> str:
        raise KeyError("no such attribute")


class NotText(Exception):
    def __str__(self) -> Any:
        return 42


class Meta(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError


class Nameless(metaclass=Meta):
    def __repr__(self) -> str:
        raise SystemExit(3)


class Text(str):
    """A text whose own methods raise."""

    def __len__(self) -> int:
        raise RuntimeError

    __getitem__ = __len__  # type: ignore[assignment]


def test_errors() -> None:
    assert describe(KeyError("a")) == "KeyError: 'a'"
    assert describe(TimeoutError()) == "TimeoutError"
    assert describe(Broken()) == "Broken: its message cannot be read: KeyError"
    assert message_of(NotText()) == "its message cannot be read: TypeError"
    assert message_of(ValueError("no page <b>at 0x10</b>")) == "no page <b>at 0x10</b>"
    assert message_of(OSError(f"cannot read {object()!r} or {test_errors!r}")) == (
        "cannot read <object object> or <function test_errors>"
    )
    assert message_of(ValueError(Text("what it says"))) == "what it says"


def test_the_place_of_an_error_is_in_its_authors_file() -> None:
    def place(call: Any) -> str:
        try:
            call()
        except Exception as error:
            return place_of(error)
        return "nothing was raised"

    line = place.__code__.co_firstlineno + 8
    assert place(lambda: {}["a"]) == f" (test_describe.py:{line})"
    assert place(lambda: json.loads("{")) == f" (test_describe.py:{line + 1})"
    assert place(lambda: np.zeros(2).reshape(3)) == f" (test_describe.py:{line + 2})"
    assert place_of(KeyError("never raised")) == ""


def test_values() -> None:
    assert show({"b": 1, "a": (None, "x")}) == "{'b': 1, 'a': (None, 'x')}"
    assert show({"a": Broken()}) == "{'a': Broken()}"
    assert show([Nameless()]) == "[<object whose repr raises RuntimeError>]"
    assert show("x" * 300, 10) == "'xxxxxxxxx"
    assert show(10**5000) == "<int whose repr raises ValueError>"
    circle: list[Any] = []
    circle.append(circle)
    assert show(circle) == "[" * 8 + "[...]" + "]" * 8


@pytest.mark.parametrize("value", ["x" * 10**8, b"x" * 10**8, [1] * 10**7, dict.fromkeys(range(10**6))], ids=type)
def test_large_values(value: Any) -> None:
    assert 100 < len(show(value)) <= 200


def test_a_word_that_is_meant() -> None:
    modes = ["sync", "colocate_async", "separate_async"]
    assert did_you_mean("async", modes) == "did you mean 'colocate_async' or 'separate_async'?"  # and not 'sync'
    assert did_you_mean("colocate_asnyc", modes) == "did you mean 'colocate_async'?"
    assert did_you_mean("asyn", modes) == "did you mean 'sync'?"
    assert did_you_mean("gsm8k", ["torl", "gsm8k_multiturn"]) == "did you mean 'gsm8k_multiturn'?"
    assert did_you_mean("sepa", modes) == "did you mean 'separate_async'?"
    assert did_you_mean("", modes) == did_you_mean("lockstep", modes) == ""


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"capital": "Rome"}, ""),
        ({"capital": "Rome", "seed": 1}, ""),
        ({}, "missing a required argument: 'capital'"),
        (
            {"capitel": "Rome"},
            "missing a required argument: 'capital'; it takes no 'capitel' (did you mean 'capital'?)",
        ),
        ({"capital": "", "x": 1}, "got an unexpected keyword argument 'x'"),
        ({"capital": "", "sed": 1}, "got an unexpected keyword argument 'sed' (did you mean 'seed'?)"),
        ({"capital": "", "instance_id": "a"}, "multiple values for argument 'instance_id'"),
    ],
)
def test_arguments_that_do_not_fit(kwargs: dict[str, Any], expected: str) -> None:
    def start(instance_id: str, *, capital: str, seed: int = 0) -> None: ...

    assert unbound(inspect.signature(start), ("id",), kwargs) == expected


def test_any_keyword_may_fit() -> None:
    def start(instance_id: str, capital: str, **kwargs: Any) -> None: ...

    assert unbound(inspect.signature(start), ("id",), {"capitel": "Rome"}) == "missing a required argument: 'capital'"

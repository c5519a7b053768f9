"""Read a problem of a public data set: its statement, and its tests in the form of the reward `code`.

Forms of the tests, as JSON text or as they are:

- `{"inputs": […], "outputs": […]}`, with `fn_name` for calls of a function: TACO, APPS; AReaL's data have it in the
  column `input_output`;
- a list of `{"input": …, "output": …, "testtype": …}`, with `stdin` or `functional` and the function's name in
  `metadata.func_name`: LiveCodeBench;
- a list of `{"type": …, "input": …, "output": …}`, with `stdin_stdout`, or `function_call` and `fn_name`:
  PrimeIntellect;
- a list of `{"input": …, "output": …}`: Codeforces.

The arguments of a call are a list, or JSON text with one argument on each line; then its value is JSON text, too.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Entry = Mapping[str, Any]
COLUMNS = ("problem", "question", "starter_code", "tests", "input_output", "metadata", "language")
"""Columns that are read; others, such as solutions, are skipped."""
_STATEMENTS = ("problem", "question")
_TESTS = ("tests", "input_output")
_NAMES = ("fn_name", "func_name")
_OF_CALLS = {"functional", "function_call"}
_OF_INPUT = {"stdin", "stdin_stdout"}
# PrimeIntellect's words around each statement. Without them, a problem that is in two data sets is found to be one.
_FRAME = re.compile(
    r"^\s*solve the following coding problem using the programming language \w+\s*:\s*"
    r"|\s*the input will be (?:given via )?stdin and you should print your solution to stdout\.?\s*$"
    r"|\s*now solve the problem and return the code\.?\s*$",
    re.IGNORECASE,
)


class UnusableError(Exception):
    """A row of a source cannot become a row of the recipe; its text is the reason, the same for all rows alike."""


@dataclass(frozen=True)
class Problem:
    """A problem with its tests."""

    statement: str
    starter: str
    """Code that the program has to complete; "": none."""
    truth: dict[str, Any]
    """Ground truth of the reward `code`: `inputs`, `outputs` and, for calls of a function, `fn_name`."""


def read_problem(entry: Entry) -> Problem:
    """Return the problem of a source's row.

    Args:
        entry: The row.

    Raises:
        UnusableError: It is no object, or has no statement, or no tests that can be read.
        RecursionError: A value is nested too deeply.
    """
    if not isinstance(entry, Mapping):
        raise UnusableError("a row that is no object")
    if str(entry.get("language") or "python").lower() not in ("python", "python3"):
        raise UnusableError("another language than Python")
    statement = _first(entry, _STATEMENTS)
    if not isinstance(statement, str) or not (statement := unframed(statement)):
        raise UnusableError("no statement")
    starter = entry.get("starter_code")
    truth = _truth(_loaded(_first(entry, _TESTS)), _name(_loaded_or_empty(entry.get("metadata"))))
    if not truth["inputs"]:
        raise UnusableError("no tests")
    return Problem(statement, starter.strip() if isinstance(starter, str) else "", truth)


def unframed(statement: str) -> str:
    """Return a statement without the words that PrimeIntellect's data put around each one."""
    while (shorter := _FRAME.sub("", statement)) != statement:
        statement = shorter
    return statement.strip()


def longest_tests(truth: Mapping[str, Any], unfit: Mapping[int, str], most: int, most_characters: int) -> list[int]:
    """Choose the tests of a problem: those with the longest inputs, as DeepCoder's reward does, in their order.

    Args:
        truth: Ground truth of the reward `code`, with `inputs` and `outputs`.
        unfit: Indexes of tests that the reward cannot run.
        most: Most tests.
        most_characters: Most characters of all chosen tests. A test that would exceed them is passed over.
    """
    sizes = [
        (len(_text(given)), len(_text(expected)))
        for given, expected in zip(truth["inputs"], truth["outputs"], strict=True)
    ]
    chosen: list[int] = []
    left = most_characters
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index][0]):
        if index not in unfit and len(chosen) < most and sum(sizes[index]) <= left:
            chosen.append(index)
            left -= sum(sizes[index])
    return sorted(chosen)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _first(entry: Entry, names: Sequence[str]) -> Any:
    return next((entry[name] for name in names if entry.get(name)), None)


def _loaded(tests: Any) -> Any:
    """Return tests as Python's values. Some rows have a Python literal where others have JSON."""
    if not isinstance(tests, str):
        return tests
    try:
        return json.loads(tests)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(tests)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise UnusableError("tests that are neither JSON nor Python") from None


def _loaded_or_empty(metadata: Any) -> Mapping[str, Any]:
    try:
        found = json.loads(metadata) if isinstance(metadata, str) else metadata
    except ValueError:
        return {}
    return found if isinstance(found, Mapping) else {}


def _name(fields: Mapping[str, Any]) -> str | None:
    name = _first(fields, _NAMES)
    return name if isinstance(name, str) else None


def _truth(tests: Any, name_of_row: str | None) -> dict[str, Any]:
    """Return the ground truth of the tests.

    Args:
        tests: The tests, in one of the forms.
        name_of_row: Name of the function in the row's metadata; None: there is none.
    """
    if isinstance(tests, Mapping):
        inputs, outputs = tests.get("inputs") or [], tests.get("outputs") or []
        if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
            raise UnusableError("not as many outputs as inputs")
        name = _name(tests) or name_of_row
        is_call = name is not None
    elif isinstance(tests, Sequence) and not isinstance(tests, str):
        if not all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in tests):
            raise UnusableError("a test without an input or an output")
        inputs, outputs = [test["input"] for test in tests], [test["output"] for test in tests]
        is_call, name = _kind(tests, name_of_row)
    else:
        raise UnusableError("no tests")
    if not is_call:
        return {"inputs": [_lines(given) for given in inputs], "outputs": [_lines(printed) for printed in outputs]}
    if name is None or not name.isidentifier() or keyword.iskeyword(name):
        raise UnusableError("calls of a function without a name")
    calls = [_call(given, value) for given, value in zip(inputs, outputs, strict=True)]
    truth = {"fn_name": name, "inputs": [given for given, _ in calls], "outputs": [value for _, value in calls]}
    try:
        json.dumps(truth, allow_nan=False)  # NaN and the infinities would be names in a test's code
    except (ValueError, TypeError, RecursionError):
        raise UnusableError("a call whose arguments or value are not JSON") from None
    return truth


def _kind(tests: Sequence[Entry], name_of_row: str | None) -> tuple[bool, str | None]:
    """Return whether the tests of a list call a function, and its name."""
    kinds = {str(test.get("testtype") or test.get("type") or "") for test in tests}
    names = {_name(test) or _name(_loaded_or_empty(test.get("metadata"))) or name_of_row for test in tests}
    if len(kinds) > 1 or len(names) > 1:
        raise UnusableError("tests of several kinds")
    kind, name = next(iter(kinds), ""), next(iter(names), None)
    if kind not in _OF_CALLS | _OF_INPUT | {""}:
        raise UnusableError("tests of an unknown kind")
    return kind in _OF_CALLS or (not kind and name is not None), name


def _lines(value: Any) -> str:
    """Return standard input or output as a text; some of TACO's are lists of lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str | int | float) for line in value):
        return "\n".join(map(str, value))
    raise UnusableError("an input or output that is not text")


def _call(given: Any, value: Any) -> tuple[list[Any], Any]:
    if isinstance(given, str):
        try:
            arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
            return arguments, json.loads(value) if isinstance(value, str) else value
        except ValueError:
            raise UnusableError("a call whose arguments or value are not JSON") from None
    if not isinstance(given, list):
        raise UnusableError("a call whose arguments are not a list")
    return given, value

"""`code` beside verl's `prime_code`, which runs a program in a process of its own."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import AsyncIterator
from typing import Any

from tests.long.rewards.parity import Compared, of_verl, score

EXIT, SEVERAL, WHOLE = "a program that exits", "several numbers on a line", "whole numbers"
SUM = "print(sum(map(int, input().split())))"
METHOD = "class Solution:\n    def add(self, nums: List[int]) -> int:\n        return sum(nums)"


def _io(given: str, expected: str) -> dict[str, Any]:
    return {"inputs": [given], "outputs": [expected]}


# `quick` compares the first five alone.
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("print(1 / 3)", _io("", "0.333333\n"), ""),
    ("print(1)", _io("", "1.0\n"), ""),
    (METHOD, {"fn_name": "add", "inputs": ["[1, 2]"], "outputs": ["3"]}, ""),
    (SUM, _io("1 2\n", "4\n"), ""),
    ("print('b\\na')", _io("", "a\nb\n"), ""),
    ("print(10**20 + 1)", _io("", "1e20\n"), ""),
    (SUM, _io("1 2\n", "3\n"), ""),
    ("print(0.3)", _io("", "0.333333\n"), ""),
    ("print('3 ')", _io("", "3"), ""),
    ("print('a')", _io("", "b"), ""),
    ("print(Counter('aab')['a'], math.floor(2.5))", _io("", "2 2"), ""),
    ("import sys\nsys.setrecursionlimit(10)\nprint(3)", _io("", "3"), ""),
    ("f = lambda n: n and 1 + f(n - 1)\nprint(f(5000))", _io("", "5000"), ""),
    ("1 +", _io("", "1"), ""),
    ("raise ValueError", _io("", "1"), ""),
    (METHOD.replace("sum(nums)", "0"), {"fn_name": "add", "inputs": ["[1, 2]"], "outputs": ["3"]}, ""),
    ("def add(nums): return tuple(nums)", {"fn_name": "add", "inputs": ["[1, 2]"], "outputs": ["[1, 2]"]}, ""),
    ("def add(nums): return 1.0", {"fn_name": "add", "inputs": ["[1, 2]"], "outputs": ["1"]}, ""),
    ("print(10**20 + 1)", _io("", "100000000000000000000\n"), ""),
    ("print('b a')", _io("", "a b\n"), ""),
    ("print(9.0)", _io("", "9\n"), ""),
    ("print('9e0')", _io("", "9\n"), ""),
    ("print(float(10**18))", _io("", "1000000000000000000\n"), ""),
    ("print('1000000000000000007.0')", _io("", "1000000000000000007\n"), ""),
    ("print(123457.9)", _io("", "123457.0\n"), ""),
    ("print(123457.9)", _io("", "123457\n"), WHOLE),
    ("print(0.000000001)", _io("", "0\n"), WHOLE),
    ("print('1.00000e+18')", _io("", "1000000000000000007\n"), WHOLE),
    ("print(2.9999999999999996)", _io("", "3\n"), WHOLE),
    ("def add(nums): return 123457.9", {"fn_name": "add", "inputs": ["[1]"], "outputs": ["123457"]}, ""),
    ("def add(nums): return 1e18", {"fn_name": "add", "inputs": ["[1]"], "outputs": ["1000000000000000000"]}, ""),
    ("def add(nums): return 1e18", {"fn_name": "add", "inputs": ["[1]"], "outputs": ["1000000000000000007"]}, ""),
    ("print('１２３')", _io("", "123\n"), ""),
    ("print('0.1 0.2')", _io("", "0.1000001 0.2\n"), SEVERAL),
    ("print(3)\nraise SystemExit", _io("", "3"), ""),
    ("print(3)\nraise SystemExit(1)", _io("", "3"), ""),
    ("import os\nprint(3, flush=True)\nos._exit(0)", _io("", "3"), EXIT),
    ("print(3)\nraise ValueError", _io("", "3"), EXIT),
]


def prime_code_says(program: str, tests: dict[str, Any]) -> float:
    """Return 1.0 when verl's `prime_code` passes the program, else 0.0."""
    original = of_verl("prime_code/__init__.py")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        # This does not call `compute_score`, which raises UnboundLocalError for a program that fails (verl 0.9.1).
        results, _ = original.apps_check_correctness(copy.deepcopy(tests), program, timeout=10, debug=False)
    return float(all(result is True for result in results))


async def compare(quick: bool) -> AsyncIterator[Compared]:
    """Compare every program; with `quick` only the first five."""
    for program, tests, stated in CASES[: 5 if quick else None]:
        theirs = prime_code_says(program, tests)
        ours = await score("taco", [f"```python\n{program}\n```"], tests)
        yield Compared("code", repr(program)[:80], ours, theirs, stated)

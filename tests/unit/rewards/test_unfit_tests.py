"""Tests of a row that the reward `code` cannot run: exactly those are named that it cannot."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.scoring import RIGHT, UNJUDGEABLE, WRONG, Numbers, block, score
from verl_multiturn import ConfigError
from verl_multiturn.rewards import aclose
from verl_multiturn.rewards.programs import unfit_tests

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
async def _closed() -> AsyncIterator[None]:
    yield
    await aclose()


def largest(fits: Callable[[int], bool]) -> int:
    """Return the largest size that fits, by bisection."""
    low, high = 1, 1 << 14
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@pytest.mark.parametrize(
    ("program", "given", "value", "beyond"),
    [
        ("def f(x): return 1", [7], 1, UNJUDGEABLE),
        ("def f(x): return [7] * x", None, [7], WRONG),
        ("def f(x): return '\\\\' * x", None, "\\", WRONG),
    ],
    ids=["arguments", "value", "value that is written twice as long"],
)
async def test_a_call_fits_exactly_as_long_as_a_right_program_is_found_right(
    program: str, given: Any, value: Any, beyond: Numbers
) -> None:
    def call(size: int) -> dict[str, Any]:
        arguments = size if given is None else given * size
        return {"fn_name": "f", "inputs": [[arguments]], "outputs": [value if given else value * size]}

    size = largest(lambda size: not unfit_tests(call(size), "apps"))
    assert await score("apps", block(program), call(size)) == RIGHT
    assert await score("apps", block(program), call(size + 1)) == beyond


def test_other_tests_that_cannot_be_run_are_named_too() -> None:
    assert unfit_tests({"inputs": ["1", "2"], "outputs": ["1", "x" * 4_000_001]}, "taco") == {
        1: "an output that is too long"
    }
    long = "assert f(1) #" + "x" * 200_000
    assert unfit_tests({"assert_case": [long, "assert f(1)"]}, "mbpp") == {0: "code that is too long"}
    deep: list[Any] = []
    for _ in range(120):
        deep = [deep]
    assert list(unfit_tests({"fn_name": "f", "inputs": [[deep], [1]], "outputs": [1, 1]}, "apps")) == [0]
    with pytest.raises(ConfigError, match="no tests"):
        unfit_tests("{", "taco")

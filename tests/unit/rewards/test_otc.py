"""The OTC reward: literal coefficients, their invariants, and its settings."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_multiturn import ConfigError
from verl_multiturn.advantages.otc import r_tool_grpo, r_tool_ppo, r_tools
from verl_multiturn.config import read_settings

HALF_ROOT_2, HALF_ROOT_3 = 0.7071067811865476, 0.8660254037844386


@pytest.mark.parametrize(
    ("calls", "c", "expected"),
    [
        (0, 4.0, 1.0),
        (1, 4.0, HALF_ROOT_3),  # cos(π/6)
        (2, 4.0, HALF_ROOT_2),  # cos(2π/8)
        (4, 4.0, 0.5),  # cos(4π/12)
        (1, 2.0, HALF_ROOT_2),  # cos(π/4)
        (1, 1.0, 0.5),  # cos(π/3)
        (3, 0.5, 0.12053668025532306),  # cos(3π/6.5) = sin(π/26)
    ],
)
def test_the_ppo_form(calls: int, c: float, expected: float) -> None:
    assert r_tool_ppo(calls, c) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("calls", "fewest", "expected"),
    [
        (0, 0, 1.0),
        (1, 0, HALF_ROOT_3),  # the other form, with c = 4
        (4, 0, 0.5),
        (1, 1, 1.0),
        (2, 1, HALF_ROOT_3),  # f = 4/3: sin(2π/3)
        (3, 1, HALF_ROOT_2),  # f = 3/2: sin(3π/4)
        (5, 1, 0.5),  # f = 5/3: sin(5π/6)
        (2, 2, 1.0),
        (4, 2, HALF_ROOT_3),  # f = 8/3: sin(2π/3)
        (10, 2, 0.5),  # f = 10/3: sin(5π/6)
    ],
)
def test_the_grpo_form(calls: int, fewest: int, expected: float) -> None:
    assert r_tool_grpo(calls, fewest, 4.0) == pytest.approx(expected, abs=1e-15)


def test_the_answers_to_one_question() -> None:
    assert r_tools([1, 5, 2, 1], "grpo", 4.0) == pytest.approx([1.0, 0.5, HALF_ROOT_3, 1.0])
    assert r_tools([0, 4, 1], "grpo", 4.0) == pytest.approx([1.0, 0.5, HALF_ROOT_3])
    assert r_tools([4, 4], "grpo", 4.0) == [1.0, 1.0]
    assert r_tools([4, 4, 0], "ppo", 4.0) == pytest.approx([0.5, 0.5, 1.0])
    assert r_tools([], "grpo", 4.0) == r_tools([], "ppo", 4.0) == []


counts = st.integers(min_value=0, max_value=200)
constants = st.floats(min_value=0.1, max_value=100)


@given(counts, constants)
def test_one_more_call_earns_less(calls: int, c: float) -> None:
    assert 1 >= r_tool_ppo(calls, c) > r_tool_ppo(calls + 1, c) > 0


@given(counts, counts, constants)
def test_one_call_more_than_needed_earns_less(fewest: int, more: int, c: float) -> None:
    assert r_tool_grpo(fewest, fewest, c) == 1
    assert 1 >= r_tool_grpo(fewest + more, fewest, c) > r_tool_grpo(fewest + more + 1, fewest, c) > 0


@given(counts, constants, constants)
def test_a_larger_constant_is_milder(calls: int, c: float, more: float) -> None:
    assert r_tool_ppo(calls, c + more) >= r_tool_ppo(calls, c)


@given(st.integers(1, 200), counts)
def test_the_papers_own_writing_of_the_sine(fewest: int, more: int) -> None:
    calls = fewest + more
    f = 2 * fewest * calls / (calls + fewest)
    assert r_tool_grpo(calls, fewest, 1.0) == pytest.approx(math.sin(f * math.pi / (2 * fewest)), abs=1e-12)


@given(st.lists(counts, min_size=1, max_size=16), st.sampled_from(["ppo", "grpo"]), constants)
def test_fewer_calls_never_earn_less(calls: list[int], form: Any, c: float) -> None:
    by_calls = sorted(zip(calls, r_tools(calls, form, c), strict=True))
    assert all(earned >= after for (_, earned), (_, after) in pairwise(by_calls))
    if form == "grpo":
        assert by_calls[0][1] == 1


def test_the_setting() -> None:
    settings = read_settings(None).otc
    assert (settings.form, settings.c, settings.alpha) == ("none", 4.0, 1.0)
    assert read_settings({"otc": {"form": "grpo", "c": 2}}).otc.c == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"form": "gpro"}, r"otc.form: Input should be 'none', 'ppo' or 'grpo', got 'gpro'"),
        ({"from": "ppo"}, r"otc.from: unknown setting; did you mean 'form'\?"),
        ({"c": 0}, r"otc.c: Input should be greater than 0, got 0"),
        ({"c": float("nan")}, r"otc.c: .*, got nan"),
        ({"alpha": -1}, r"otc.alpha: Input should be greater than 0, got -1"),
        ({"alpha": float("inf")}, r"otc.alpha: Input should be a finite number, got inf"),
    ],
)
def test_a_setting_that_cannot_be(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings({"otc": given})

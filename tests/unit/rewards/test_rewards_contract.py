"""Results of reward functions, and the names of their mistakes: function, file, row and value."""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from tests.unit.rewards.test_reward_numbers import HALVES, NO_NUMBERS, Tensor
from verl_multiturn.errors import ConfigError, OutageError, RewardContractError, UnjudgedError
from verl_multiturn.rewards.contract import name_of, raised_text, require_rewards
from verl_multiturn.rewards.router import compute_score

ROW: dict[str, Any] = {
    "data_source": "sums",
    "solution_str": "4",
    "ground_truth": np.str_("5"),
    "extra_info": {"index": 7},
}
PATHS = "; return a number on every path, or raise UnjudgedError where there is no verdict"


async def nothing() -> float:
    return 1.0


def numbers() -> Any:
    yield 1.0


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, f"None{PATHS}"),
    "a coroutine": (nothing, "a coroutine that nobody awaits; write the function with async def, or await it inside"),
    "text": (lambda: "1.0", "'1.0'"),
    "no text": (lambda: "", "''"),
    "an empty dictionary": (lambda: {}, f"{{}}, which has no 'score'{PATHS}"),
    "a dictionary without score": (lambda: {"acc": 1.0}, f"{{'acc': 1.0}}, which has no 'score'{PATHS}"),
    "score None": (lambda: {"score": None}, f"{{'score': None}}, whose 'score' is no number{PATHS}"),
    "score text": (lambda: {"score": "1"}, f"{{'score': '1'}}, whose 'score' is no number{PATHS}"),
    "score list": (lambda: {"score": [1.0]}, f"{{'score': [1.0]}}, whose 'score' is no number{PATHS}"),
    "NaN": (lambda: float("nan"), "a reward that cannot be used: nan is no finite number from -1e+12 to 1e+12"),
    "infinity": (lambda: float("inf"), "a reward that cannot be used: inf is no finite number from -1e+12 to 1e+12"),
    "score NaN": (
        lambda: {"score": np.nan},
        "a reward that cannot be used: nan is no finite number from -1e+12 to 1e+12",
    ),
    "a list": (lambda: [1.0], "[1.0]"),
    "a tuple": (lambda: (1.0, {}), "(1.0, {})"),
    "an array": (lambda: np.array([1.0]), "array([1.]); return one number, such as value.item()"),
    "a generator": (numbers, "<generator object numbers>"),
    "a function": (lambda: nothing, "<function nothing>"),
}
RIGHT: list[Any] = [1, 0.5, True, Decimal("0.5"), np.float32(0.5), Tensor(0.5), {"score": 1}, {"score": np.array(0.5)}]


def returns(make: Callable[[], Any], is_async: bool) -> Callable[..., Any]:
    def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        return make()

    async def awaited(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        return make()

    return awaited if is_async else score


async def call(function: Callable[..., Any], **changes: Any) -> Any:
    """Call a function as verl's managers do."""
    made = require_rewards(function)
    result = made(**{**ROW, **changes})
    return await result if inspect.iscoroutinefunction(made) else result


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", WRONG)
async def test_what_is_no_reward_is_refused(kind: str, is_async: bool) -> None:
    make, said = WRONG[kind]
    function = returns(make, is_async)
    with pytest.raises(RewardContractError) as refused:
        await call(function)
    name = f"{__name__}:{function.__qualname__} ({__file__})"
    row = "the row with extra_info.index 7, data_source 'sums', ground_truth '5'"
    assert str(refused.value) == f"the reward function {name} was given {row}, and returned {said}"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("value", RIGHT, ids=str)
async def test_a_reward_comes_back_as_it_is(value: Any, is_async: bool) -> None:
    assert await call(returns(lambda: value, is_async)) is value


@pytest.mark.parametrize("score", [*HALVES, *NO_NUMBERS], ids=str)
async def test_a_score_is_read_by_the_rule_of_all_rewards(score: Any) -> None:
    function = returns(lambda: {"score": score, "further": object()}, is_async=False)
    if any(score is half for half in HALVES):
        assert (await call(function))["score"] is score
    else:
        with pytest.raises(RewardContractError, match="whose 'score' is no number"):
            await call(function)


@pytest.mark.parametrize("error", [UnjudgedError("lost"), OutageError("away"), ZeroDivisionError()], ids=str)
async def test_what_a_function_raises_passes(error: Exception) -> None:
    def fails() -> Any:
        raise error

    with pytest.raises(type(error)) as raised:
        await call(returns(fails, is_async=False))
    assert raised.value is error


async def test_a_mistake_in_the_data_names_its_row() -> None:
    said = "the row with data_source 'gsm8k', ground_truth 'many': .*expected a number, got 'many'"
    with pytest.raises(RewardContractError, match=said):
        await call(compute_score, data_source="gsm8k", ground_truth="many", extra_info=None)
    assert issubclass(RewardContractError, ConfigError)


def test_a_function_is_checked_once() -> None:
    once = require_rewards(returns(lambda: 1.0, is_async=False))
    assert require_rewards(once) is once


class Scorer:
    def __call__(self, **kwargs: Any) -> float:
        return 1.0

    def score(self, **kwargs: Any) -> float:
        return 1.0


def test_names_of_functions() -> None:
    def through(function: Any, kwargs: Any, **more: Any) -> Any:
        return function(**more, **kwargs)

    of_verl = functools.partial(through, compute_score, {})
    router = inspect.getsourcefile(compute_score)
    assert name_of(of_verl) == f"verl_multiturn.rewards.router:compute_score ({router})"
    assert name_of(Scorer().score) == f"{__name__}:Scorer.score ({__file__})"
    assert name_of(Scorer()) == f"{__name__}:Scorer ({__file__})"
    assert name_of(max) == "builtins:max"
    drawn = returns(lambda: 1.0, is_async=False)
    drawn.__module__ = "custom_module_139934"
    assert name_of(drawn) == f"{drawn.__qualname__} ({__file__})"


def breaks(**row: Any) -> float:
    raise ValueError("no " + str(row["ground_truth"]))


async def breaks_later(**row: Any) -> float:
    raise ValueError("no " + str(row["ground_truth"]))


def short(data_source: str) -> float:
    return 1.0


def as_verl(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in verl's partial, whose code is in a file of an installed package."""
    named: dict[str, Any] = {}
    exec(
        compile("def call(raw, kwargs, **row): return raw(**row, **kwargs)", "/site-packages/reward.py", "exec"), named
    )
    return functools.partial(named["call"], function, {})


@pytest.mark.parametrize("function", [breaks, breaks_later])
async def test_what_a_reward_raises_has_its_place_function_and_row(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="no 5") as caught:
        await call(function)
    line = function.__code__.co_firstlineno + 1
    carried = pickle.loads(pickle.dumps(caught.value))  # as a reward worker hands it over
    said = f"ValueError: no 5 (test_rewards_contract.py:{line})"
    assert raised_text(carried, has_row=False) == said
    assert raised_text(carried) == (
        f"{said}, in the reward function tests.unit.rewards.test_rewards_contract:{function.__name__} ({__file__}), "
        "which was given the row with extra_info.index 7, data_source 'sums', ground_truth '5'"
    )
    wrapped = RuntimeError("of Ray")
    wrapped.cause = carried  # type: ignore[attr-defined]
    assert raised_text(wrapped, has_row=False) == said


def test_a_call_that_does_not_fit_names_the_function_and_not_verls_file() -> None:
    with pytest.raises(TypeError) as caught:
        require_rewards(as_verl(short))(**ROW)
    said = raised_text(caught.value, has_row=False)
    assert said.startswith("TypeError: short() got an unexpected keyword argument 'solution_str', ")
    assert said.endswith(f"at the call of the reward function {__name__}:short ({__file__})")


def test_an_error_of_other_code_has_its_place_alone() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018
    assert raised_text(caught.value).startswith("ZeroDivisionError: division by zero (test_rewards_contract.py:")


class Answers(RuntimeError):
    """An error of an author's that answers any name."""

    def __getattr__(self, name: str) -> Any:
        return "text"


class Refuses(RuntimeError):
    @property
    def cause(self) -> Any:
        raise KeyError("cause")


@pytest.mark.parametrize("error", [Answers("down"), Refuses("down")])
def test_an_error_of_an_authors_own_class_keeps_its_text(error: Exception) -> None:
    assert raised_text(error) == f"{type(error).__name__}: down"
    error = RuntimeError("the service is down")
    error.cause = KeyError("unit")  # type: ignore[attr-defined]
    assert raised_text(error) == "RuntimeError: the service is down"

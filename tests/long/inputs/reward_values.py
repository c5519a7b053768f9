"""Results of reward functions, through the check that training and `eval` share."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import numpy as np
import torch

from tests.long.inputs.input_cases import Case, Right, Seen, accept, refuse
from verl_multiturn import OutageError, UnjudgedError
from verl_multiturn.rewards.contract import require_rewards
from verl_multiturn.rewards.router import compute_score
from verl_multiturn.rows.reward_numbers import as_reward

ROW: dict[str, Any] = {
    "data_source": "sums",
    "solution_str": "4",
    "ground_truth": "5",
    "extra_info": {"index": 7, "split": "train"},
}


class Scorer:
    """A reward that is an object."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def __call__(self, data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        """Return it."""
        return self.returned


def returns(make: Callable[[], Any], is_async: bool = False) -> Callable[..., Any]:
    """Return a reward function that returns the result of `make`."""

    def my_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        return make()

    async def my_async_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        return make()

    return my_async_score if is_async else my_score


def raises(error: Exception) -> Callable[[], Any]:
    """Return a function that raises."""

    def make() -> Any:
        raise error

    return make


def score(function: Callable[..., Any]) -> Callable[[], Awaitable[Seen]]:
    """Return the door of a reward function as verl's managers call it: the value is the reward."""

    async def door() -> Seen:
        made = require_rewards(function)
        found = await made(**ROW) if inspect.iscoroutinefunction(made) else made(**ROW)
        return Seen("accepted", as_reward(found["score"] if isinstance(found, dict) else found))

    return door


def _coroutine() -> Any:
    return asyncio.sleep(0, 1.0)


def _abstains_sometimes(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    if solution_str == ground_truth:
        return 1.0
    # and otherwise the `return` was forgotten
    return None


def cases() -> list[Case]:
    """Return the inputs of this file."""
    row = ("my_score", "index 7", "'sums'", "'5'")
    wrong: list[tuple[str, Callable[[], Any], str]] = [
        ("None", lambda: None, "None"),
        ("a coroutine", _coroutine, "coroutine"),
        ("text", lambda: "1.0", "'1.0'"),
        ("text that is empty", lambda: "", "''"),
        ("an empty dictionary", dict, "{}"),
        ("a dictionary without score", lambda: {"acc": 1.0}, "'score'"),
        ("a dictionary with Score", lambda: {"Score": 1.0}, "'score'"),
        ("score None", lambda: {"score": None}, "None"),
        ("score text", lambda: {"score": "0.5"}, "'0.5'"),
        ("score in a list", lambda: {"score": [0.5]}, "[0.5]"),
        ("score in a dictionary", lambda: {"score": {"value": 1}}, "'value'"),
        ("a list", lambda: [1.0], "[1.0]"),
        ("a tuple of score and metrics", lambda: (1.0, {"acc": 1}), "(1.0"),
        ("nan", lambda: float("nan"), "nan"),
        ("infinity", lambda: float("-inf"), "-inf"),
        ("score nan", lambda: {"score": float("nan")}, "nan"),
        ("a number beyond float32", lambda: 1e39, "1e+39"),
        ("an array of one", lambda: np.array([1.0]), "item()"),
        ("a tensor of two", lambda: torch.tensor([1.0, 0.0]), "tensor"),
        ("a generator", lambda: (each for each in (1.0,)), "generator"),
        ("a complex number", lambda: 1j, "1j"),
        ("bytes", lambda: b"1", "b'1'"),
        ("a class", lambda: float, "float"),
    ]
    right: list[tuple[str, Callable[[], Any], float]] = [
        ("1", lambda: 1, 1.0),
        ("0", lambda: 0, 0.0),
        ("False", lambda: False, 0.0),
        ("Decimal", lambda: Decimal("0.25"), 0.25),
        ("np.float64", lambda: np.float64(0.5), 0.5),
        ("np.bool_", lambda: np.bool_(True), 1.0),
        ("an array without dimensions", lambda: np.array(0.5), 0.5),
        ("a tensor without dimensions", lambda: torch.tensor(0.5), 0.5),
        ("a dictionary", lambda: {"score": -1, "acc": 0}, -1.0),
        ("a dictionary with more", lambda: {"score": 0.5, "why": "half"}, 0.5),
    ]
    others: list[tuple[str, Callable[..., Any], Right]] = [
        ("UnjudgedError", returns(raises(UnjudgedError("the judge is lost"))), Right("invalid", words=["lost"])),
        ("async UnjudgedError", returns(raises(UnjudgedError("lost")), True), Right("invalid", words=["lost"])),
        ("OutageError", returns(raises(OutageError("the judge is away"))), Right("outage", words=["away"])),
        ("a forgotten return", _abstains_sometimes, refuse("_abstains_sometimes", "index 7", "None")),
        ("an object that returns None", Scorer(None), refuse("Scorer", "index 7", "None")),
        ("an object that returns 1", Scorer(1), accept(1.0)),
        ("the router: a ground truth of another form", _routed("gsm8k", "many"), refuse("'many'", "gsm8k")),
        ("the router: a data source without a reward", _routed("gsm9k", "5"), refuse("'gsm9k'")),
        ("the router: a ground truth that is missing", _routed("gsm8k", None), refuse("gsm8k", "None")),
    ]
    return [
        *(
            Case("rewards", f"it returns {name}", score(returns(make)), refuse(*row, word))
            for name, make, word in wrong
        ),
        *(
            Case("rewards", f"async, it returns {name}", score(returns(make, True)), refuse("my_async_score", word))
            for name, make, word in wrong[::2]
        ),
        *(Case("rewards", f"it returns {name}", score(returns(make)), accept(value)) for name, make, value in right),
        *(Case("rewards", name, score(function), right) for name, function, right in others),
    ]


def _routed(data_source: str, ground_truth: Any) -> Callable[..., Any]:
    async def routed(**row: Any) -> Any:
        return await require_rewards(compute_score)(**{**row, "data_source": data_source, "ground_truth": ground_truth})

    return routed

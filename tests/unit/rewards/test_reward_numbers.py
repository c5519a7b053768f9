"""One rule for rewards: values that count as numbers, and which are rewards, wherever they come from."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from pydantic_core import to_json

from tests.conftest import EchoTool
from tests.sessions import HI, session
from verl_multiturn import Interaction, Reply, scripted_rollout
from verl_multiturn.errors import AgentContractError, ConfigError, InteractionContractError, ToolContractError
from verl_multiturn.proxy.agents.end import read_result
from verl_multiturn.rewards import Score
from verl_multiturn.rewards.router import compute_score
from verl_multiturn.rows.reward_numbers import (
    LARGEST_REWARD,
    NoNumberError,
    ScoreRange,
    UnusableNumberError,
    are_equal,
    as_reward,
    is_number,
    plain_scalar,
)
from verl_multiturn.tools.loading.functions import function_tool


class Tensor:
    """An object that holds one number without being one, in the form of torch's."""

    def __init__(self, value: Any, ndim: int = 0) -> None:
        self._value, self.ndim = value, ndim

    def item(self) -> Any:
        return self._value

    def __repr__(self) -> str:
        return f"tensor({self._value})"


class Meta(Tensor):
    """A tensor without data."""

    def item(self) -> Any:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")


class Broken(float):
    """A number that cannot be had."""

    def __float__(self) -> float:
        raise ZeroDivisionError


HALVES = [
    0.5,
    Fraction(1, 2),
    Decimal("0.5"),
    np.float16(0.5),
    np.float64(0.5),
    np.array(0.5),
    np.array(0.5, dtype=np.float32),
    np.array(Decimal("0.5"), dtype=object),
    Tensor(0.5),
]
NO_NUMBERS = [
    "0.5",
    None,
    1j,
    [0.5],
    np.array([0.5]),
    np.array([0.5, 1.0]),
    np.array([np.nan, np.inf]),
    np.array("x"),
    np.array(None),
    np.complex64(1),
    np.datetime64("2020"),
    Tensor([0.5], ndim=1),
    Tensor("x"),
    Meta(0.5),
]
UNUSABLE = [
    float("nan"),
    float("inf"),
    -float("inf"),
    1e39,
    1e300,
    -1e30,
    1.01 * LARGEST_REWARD,
    10**400,
    Fraction(10**400),
    Decimal("nan"),
    Decimal("snan"),
    Decimal("-1e999"),
    np.float32("inf"),
    np.float64(1e39),
    np.array(np.nan),
    np.array(1e300),
    Tensor(1e39),
    Tensor(float("nan")),
    Broken(1.0),
]


def text(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:20]}"


@pytest.mark.parametrize("value", HALVES, ids=text)
def test_numbers_of_all_kinds_are_rewards(value: Any) -> None:
    assert is_number(value)
    assert (as_reward(value), type(as_reward(value))) == (0.5, float)


@pytest.mark.parametrize("value", [True, np.bool_(True), np.array(True), Tensor(True), np.int8(1)], ids=text)
def test_true_counts_as_one(value: Any) -> None:
    assert (as_reward(value), type(as_reward(value))) == (1.0, float)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=text)
def test_what_is_no_number(value: Any) -> None:
    assert not is_number(value)
    with pytest.raises(NoNumberError, match=r"^got "):
        as_reward(value)


def test_several_numbers_are_told_how_to_become_one() -> None:
    with pytest.raises(NoNumberError, match=r"^got array\(\[0\.5\]\); return one number, such as value\.item\(\)$"):
        as_reward(np.array([0.5]))
    with pytest.raises(NoNumberError, match=r"^got '0\.5'$"):
        as_reward("0.5")


@pytest.mark.parametrize("value", UNUSABLE, ids=text)
def test_what_the_trainer_cannot_hold(value: Any) -> None:
    assert is_number(value)
    with pytest.raises(UnusableNumberError, match=r" is no finite number from -1e\+12 to 1e\+12$"):
        as_reward(value)


def test_the_largest_rewards() -> None:
    assert [as_reward(value) for value in (LARGEST_REWARD, -LARGEST_REWARD)] == [1e12, -1e12]
    assert as_reward(2e12, largest=3e12) == 2e12


def test_what_holds_no_scalar_stays_as_it_is() -> None:
    several, class_of_its_own = np.array([1.0]), type("Odd", (), {"ndim": property(lambda self: 1 / 0)})()
    assert plain_scalar(several) is several
    assert plain_scalar(class_of_its_own) is class_of_its_own
    assert [plain_scalar(value) for value in (np.array(True), np.bool_(False), "x")] == [True, False, "x"]


# In each room the same values, with the room's handling of a reward that it cannot use.


class Gives(Interaction):
    """An interaction that gives a reward for a turn, or at the end."""

    def __init__(self, value: Any, method: str) -> None:
        super().__init__({})
        self.value, self.method = value, method

    async def reply(self, instance_id: str, messages: Any, **kwargs: Any) -> Reply:
        return Reply("x", reward=self.value if self.method == "reply" else None, done=True)

    async def score(self, instance_id: str) -> Any:
        return self.value if self.method == "score" else 0.0


async def tools_step(value: Any) -> float:
    async with session(EchoTool({"returns": ("x", value, {})})) as opened:
        return (await opened.execute([HI]))[0].reward


async def tools_calc_reward(value: Any) -> float | None:
    class Returns(EchoTool):
        async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
            return value

    async with session(Returns()) as opened:
        await opened.execute([HI])
        return (await opened.calc_rewards()).get("echo")


async def functions_step(value: Any) -> float:
    def echo(text: str) -> Any:
        """Echo."""
        return "x", value, {}

    async with session(function_tool(echo)) as opened:
        (result,) = await opened.execute([HI])
    assert result.text == "x"
    return result.reward


async def interactions(value: Any, method: str) -> float | str | None:
    outcome = await scripted_rollout([], ["a"], "Go.", interaction=Gives(value, method))
    if not outcome.valid:
        return f"{outcome.stop_reason}: {outcome.error}"
    return outcome.replies[0].reward if method == "reply" else outcome.score


async def interactions_reply(value: Any) -> float | str | None:
    return await interactions(value, "reply")


async def interactions_score(value: Any) -> float | str | None:
    return await interactions(value, "score")


async def agents_reward(value: Any) -> float | None:
    return read_result({"reward": value}).reward


OWN: list[Any] = []


async def own_reward(solution: Any, ground_truth: Any) -> Score:
    return Score(value=OWN[-1], answered=1.0, format=1.0)


async def scores(value: Any) -> tuple[float, float] | float:
    OWN.append(value)
    told = await compute_score("mine", "x", "y", {}, routes={"mine": f"{__name__}.own_reward"})
    return (told["score"], told["failed"]) if told["failed"] else told["score"]


ROOMS: dict[Callable[..., Any], tuple[type[Exception], object]] = {
    tools_step: (ToolContractError, 0.0),
    tools_calc_reward: (ToolContractError, None),
    functions_step: (ToolContractError, 0.0),
    interactions_reply: (InteractionContractError, "environment_error: interaction"),
    interactions_score: (InteractionContractError, "environment_error: interaction"),
    agents_reward: (AgentContractError, AgentContractError),
    scores: (ConfigError, (0.0, 1.0)),
}
OPTIONAL = {tools_step, functions_step, interactions_reply, agents_reward}
"""Where None is not a reward at all."""


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
@pytest.mark.parametrize("value", HALVES, ids=text)
async def test_every_room_takes_all_numbers(room: Callable[..., Any], value: Any) -> None:
    assert await room(value) == 0.5


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
@pytest.mark.parametrize("value", [value for value in NO_NUMBERS if not isinstance(value, str)], ids=text)
async def test_in_every_room_another_type_is_the_authors_mistake(room: Callable[..., Any], value: Any) -> None:
    if value is None and room in OPTIONAL:
        return
    if room is functions_step and is_json(value):
        return  # an answer of three parts
    with pytest.raises(ROOMS[room][0]) as raised:
        await room(value)
    assert repr(value)[:40] in str(raised.value)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
@pytest.mark.parametrize("value", UNUSABLE, ids=text)
async def test_in_every_room_an_unusable_number_is_none(room: Callable[..., Any], value: Any) -> None:
    expected = ROOMS[room][1]
    if isinstance(expected, type):
        with pytest.raises(expected, match="whose reward is no finite number from -1e"):
            await room(value)
    elif isinstance(expected, str):
        told = await room(value)
        assert str(told).startswith(expected), told
        assert "which is no finite number from -1e+12 to 1e+12" in told
    else:
        assert await room(value) == expected


@pytest.mark.parametrize(
    ("scores", "equal"),
    [([0.3, 0.1 + 0.2], True), ([0.0, 0.0], True), ([-1e6, -1e6 - 0.01], True), ([0.0, 1e-3], False), ([-1, 1], False)],
)
def test_rewards_are_equal_but_for_how_their_sums_were_rounded(scores: list[float], equal: bool) -> None:
    assert are_equal(scores) is equal


@pytest.mark.parametrize(
    ("scores", "bar", "below"),
    [
        ([0.0, 1.0], 0.5, 0.49),
        ([-1.0, None, 1.0], 0.0, -0.01),
        ([0.1, 0.5], 0.3, 0.29),  # (0.1 + 0.5) / 2 is more than 0.3
        ([0.9, 0.9000000001], 0.9, 0.0),  # a run of one reward
        ([0.0], 1e-9, 0.0),
        ([], 1e-9, 0.0),
    ],
)
def test_who_is_right_without_an_accuracy(scores: list[float | None], bar: float, below: float) -> None:
    found = ScoreRange.of(scores)
    assert found.is_right(bar)
    assert not found.is_right(below)


def test_an_accuracy_decides_whatever_was_earned() -> None:
    found = ScoreRange.of([0.0, 1.0])
    assert found.is_right(0.0, acc=1.0)
    assert found.is_right(-1.0, acc=0.51)
    assert not found.is_right(1.0, acc=0.5)
    assert not found.is_right(1.0, acc=0.0)


def test_a_range_is_kept_and_joined() -> None:
    found = ScoreRange.of([0.25, None, -1.0])
    assert found.ends == (-1.0, 0.25)
    assert ScoreRange.of(found.ends) == found
    assert found | ScoreRange.of([2.0]) == ScoreRange(-1.0, 2.0)
    assert ScoreRange.of([None]).ends == ()
    assert found | ScoreRange() == found


def is_json(value: Any) -> bool:
    try:
        to_json(value)
    except ValueError:
        return False
    return True

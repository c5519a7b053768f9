"""The rules for rewards: which numbers are rewards, which rewards are equal, and which conversations are right.

    as_reward, score_of    numbers that tools, interactions, environments, agents and reward functions return
    have_signal            whether something can be learned from a group: the one rule for all who look at one
    are_equal              whether two or more rewards are the same
    ScoreRange.is_right    whether a conversation solved its task

Invariants:
- nothing else turns somebody's reward into a float that is trained;
- a reward that was read can be summed, squared and summed again in the trainer's numbers of 32 bits.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any

from verl_multiturn.describe import show

LARGEST_REWARD = 1e12
"""The largest size of a reward.

The trainer's numbers have 32 bits and end at 3.4e38. verl squares a conversation's reward, and sums the squares over
all tokens of a batch. Beyond the end the deviation is infinite, and every advantage 0. With `reinforce_plus_plus` and
4 million tokens that is so from 1e16 on, and the norm of a gradient of a million parameters is infinite from 1e18 on.
"""
LARGEST_SCORE = 1e3 * LARGEST_REWARD
"""The largest size of the sum of a conversation's weighted rewards: a square of 1e30, a hundred million times."""
USABLE = f"finite number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
"""The numbers that a reward may be, for messages."""
_ON_EVERY_PATH = "return a number on every path, or raise UnjudgedError where there is no verdict"
ROUNDING = 1e-6
"""Largest difference of two equal rewards, relative to the larger one."""
RIGHT_ACC = 0.5
"""A conversation whose reward reports more than this as `acc` is right."""
RoleRewards = Mapping[str | None, float]
"""The rewards of a conversation by role (`proxy.roles`); without roles its whole reward, under None."""


class NoNumberError(TypeError):
    """A reward is not a number; the text has the value, and the type to return. It is a mistake of the author."""


class UnusableNumberError(ArithmeticError):
    """A reward is NaN, infinite or too large; the text has the value. It may depend on the data."""


def plain_scalar(value: Any) -> Any:
    """Return the value of an array or a tensor without dimensions, NumPy's scalars among them; else the value itself.

    Example: `plain_scalar(numpy.array(True)) is True`.
    """
    try:
        return value.item() if value.ndim == 0 else value
    except Exception:  # it has no `ndim` or no `item`; or they raise, as for a tensor without data
        return value


def is_number(value: Any) -> bool:
    """Return whether a value is a number, and can be a reward if its size allows it: also a bool and a Decimal."""
    return isinstance(plain_scalar(value), Real | Decimal)


def as_reward(value: Any, largest: float = LARGEST_REWARD) -> float:
    """Return a reward as a float. True and False count as 1 and 0.

    Args:
        value: The reward: a number, or an array or a tensor of one number without dimensions.
        largest: The largest size.

    Raises:
        NoNumberError: The value is not a number.
        UnusableNumberError: It is NaN, infinite, or larger than `largest`.
    """
    if not is_number(value):
        remedy = "; return one number, such as value.item()" if hasattr(type(value), "item") else ""
        raise NoNumberError(f"got {show(value)}{remedy}")
    try:
        number = float(plain_scalar(value))
    except Exception:  # a number of the author's own class, or an integer that is too large for a float
        number = float("nan")
    if not abs(number) <= largest:
        raise UnusableNumberError(f"{show(value)} is no finite number from {-largest:g} to {largest:g}")
    return number


def score_of(result: Any) -> float:
    """Return the score in a reward function's result: a number, or a dictionary with a number as `score`.

    Raises:
        NoNumberError: It has none.
        UnusableNumberError: It is NaN, infinite or too large.
    """
    if inspect.iscoroutine(result):
        result.close()  # Python would warn of one that is never awaited
        raise NoNumberError("got a coroutine that nobody awaits; write the function with async def, or await it inside")
    score = result
    if isinstance(result, dict):
        if "score" not in result:
            raise NoNumberError(f"got {show(result)}, which has no 'score'; {_ON_EVERY_PATH}")
        score = result["score"]
    try:
        return as_reward(score)
    except NoNumberError as error:
        if score is result and result is not None:
            raise
        what = "None" if result is None else f"{show(result)}, whose 'score' is no number"
        raise NoNumberError(f"got {what}; {_ON_EVERY_PATH}") from error


def have_signal(rewards: Sequence[RoleRewards]) -> bool:
    """Return whether two conversations of a group differ in the reward of one same role.

    Advantages compare the conversations of each role. So a zero-sum game has a signal, though its sums are all 0.
    Example: [{"white": 1, "black": -1}, {"white": -1, "black": 1}] has one, [{None: 1}, {None: 1}] has none.

    Args:
        rewards: Those of the group's valid conversations, of trained roles alone.
    """
    by_role: dict[str | None, list[float]] = defaultdict(list)
    for own in rewards:
        for role, reward in own.items():
            by_role[role].append(reward)
    return not all(map(are_equal, by_role.values()))


def are_equal(scores: Sequence[float]) -> bool:
    """Return whether rewards are the same: they differ by no more than float32 sums in another order do."""
    return bool(within_rounding(min(scores), max(scores)))


def within_rounding(low: Any, high: Any) -> Any:
    """Return whether rewards from `low` to `high` are the same; of arrays, one beside the other."""
    return (high - low <= ROUNDING * abs(low)) | (high - low <= ROUNDING * abs(high))


@dataclass
class ScoreRange:
    """The lowest and the highest reward of a run, which decide who is right where no `acc` was reported.

    Training and validation have a range each. Only valid conversations with a reward are in it.
    """

    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, scores: Iterable[float | None]) -> ScoreRange:
        """Return the range of rewards; None, for a conversation without one, is passed over."""
        made = cls()
        made.add(scores)
        return made

    def add(self, scores: Iterable[float | None]) -> None:
        """Widen the range by further rewards; None is passed over."""
        for score in scores:
            if score is not None:
                self.low, self.high = min(self.low, score), max(self.high, score)

    def __or__(self, other: ScoreRange) -> ScoreRange:
        """Return the range of the rewards of both."""
        return ScoreRange(min(self.low, other.low), max(self.high, other.high))

    @property
    def ends(self) -> tuple[float, ...]:
        """Return both ends; nothing of a run without a reward."""
        return () if self.low > self.high else (self.low, self.high)

    @property
    def bar(self) -> float:
        """Return the reward from which on a conversation without `acc` is right.

        It is the middle of the range. In a run of one reward it is the smallest number above 0.
        """
        if not self.ends or are_equal(self.ends):
            return math.ulp(0.0)
        return (self.low + self.high) / 2 - ROUNDING * max(abs(self.low), abs(self.high))

    def is_right(self, score: float, acc: float | None = None) -> bool:
        """Return whether a valid conversation solved its task.

        Args:
            score: Its reward.
            acc: The value `acc` that its reward reported; None: `score` decides.
        """
        return acc > RIGHT_ACC if acc is not None else score >= self.bar

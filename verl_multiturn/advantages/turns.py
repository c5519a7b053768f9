"""Advantages of turns, from whole conversations: the mathematics of our estimators, without tensors.

    mt_grpo    the conversation's reward, compared with the group's: GRPO (arXiv 2402.03300) over conversations
    mt_turns   a turn's return to go, less a baseline of its number
    mt_gigpo   mt_grpo, and a turn's reward from its state on, compared with others in that state (arXiv 2505.10978)

The turns of a session of an agent are its completions. They are a forest: several may continue the same one. `mt_grpo`
takes them in three ways (`proxy.credit`):

    session      as it takes a conversation: all completions have the session's advantage
    discounted   that, discounted by the completions after it in its row
    completion   the reward of a completion and its continuations, compared with the scores of the group's sessions

Invariants:
- a group is all conversations of one prompt. Invalid conversations have advantages of 0, and change nothing for the
  others. So does a conversation that is the only valid one: there is nothing to compare it with;
- only the numbers of turns give their order, not their place in a list. The order of completions that do
  not continue each other changes nothing;
- how a conversation is cut into rows changes nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from verl_multiturn.rollout.turn import Turn

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it, as verl and the code of GiGPO do.

It is also the share of the largest value below which values differ by rounding alone: a batch holds float32.
"""

Share = Annotated[float, Field(ge=0, le=1)]
"""A number from 0 to 1. The parameters of estimators are options of a run, and are checked before it begins."""

Advantages = list[list[float]]
"""For each conversation of a group the advantage of each of its turns, in the order in which they were given."""


@dataclass(frozen=True)
class GroupMember:
    """One conversation of a group."""

    turns: Sequence[Turn]
    """Its turns; the last one's reward includes that of the whole conversation. A session's are its completions."""
    valid: bool = True
    outcome: float = 0.0
    """Reward of a session as a whole, beside those of its completions."""
    role: str | None = None
    """Name of the speaker of all its turns, one of `proxy.roles`; None where there are none."""

    @property
    def reward(self) -> float:
        """Return the whole reward of the conversation."""
        return math.fsum([self.outcome, *(turn.earned or 0.0 for turn in self.turns)])


def of_conversations(group: Sequence[GroupMember], std: bool = True) -> Advantages:
    """Return the advantages of `mt_grpo`: a conversation's reward less the mean, for all its turns.

    Args:
        group: The conversations of one prompt.
        std: Whether to divide by the standard deviation (of a sample, with `n - 1`).
    """
    return _compare(group, lambda valid: _of_rewards(valid, std, across_rows=False))


def of_discounted(group: Sequence[GroupMember], gamma: float = 1.0, std: bool = True) -> Advantages:
    """Return the advantages of `mt_grpo`, each times `gamma` for each completion after it (`Turn.after`).

    Args:
        group: The sessions of one prompt.
        gamma: Discount from a completion to the one that it continues.
        std: As for `of_conversations`.
    """
    return [
        [value * gamma**turn.after for turn, value in zip(played.turns, own, strict=True)]
        for played, own in zip(group, of_conversations(group, std), strict=True)
    ]


def of_completions(group: Sequence[GroupMember], gamma: float = 1.0, std: bool = True) -> Advantages:
    """Return (G - mean) / deviation for each completion; mean and deviation are those of the sessions' scores.

    G is the completion's reward, plus `gamma` times the mean of G over the completions that continue it. One that
    nothing continues earned the session's outcome, too. So branches do not pay for each other, whichever was first.
    Where all sessions have the same score, there is no deviation to divide by, and all advantages are 0.

    Example, with a completion that two others continue, of which one earned 1:
        of_completions([Played([Turn(0), Turn(1, 1.0, parent=0), Turn(2, parent=0)]), Played([Turn(0)])], std=False)
            == [[0.0, 0.5, -0.5], [-0.5]]

    Args:
        group: The sessions of one prompt, each with all its completions that were delivered.
        gamma: Discount from a completion to the one that it continues.
        std: As for `of_conversations`.
    """

    def compared(valid: list[GroupMember]) -> Advantages:
        norm = _norm([played.reward for played in valid], std)
        return [[_scaled(value, norm) for value in _forest_returns(played, gamma)] for played in valid]

    return _compare(group, compared)


def of_turns(group: Sequence[GroupMember], gamma: Share = 1.0) -> Advantages:
    """Return the advantages of `mt_turns`: a turn's return to go, less the mean of the turns with its number.

    The mean is over all valid conversations of the group. One that had ended before counts with 0: its return from then
    on. A mean over those alone that were still going on would depend on who stopped, which the policy decides. With it
    the gradient would be biased.

    Example, with two conversations that earn 1 at their second turn, and 0 at their only one:
        of_turns([Played([Turn(0), Turn(1, 1.0)]), Played([Turn(0)])]) == [[0.5, 0.5], [-0.5]]

    Args:
        group: The conversations of one prompt.
        gamma: Discount of the reward of the next turn.
    """

    def compared(valid: list[GroupMember]) -> Advantages:
        returns = [_returns(played, gamma) for played in valid]
        totals: dict[int, list[float]] = defaultdict(list)
        for played, own in zip(valid, returns, strict=True):
            for turn, value in zip(played.turns, own, strict=True):
                totals[turn.number].append(value)
        means = {number: math.fsum(values) / len(valid) for number, values in totals.items()}
        return [
            [value - means[turn.number] for turn, value in zip(played.turns, own, strict=True)]
            for played, own in zip(valid, returns, strict=True)
        ]

    return _compare(group, compared)


def of_states(
    group: Sequence[GroupMember],
    gamma: Share = 1.0,
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0,
    std: bool = False,
    across_rows: bool = False,
) -> Advantages:
    """Return the advantages of `mt_gigpo`: of the conversation, plus `weight` times that of the turn in its state.

    Equations 3, 6, 7 and 8 of arXiv 2505.10978. A turn whose state was seen once has no advantage in it.

    Args:
        group: The conversations of one prompt.
        gamma: Discount of the reward of the next turn.
        weight: Weight of the second part.
        std: Whether both parts are divided by the standard deviation (of a sample, with `n - 1`).
        across_rows: Whether a conversation counts in the mean of the first part once for each turn, as in the paper's
            published code; otherwise once.
    """

    def compared(valid: list[GroupMember]) -> Advantages:
        whole = _of_rewards(valid, std, across_rows)
        returns = [_returns(played, gamma) for played in valid]
        met: dict[str, list[float]] = defaultdict(list)
        for played, own in zip(valid, returns, strict=True):
            for turn, value in zip(played.turns, own, strict=True):
                if turn.state is not None:
                    met[turn.state].append(value)
        norms = {state: _norm(values, std) for state, values in met.items()}
        made = []
        for played, own, first in zip(valid, returns, whole, strict=True):
            second = [
                0.0 if turn.state is None else _scaled(value, norms[turn.state])
                for turn, value in zip(played.turns, own, strict=True)
            ]
            made.append([a + weight * b for a, b in zip(first, second, strict=True)])
        return made

    return _compare(group, compared)


def _compare(group: Sequence[GroupMember], compared: Callable[[list[GroupMember]], Advantages]) -> Advantages:
    """Return the advantages of a group, those of valid conversations as `compared` computes them from each other."""
    valid = [played for played in group if played.valid]
    made = iter(compared(valid) if len(valid) > 1 else [[0.0] * len(played.turns) for played in valid])
    return [next(made) if played.valid else [0.0] * len(played.turns) for played in group]


def _of_rewards(valid: list[GroupMember], std: bool, across_rows: bool) -> Advantages:
    rewards = [played.reward for played in valid]
    counted = [
        reward for played, reward in zip(valid, rewards, strict=True) for _ in (played.turns if across_rows else [0])
    ]
    norm = _norm(counted, std)
    return [[_scaled(reward, norm)] * len(played.turns) for played, reward in zip(valid, rewards, strict=True)]


def _returns(played: GroupMember, gamma: float) -> list[float]:
    """Return the rewards of each turn and those after it, discounted by the distance in turns."""
    order = sorted(range(len(played.turns)), key=lambda i: played.turns[i].number, reverse=True)
    made, after, last = [0.0] * len(order), 0.0, 0
    for i in order:
        turn = played.turns[i]
        after = (turn.earned or 0.0) + gamma ** max(0, last - turn.number) * after
        made[i], last = after, turn.number
    return made


def _forest_returns(played: GroupMember, gamma: float) -> list[float]:
    """Return the reward of each completion of a session and those that continue it, as `of_completions` defines it."""
    order = sorted(range(len(played.turns)), key=lambda i: played.turns[i].number, reverse=True)
    made, continued = [0.0] * len(order), defaultdict[int, list[float]](list)
    for i in order:  # a completion is made after the one that it continues
        turn = played.turns[i]
        later = continued[turn.number]
        made[i] = (turn.earned or 0.0) + (gamma * math.fsum(later) / len(later) if later else played.outcome)
        if turn.parent is not None:
            continued[turn.parent].append(made[i])
    return made


def _norm(values: Sequence[float], std: bool) -> tuple[float, float]:
    """Return the mean of values, and the divisor of a difference from it: infinity where they are all the same.

    Rewards come with 32 bits. Values that differ by their rounding alone are the same: divided by such a deviation,
    the rounding would be learned.
    """
    mean = math.fsum(values) / len(values) if values else 0.0
    if not std or len(values) < 2:
        return mean, 1.0
    if max(values) - min(values) < EPSILON * max(1.0, *map(abs, values)):  # equal; rounding must not be trained
        return mean, math.inf
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)) + EPSILON


def _scaled(value: float, norm: tuple[float, float]) -> float:
    return (value - norm[0]) / norm[1]

"""Are the advantages of turns those of the papers and the exact gradient?

    python -m benchmarks.interaction_advantages

1. GiGPO (arXiv 2505.10978): the advantages of a win `s0 s1` and a loss `s0 s2 s0` against numbers recorded from the
  published code (discount 0.95, no standard deviation, means across rows), and of 1,000 random groups against plain
  numpy.
2. The gradient: in a small decision process the policy decides when to stop. All groups of two conversations are
  enumerated, each weighted by its probability. So the expected gradient of an estimator has no noise, and is compared
  with the exact one, found by differentiating the expected return. A baseline that contains the conversation's own
  return shrinks every gradient by the factor 1 - 1/n, which is known and divided out.
  The control normalises the rewards of each turn number among the conversations that reached it, and adds the turns up.

The last line is one JSON object.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_multiturn.advantages.turns import EPSILON, Advantages, GroupMember, of_states, of_turns
from verl_multiturn.rollout.turn import Turn

GROUPS = 1000
RECORDED = [[37 / 30, 3 / 5], [-43 / 60, -2 / 5, -43 / 60]]
"""Advantages that the published code gave, recorded by hand."""
GROUP_SIZE = 2
_MOST_TURNS = 3

Estimator = Callable[[Sequence[GroupMember]], Advantages]


def recorded_error() -> float:
    """Return the largest difference from the numbers recorded from the published code."""
    win = GroupMember([Turn(0, 0.0, "s0"), Turn(1, 1.0, "s1")])
    loss = GroupMember([Turn(0, 0.0, "s0"), Turn(1, 0.0, "s2"), Turn(2, 0.0, "s0")])
    return _largest(of_states([win, loss], 0.95, std=False, across_rows=True), RECORDED)


def random_error(groups: int = GROUPS) -> float:
    """Return the largest difference from plain numpy in random groups, whose turns come in any order."""
    rng, worst = random.Random("gigpo"), 0.0
    for _ in range(groups):
        group = [_random_conversation(rng) for _ in range(rng.randint(2, 8))]
        gamma, weight = rng.choice([1.0, 0.95, 0.5, 0.0]), rng.choice([0.0, 0.5, 1.0, 2.0])
        std, across_rows = rng.random() < 0.5, rng.random() < 0.5
        expected = plain_gigpo(group, gamma, weight, std, across_rows)
        shuffled = [GroupMember(rng.sample(played.turns, len(played.turns))) for played in group]
        made = of_states(shuffled, gamma, weight, std, across_rows)
        in_order = [
            [value for _, value in sorted(zip([turn.number for turn in played.turns], own, strict=True))]
            for played, own in zip(shuffled, made, strict=True)
        ]
        worst = max(worst, _largest(in_order, expected))
    return worst


def _random_conversation(rng: random.Random) -> GroupMember:
    return GroupMember(
        [
            Turn(number, rng.choice([0.0, 0.0, 1.0, -0.1, rng.random()]), rng.choice(["a", "b", "c", "d", None]))
            for number in range(rng.randint(1, 6))
        ]
    )


def plain_gigpo(
    group: Sequence[GroupMember], gamma: float, weight: float, std: bool, across_rows: bool
) -> list[NDArray[Any]]:
    """Compute GiGPO's advantages in arrays with a row for each turn, as the paper writes them."""
    row_conversation = np.concatenate([np.full(len(played.turns), i) for i, played in enumerate(group)])
    rewards = np.array([turn.earned or 0.0 for played in group for turn in played.turns])
    states = [turn.state for played in group for turn in played.turns]
    episodes = np.array([rewards[row_conversation == i].sum() for i in range(len(group))])
    compared = episodes[row_conversation] if across_rows else episodes
    first = episodes[row_conversation] - compared.mean()
    if std:
        first = first / (compared.std(ddof=1) + EPSILON)
    returns = np.zeros(len(rewards))
    for i in range(len(group)):
        (rows,) = np.nonzero(row_conversation == i)
        for k, row in enumerate(rows):
            returns[row] = (rewards[rows[k:]] * gamma ** np.arange(len(rows) - k)).sum()
    second = np.zeros(len(rewards))
    for state in set(states) - {None}:
        same = np.array([each == state for each in states])
        second[same] = returns[same] - returns[same].mean()
        if std and same.sum() > 1:
            second[same] /= returns[same].std(ddof=1) + EPSILON
    return [(first + weight * second)[row_conversation == i] for i in range(len(group))]


class Game(NamedTuple):
    """One way in which a conversation of the small decision process can go."""

    states: list[int]
    actions: list[int]
    rewards: list[float]


def games() -> Iterator[Game]:
    """Yield every game: in each state the policy goes on (action 0 or 1) or stops (action 2)."""
    for length in range(1, _MOST_TURNS + 1):
        for before in itertools.product((0, 1), repeat=length - 1):
            for last in (0, 1, 2) if length == _MOST_TURNS else (2,):
                actions = [*before, last]
                states, rewards, state = [], [], 0
                for turn, action in enumerate(actions):
                    states.append(state)
                    rewards.append([0.3, -0.2, 1.0 if state == 2 else 0.1 * turn][action])
                    state = (state + 1 + action) % 4
                yield Game(states, actions, rewards)


def _log_gradient(theta: NDArray[Any], state: int, action: int) -> NDArray[Any]:
    """Return the gradient of the logarithm of a softmax policy's probability of an action."""
    made = np.zeros_like(theta)
    made[state] = -_policy(theta, state)
    made[state, action] += 1
    return made


def _policy(theta: NDArray[Any], state: int) -> NDArray[Any]:
    exps = np.exp(theta[state] - theta[state].max())
    return np.asarray(exps / exps.sum())


def _probability(theta: NDArray[Any], game: Game) -> float:
    return math.prod(
        float(_policy(theta, state)[action]) for state, action in zip(game.states, game.actions, strict=True)
    )


def exact_gradient(theta: NDArray[Any]) -> NDArray[Any]:
    """Return the gradient of the expected return, by central differences of the sum over all games."""

    def value(at: NDArray[Any]) -> float:
        return math.fsum(_probability(at, game) * sum(game.rewards) for game in games())

    made, width = np.zeros_like(theta), 1e-5
    for place in np.ndindex(*theta.shape):
        step = np.zeros_like(theta)
        step[place] = width
        made[place] = (value(theta + step) - value(theta - step)) / (2 * width)
    return made


def expected_gradient(theta: NDArray[Any], estimate: Estimator) -> NDArray[Any]:
    """Return the expectation of an estimator's gradient over all groups, its known shrinking divided out."""
    every = list(games())
    shares = [_probability(theta, game) for game in every]
    logs = [
        [_log_gradient(theta, state, action) for state, action in zip(game.states, game.actions, strict=True)]
        for game in every
    ]
    total = np.zeros_like(theta)
    for drawn in itertools.product(range(len(every)), repeat=GROUP_SIZE):
        group = [GroupMember([Turn(k, reward) for k, reward in enumerate(every[i].rewards)]) for i in drawn]
        share = math.prod(shares[i] for i in drawn)
        for i, own in zip(drawn, estimate(group), strict=True):
            for advantage, log in zip(own, logs[i], strict=True):
                total += share * advantage * log
    return total / GROUP_SIZE / (1 - 1 / GROUP_SIZE)


def control(group: Sequence[GroupMember]) -> Advantages:
    """Normalise the rewards of each turn number among those that reached it, and add up the turns from each on."""
    reached: dict[int, list[float]] = defaultdict(list)
    for played in group:
        for turn in played.turns:
            reached[turn.number].append(turn.earned or 0.0)
    made = []
    for played in group:
        normed = []
        for turn in played.turns:
            values = np.array(reached[turn.number])
            std = values.std(ddof=1) if len(values) > 1 else 0.0
            normed.append(((turn.earned or 0.0) - values.mean()) / (std + EPSILON))
        made.append([float(sum(normed[k:])) for k in range(len(normed))])
    return made


def gradient_error(estimate: Estimator, scaled: bool = False) -> float:
    """Return how far an estimator's expected gradient is from the exact one, relative to the latter.

    Args:
        estimate: The estimator.
        scaled: Whether the best factor is applied first, so that only the direction counts.
    """
    theta = np.random.default_rng(7).normal(size=(4, 3))
    exact, found = exact_gradient(theta), expected_gradient(theta, estimate)
    if scaled:
        found = found * (found * exact).sum() / (found**2).sum()
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def _largest(made: Sequence[Sequence[float]], expected: Sequence[Any]) -> float:
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(made, expected, strict=True))


def figures() -> dict[str, float]:
    """Return the figures of the last line."""
    return {
        "groups": GROUPS,
        "gigpo_error": max(recorded_error(), random_error()),
        "turn_gradient_error": gradient_error(of_turns),
        "control_gradient_error": gradient_error(control),
        "control_gradient_error_of_its_direction": gradient_error(control, scaled=True),
    }

"""Groups of conversations that were made up, for `check-advantage`: the same in every process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from verl_multiturn.advantages.turns import GroupMember
from verl_multiturn.rollout.turn import Turn
from verl_multiturn.rows.reward_numbers import LARGEST_REWARD

EQUAL_SCORE, NEXT_SCORE = 0.30000001192092896, 0.30000004172325134
"""0.3 and the number after it, of 32 bits: one score, computed in two ways."""
_STATES = "abc"


class GroupMaker:
    """Makes the groups of an examination.

    Args:
        roles: The roles of a run; each group has one of them. Without any, groups have None.
        seed: Seed of all that is drawn.
    """

    def __init__(self, roles: Sequence[str] = (), seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._roles: Sequence[str | None] = roles or (None,)
        self._made = 0

    def group(self, size: int, turns: int = 5) -> list[GroupMember]:
        """Return a group whose conversations have one to `turns` turns, rewards on some, and a score at the end."""
        role = self._roles[self._made % len(self._roles)]
        self._made += 1
        return [self._conversation(self._draw.randint(1, turns), role) for _ in range(size)]

    def _conversation(self, turns: int, role: str | None) -> GroupMember:
        draw = self._draw
        rewards = [draw.choice([None, None, 0.25, -0.5, draw.uniform(-1, 1)]) for _ in range(turns)]
        rewards[-1] = draw.choice([0.0, 1.0, 1.0, draw.uniform(-1, 1)])
        return chain(rewards, [draw.choice(_STATES) for _ in rewards], role)

    def ordinary(self) -> list[list[GroupMember]]:
        """Return groups of two to eight conversations, as a step has them."""
        return [self.group(size) for size in (2, 3, 4, 5, 6, 8, 8, 8)]

    def forest(self) -> list[GroupMember]:
        """Return sessions of an agent: several roots, branches, rewards of completions, and an outcome."""
        draw, role = self._draw, self._roles[0]
        sessions = []
        for size in (1, 3, 6, 9):
            turns = []
            for number in range(size):
                parent = draw.choice([None, *range(number)]) if number else None
                turns.append(Turn(number, draw.choice([None, 0.5, -0.25]), None, parent, role=role))
            sessions.append(GroupMember(turns, outcome=draw.uniform(-1, 1), role=role))
        return sessions

    def of_scores(self, scores: Sequence[float]) -> list[GroupMember]:
        """Return conversations of two turns with given scores, in one state."""
        return [chain([None, score], ["a", "a"], self._roles[0]) for score in scores]

    def huge(self) -> list[list[GroupMember]]:
        """Return groups with the largest rewards that there are, and with the smallest."""
        return [
            self.of_scores([LARGEST_REWARD, -LARGEST_REWARD, 0.0, 1.0]),
            self.of_scores([LARGEST_REWARD, LARGEST_REWARD, LARGEST_REWARD, 0.0]),
            self.of_scores([1e-30, 0.0, -1e-30, 1e-12]),
        ]


def chain(rewards: Sequence[float | None], states: Sequence[str | None], role: str | None = None) -> GroupMember:
    """Return a conversation that is one row, whose turns have these rewards and states."""
    last = len(rewards) - 1
    return GroupMember(
        [
            Turn(i, reward, state, i - 1 if i else None, last - i, role)
            for i, (reward, state) in enumerate(zip(rewards, states, strict=True))
        ],
        role=role,
    )


def in_rows(member: GroupMember, length: int) -> GroupMember:
    """Return a conversation cut into rows of so many turns: each begins anew."""
    last = len(member.turns) - 1
    cut = [
        replace(turn, parent=i - 1 if i % length else None, after=min(last, i - i % length + length - 1) - i)
        for i, turn in enumerate(member.turns)
    ]
    return replace(member, turns=cut)

"""Which tokens of a finished conversation a reward belongs to.

`verl_bridge` calls it for each finished conversation. `tool_scores` and `interaction_scores` give the rewards of tools
and of interactions as positions in a row's response, which are added to the row's scores. `turns_of` gives the
estimators of advantages (`mt_grpo`, `mt_turns`, `mt_gigpo`) their facts about each turn.

Invariants:
- a reward always lies on a sampled token: that of a turn on the turn's last one, that of the whole conversation on the
  last one of all, where there are roles on the last one of each;
- an invalid conversation has no rewards;
- positions count from the first token of the row's response, and ends are half open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_multiturn.config import ASSISTANT
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.rollout.turn import Turn

Scores = list[tuple[int, float]]
"""Rewards of a row, each with its position in the response. Every position is a sampled token. Example: `[(11, 0.5)]`.
"""


def tool_scores(outcome: Outcome, weight: float = 1.0) -> list[Scores]:
    """Return the tools' rewards for each row of a conversation, weighted.

    A step reward goes to the last token of the turn that made the call. The sum of the tools' `calc_reward` goes to the
    last sampled token; where the user is trained, too, to the assistant's last one. Rewards of zero are omitted. An
    invalid conversation has no rewards.

    Args:
        outcome: A conversation that is over.
        weight: Factor of every reward.
    """
    steps = [(turn, call.reward) for turn in outcome.turns for call in turn.calls]
    role = ASSISTANT if outcome.trained else None
    return _placed(outcome, steps, {role: sum(outcome.calc_rewards.values())}, weight)


def interaction_scores(outcome: Outcome, weight: float = 1.0) -> list[Scores]:
    """Return the interaction's rewards for each row of a conversation, weighted.

    The reward of a turn goes to the turn's last token, the score of the conversation to the last sampled token; with
    roles, each role's to its own last one. Rewards of zero are omitted. An invalid conversation has no rewards.

    Args:
        outcome: A conversation that is over.
        weight: Factor of every reward.
    """
    steps = [(turn, turn.reply.reward or 0.0) for turn in outcome.turns if turn.reply is not None]
    roles: Sequence[str | None] = outcome.trained or [None]
    return _placed(outcome, steps, {role: outcome.scores.get(role or "", outcome.score) for role in roles}, weight)


def _placed(
    outcome: Outcome, steps: list[tuple[Turn, float]], last: Mapping[str | None, float], weight: float
) -> list[Scores]:
    """Return the rewards of turns, and that of the whole conversation for each role, at their places."""
    placed: list[Scores] = [[] for _ in outcome.rows]
    if not outcome.valid:
        return placed
    rewards = [(turn, reward) for turn, reward in steps if reward]
    ends = {turn.role: turn for turn in outcome.turns if turn.sampled}
    rewards += [(ends[role], reward) for role, reward in last.items() if reward and role in ends]
    for turn, reward in rewards:
        assert isinstance(turn.place, int)
        placed[turn.place].append((turn.end - 1, weight * reward))
    return placed


def turns_of(outcome: Outcome) -> list[list[dict[str, Any]]]:
    """Return the turns of each row, in their order there, as `Turn.to_plain` writes them."""
    rows: list[list[dict[str, Any]]] = [[] for _ in outcome.rows]
    for turn in sorted(outcome.turns, key=lambda turn: turn.start):
        if turn.sampled and isinstance(turn.place, int):
            rows[turn.place].append(turn.to_plain())
    return rows

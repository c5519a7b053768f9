"""The positions in a response to which the rewards of its tools belong."""

from __future__ import annotations

from verl_multiturn.rollout.conversation import Outcome


def tool_scores(outcome: Outcome, weight: float = 1.0) -> list[tuple[int, float]]:
    """Return weighted rewards, each with its position in the response. Every position is a sampled token.

    A step reward goes to the last token of the turn that made the call. The sum of the tools' `calc_reward` goes to the
    last sampled token. Rewards of zero are left out. An invalid conversation has no rewards.

    Example: `[(11, 0.5), (40, 1.0)]`.

    Args:
        outcome: A conversation that is over.
        weight: Factor of every reward.
    """
    trajectory = outcome.trajectory
    rewards = [(turn, call.reward) for turn, call in zip(outcome.call_turns, outcome.calls, strict=True) if call.reward]
    calculated = sum(outcome.calc_rewards.values())
    if not outcome.valid or not (rewards or calculated):
        return []
    last: dict[int, int] = {}
    for position, (turn, sampled) in enumerate(zip(trajectory.turn_ids, trajectory.mask, strict=True)):
        if sampled:
            last[turn] = position - trajectory.prompt_length
    scores = [(last[turn], weight * reward) for turn, reward in rewards]
    if calculated:
        scores.append((max(last.values()), weight * calculated))
    return scores

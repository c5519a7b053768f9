"""Where in a response the rewards of its tools belong."""

from __future__ import annotations

from verl_multiturn.rollout.conversation import Outcome


def tool_scores(outcome: Outcome, weight: float = 1.0) -> list[tuple[int, float]]:
    """Weighted rewards with the position in the response that each is given to, always a sampled token.

    A step reward is given to the last token of the turn that called, the tools' `calc_reward` together to the last
    sampled token. What is zero is left out. An invalid conversation has none.
    """
    trajectory = outcome.trajectory
    rewards = [(turn, call.reward) for turn, call in zip(outcome.call_turns, outcome.calls, strict=True) if call.reward]
    calculated = sum(outcome.tool_rewards.values())
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

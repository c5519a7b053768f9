"""Rewards by `data_source`, for verl's `reward.custom_reward_function`.

Its path is `pkg://verl_multiturn.rewards`, its name `compute_score`. See `docs/write/rewards.md`.
"""

from verl_multiturn.rewards.resources import aclose
from verl_multiturn.rewards.router import compute_score
from verl_multiturn.rewards.score import Score, Solution

__all__ = ["Score", "Solution", "aclose", "compute_score"]

"""`load_manager`: verl's reward manager, whose reward function is checked, wherever one judges.

    agent-loop worker (`near_rewards`), evaluation, replay      `load_manager`
    verl's reward workers, processes of their own               `check_workers`, once they have started

A manager that calls its function elsewhere (`remote`), or that calls none, is checked by its result alone
(`certified_output.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from omegaconf import DictConfig
from verl.trainer.ppo.reward import load_reward_manager

from verl_multiturn.rewards.contract import require_rewards


def load_manager(config: DictConfig, tokenizer: Any, **further: Any) -> Any:
    """Load the reward manager of a configuration, as verl does.

    Args:
        config: verl's whole configuration.
        tokenizer: The model's tokenizer.
        further: Further arguments of verl's.
    """
    return _with_check(load_reward_manager(config, tokenizer, **further))


def check_workers(workers: Sequence[Any]) -> None:
    """Check the reward functions of verl's reward workers from now on.

    Args:
        workers: Ray's handles of them.
    """
    ray.get([worker.__ray_call__.remote(_check_worker) for worker in workers])


def _check_worker(worker: Any) -> None:
    _with_check(worker.reward_manager)


def _with_check(manager: Any) -> Any:
    if callable(function := getattr(manager, "compute_score", None)):
        manager.compute_score = require_rewards(function)
    return manager

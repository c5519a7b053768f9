"""`NearRewards`: judges rewards in the agent-loop worker, which asks verl's reward manager as a reward worker does.

    verl's worker  `handle.compute_score.remote(data)` ──▶ NearRewards ─┬─ here  the reward manager's `run_single`
                                                                        └─ else  a reward worker, by a call of Ray

A call of Ray costs more than a quick rule: the row is pickled, waits for its place in another process, and comes back.

Invariants:
- the manager, the function, the data and so the results are those of a reward worker, and so is what either raises;
- a reward function gets copies of the row's fields, as from a reward worker: what it changes is seen nowhere else.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Awaitable, Sequence
from functools import cached_property
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn

from verl_multiturn.errors import ConfigError
from verl_multiturn.rewards.router import find_reward, read_reward_kwargs
from verl_multiturn.verl_bridge.loops.reward_manager import load_manager
from verl_multiturn.verl_bridge.model.processors import plain_dict
from verl_multiturn.verl_bridge.names import STATELESS_MANAGERS
from verl_multiturn.verl_bridge.settings import is_our_reward, settings_of

QUICK = frozenset({"gsm8k", "qa", "tool_n1"})
"""Rewards in the box that only compare texts: they start no process, ask nobody, and wait for nothing."""
_FUNCTION = "reward.custom_reward_function"


def reward_of(config: DictConfig, data_source: str) -> str:
    """Return the name of the reward that our reward function has for a data source.

    Args:
        config: verl's whole configuration.
        data_source: The row's data source.

    Raises:
        ConfigError: There is none, or an option is unknown.
    """
    options = read_reward_kwargs(plain_dict(OmegaConf.select(config, f"{_FUNCTION}.reward_kwargs")))
    return find_reward(data_source, options.routes)


class NearRewards:
    """The rewards of one agent-loop worker, in the place of verl's handle of a reward worker.

    Args:
        config: verl's whole configuration.
        tokenizer: The model's tokenizer.
        workers: Handles of the reward workers, which judge the other rows.
    """

    def __init__(self, config: DictConfig, tokenizer: Any, workers: Sequence[Any]) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._workers = workers
        self._all = settings_of(config.actor_rollout_ref.rollout).near_rewards == "all"
        get_custom_reward_fn(config)  # imports what the function needs, before conversations could wait for it
        self.compute_score = self  # verl asks `handle.compute_score.remote(data)`

    @classmethod
    def handles(cls, config: DictConfig, tokenizer: Any, workers: Sequence[Any] | None) -> Sequence[Any] | None:
        """Return the handles that verl's worker asks for rewards.

        Args:
            config: verl's whole configuration.
            tokenizer: The model's tokenizer.
            workers: Handles of the reward workers; None: rewards are not asked for here.
        """
        mode = settings_of(config.actor_rollout_ref.rollout).near_rewards
        if workers is None or mode == "off":
            return workers
        manager = config.reward.reward_manager
        is_stateless = manager.source == "register" and manager.name in STATELESS_MANAGERS
        has_model = OmegaConf.select(config, "reward.reward_model.enable")
        if has_model or not is_stateless or (mode == "quick" and not is_our_reward(config)):
            return workers
        return [cls(config, tokenizer, workers)]

    @cached_property
    def _manager(self) -> Any:
        return load_manager(self._config, self._tokenizer, reward_router_address=None, reward_model_tokenizer=None)

    def remote(self, data: Any) -> Awaitable[dict[str, Any]]:
        """Judge a conversation, here or in a reward worker.

        Args:
            data: verl's `DataProto` of its rows.
        """
        if not self._is_near(data.non_tensor_batch["data_source"][-1]):
            asked: Awaitable[dict[str, Any]] = random.choice(self._workers).compute_score.remote(data)
            return asked
        data.non_tensor_batch = copy.deepcopy(data.non_tensor_batch)
        judged: Awaitable[dict[str, Any]] = self._manager.run_single(data)
        return judged

    def _is_near(self, data_source: Any) -> bool:
        if self._all:
            return True
        try:
            return reward_of(self._config, data_source) in QUICK
        except ConfigError:  # the reward worker says so
            return False

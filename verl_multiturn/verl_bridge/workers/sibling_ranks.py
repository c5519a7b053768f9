"""`SiblingRanks`: a group's conversations are ranked in one question, in the worker that rolled all of them out.

    worker  `Siblings` of a group ──nobody is missing──▶ `compare` ──▶ `rewards/relative.py` asks the judge
                                                            └─ `GIVEN` in each one's fields for reward functions
    worker  each conversation ──▶ verl's reward manager ──▶ `compute_score` ──▶ the score is the rank

Invariants:
- a group is one call of `_run_prompt` in every mode of the trainer, so that this process knows all siblings. Where it
  is begun again, here or in another worker, all of its conversations are;
- valid conversations without a reward of their own are compared. An invalid one scores 0 and is not trained; one that
  its agent has rewarded keeps that;
- an outage of the judge is that of all that are compared, and the trainer leaves them out;
- the order in which the judge reads them comes of `data.seed`, the step and the data row alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.errors import ConfigError
from verl_multiturn.rewards.relative import DROPPED, GIVEN, INVALID, GivenVerdicts, rank_siblings
from verl_multiturn.rewards.router import RewardKwargs, find_reward, read_reward_kwargs
from verl_multiturn.rewards.score import Solution
from verl_multiturn.verl_bridge.loops.output import is_valid
from verl_multiturn.verl_bridge.loops.rewards import Rewards
from verl_multiturn.verl_bridge.model.processors import plain_dict
from verl_multiturn.verl_bridge.settings import is_our_reward
from verl_multiturn.verl_bridge.workers.queue_rows import place_of_sample

Ended = tuple[list[Any], Mapping[str, Any]]
"""A conversation that has ended: its rows, and the columns of its data row."""


class SiblingRanks:
    """The comparisons of one agent-loop worker.

    Args:
        config: verl's whole configuration.
        tokenizer: The model's tokenizer, for rows of other agent loops than ours.
    """

    def __init__(self, config: DictConfig, tokenizer: Any) -> None:
        self._config = config
        self._tokenizer = tokenizer

    def compares(self, data_source: Any, rewards: int) -> bool:
        """Return whether the conversations of a training's group are compared.

        Args:
            data_source: Data source of their row.
            rewards: Number of conversations that may be rewarded.
        """
        if rewards < 2 or not is_our_reward(self._config):
            return False
        try:
            return self._kwargs.rubric.relative and find_reward(data_source, self._kwargs.routes) == "rubric"
        except ConfigError:  # the reward function raises it
            return False

    @cached_property
    def _kwargs(self) -> RewardKwargs:
        return read_reward_kwargs(
            plain_dict(OmegaConf.select(self._config, "reward.custom_reward_function.reward_kwargs"))
        )

    async def compare(self, rewards: Rewards, ended: Sequence[Ended], failed: bool) -> None:
        """Hand the verdict on each conversation of a group over to its reward function.

        Args:
            rewards: The rewards of this worker, which watch over the judge.
            ended: The conversations, in the order of their numbers.
            failed: Whether a further one raised, so that verl trains none of them.

        Raises:
            RewardContractError: The author of the data or of the configuration made a mistake, which ends the run.
        """
        unscored = [each for each in ended if each[0][-1].reward_score is None]
        compared = [each for each in unscored if is_valid(each[0])]
        for outputs, _ in unscored:
            outputs[-1].extra_fields[GIVEN] = GivenVerdicts(DROPPED if failed else INVALID)
        if failed or not compared:
            return
        columns = compared[0][1]
        solutions = [self._solution(*each) for each in compared]
        truth = columns["reward_model"]["ground_truth"]

        async def ask() -> None:
            verdicts = await rank_siblings(solutions, truth, self._kwargs.rubric, self._seed(columns))
            for (outputs, _), verdict in zip(compared, verdicts, strict=True):
                outputs[-1].extra_fields[GIVEN] = GivenVerdicts(verdict)

        await rewards.judge_together([outputs for outputs, _ in compared], f"group {columns['uid']}", ask)

    def _solution(self, outputs: Sequence[Any], columns: Mapping[str, Any]) -> Solution:
        """Return a conversation as the reward function gets it from verl's reward manager."""
        last, text = outputs[-1], ""
        if "assistant_texts" not in last.extra_fields:
            text = self._tokenizer.decode(last.response_ids, skip_special_tokens=True)
        extra = {**(columns.get("extra_info") or {}), **last.extra_fields}
        return Solution.of_row(str(columns["data_source"]), text, extra)

    def _seed(self, columns: Mapping[str, Any]) -> int:
        named = repr((int(OmegaConf.select(self._config, "data.seed") or 0), *place_of_sample(columns)))
        return int.from_bytes(hashlib.blake2b(named.encode(), digest_size=8).digest(), "big")

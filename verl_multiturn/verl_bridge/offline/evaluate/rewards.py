"""`EvaluationRewards`: compute a conversation's reward by verl's reward manager in this process, and join its rows.

Invariant: a row scores as the same conversation would have scored in a validation of the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.calls.outages.process import Outages
from verl_multiturn.describe import describe, place_of
from verl_multiturn.errors import ConfigError
from verl_multiturn.records.read.joins import JoinedRow
from verl_multiturn.rewards.contract import raised_text
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.loops.output import CertifiedOutput, joined_row
from verl_multiturn.verl_bridge.loops.rewards import LocalRewards, Rewards, require_callable, reward_of, share_score
from verl_multiturn.verl_bridge.names import STATS
from verl_multiturn.verl_bridge.settings import has_rubric, is_our_reward, settings_of
from verl_multiturn.verl_bridge.startup.refusals.data_rows import is_scored_otherwise
from verl_multiturn.verl_bridge.startup.view import RunView

INVALID, UNREWARDED, FAILED = "invalid", "reward_outage", "failed"
"""Causes in the join's column `untrained` for which a conversation has no score that counts."""


class EvaluationRewards:
    """The rewards of an evaluation.

    Args:
        config: verl's whole configuration, prepared.
        tokenizer: The model's tokenizer.

    Raises:
        ConfigError: The rewards need Ray, or their code cannot be imported.
    """

    def __init__(self, config: DictConfig, tokenizer: Any) -> None:
        if OmegaConf.select(config, "reward.reward_model.enable"):
            raise ConfigError(
                "reward.reward_model.enable=True: a reward model runs in Ray, which eval does not start; let the "
                "reward function ask a model over HTTP, or evaluate with the trainer (trainer.val_only=True)"
            )
        try:
            self._local = LocalRewards(config, tokenizer)
        except Exception as error:  # the file of a reward function is its author's code
            raise ConfigError(
                f"the recipe's reward function cannot be loaded: {describe(error)}{place_of(error)}; mend it"
            ) from None
        require_callable(config)
        self._config = config
        self._is_routed = is_our_reward(config) and not is_scored_otherwise(RunView(config))
        outages = Outages(settings_of(config.actor_rollout_ref.rollout).outage)
        self._rewards = Rewards(outages, has_rubric(config))

    def require_reward(self, data_source: str) -> None:
        """Refuse a data source that our `compute_score` has no reward for.

        Raises:
            ConfigError: It has none.
        """
        if self._is_routed:
            reward_of(self._config, data_source)

    async def judge(
        self, row: Mapping[str, Any], outputs: Sequence[CertifiedOutput], key: RowKey
    ) -> tuple[list[JoinedRow], str]:
        """Return the rows of a conversation as the join has them, and the error of its reward function ("": none).

        Args:
            row: Fields of its data row.
            outputs: Its rows.
            key: Name of its first row.
        """
        if not outputs[-1].stats["valid"]:
            return [self._joined(output, key, number, INVALID) for number, output in enumerate(outputs)], ""
        try:
            await self._rewards.score(outputs, partial(self._local.score, row, outputs))
            share_score(outputs)
            columns = [output.as_dict() for output in outputs]
        except ConfigError:
            raise
        except Exception as error:  # a reward function is its author's code
            failed = [self._joined(output, key, number, FAILED) for number, output in enumerate(outputs)]
            return failed, raised_text(error, has_row=False)
        stats = [column["metrics"][STATS] for column in columns]
        untrained = UNREWARDED if stats[-1]["unrewarded"] else None
        rows = []
        for number, column in enumerate(columns):
            joined = joined_row(key._replace(row=str(number)), stats[number], column, 0, validation=True)
            joined.untrained = untrained
            rows.append(joined)
        return rows, ""

    def _joined(self, output: CertifiedOutput, key: RowKey, number: int, cause: str) -> JoinedRow:
        joined = joined_row(key._replace(row=str(number)), output.stats, {}, 0, validation=True)
        joined.untrained = cause
        return joined

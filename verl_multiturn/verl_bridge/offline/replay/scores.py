"""`Scores`: the rewards of replayed conversations, computed again by verl's reward manager and the run's function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.describe import describe
from verl_multiturn.errors import ConfigError, OutageError, UnjudgedError
from verl_multiturn.rewards.relative import GIVEN, GivenVerdicts
from verl_multiturn.verl_bridge.loops.output import UNJUDGEABLE, CertifiedOutput
from verl_multiturn.verl_bridge.loops.rewards import LocalRewards, reward_of
from verl_multiturn.verl_bridge.settings import is_our_reward

_ASKING = ("judge", "rubric")
"""Rewards in the box whose verdict is another program's, and not the same each time: the recorded ones count."""


class UnrepeatableError(Exception):
    """A score that cannot be computed again; the text gives the reason."""


class Scores:
    """The reward function of a run.

    Args:
        config: verl's whole configuration.
        tokenizer: The model's tokenizer.

    Raises:
        ConfigError: The reward function cannot be loaded.
    """

    def __init__(self, config: DictConfig, tokenizer: Any) -> None:
        self._config = config
        self._own = is_our_reward(config)
        self._why = ""
        if OmegaConf.select(config, "reward.reward_model.enable"):
            self._why = "a reward model judges"
            return
        try:
            self._local = LocalRewards(config, tokenizer)
        except Exception as error:  # the file of a reward function is an author's code
            raise ConfigError(
                f"the run's reward function cannot be loaded ({describe(error)}); say where it is with --set "
                "reward.custom_reward_function.path=FILE, or leave scores out with --no-scores"
            ) from None

    async def of(
        self, record: Mapping[str, Any], outputs: Sequence[CertifiedOutput], verdicts: Mapping[str, Any]
    ) -> float:
        """Return the whole reward of a conversation, as `ConversationLine.score` has it.

        Args:
            record: Its record, from which the reward function gets the data set's columns.
            outputs: Its replayed rows.
            verdicts: Those of its reward's criteria, as `ConversationLine.verdicts` has them; {}: none are recorded.

        Raises:
            UnrepeatableError: The reward is another program's verdict, or cannot be scored now.
            ConfigError: The reward function raised, or returned something that is not a reward.
        """
        if outputs[-1].reward_score is None:
            await self._score(record["sample"], outputs, verdicts)
        return outputs[-1].total()

    async def _score(
        self, sample: Mapping[str, Any], outputs: Sequence[CertifiedOutput], verdicts: Mapping[str, Any]
    ) -> None:
        source = sample["data_source"]
        if not self._why and self._own and (name := reward_of(self._config, source)) in _ASKING:
            if not verdicts:
                raise UnrepeatableError(f"the reward {name!r} asks a model, and no verdict of it is recorded")
            outputs[-1].extra_fields[GIVEN] = GivenVerdicts(verdicts)
        if self._why:
            raise UnrepeatableError(self._why)
        try:
            await self._local.score(_columns(sample), outputs)
        except ConfigError:
            raise
        except (UnjudgedError, OutageError) as error:
            raise UnrepeatableError(f"it cannot be judged here: {describe(error)}") from None
        except Exception as error:  # an author's code
            raise ConfigError(f"the reward function raised {describe(error)}") from error
        if GIVEN in outputs[-1].extra_fields and outputs[-1].extra_fields["reward_extra_info"].get(UNJUDGEABLE):
            raise UnrepeatableError("the recorded verdicts are of other criteria")


def _columns(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data set's columns for a conversation, under verl's names."""
    return {
        "data_source": sample["data_source"],
        "reward_model": {"ground_truth": sample["ground_truth"]},
        "extra_info": sample["extra_info"] or {},
        "raw_prompt": sample["messages"],
        "index": sample["index"],
    }

"""The rollout's metrics in the trainer's own loggers.

The keys begin with `rollout/` in training and with `val/rollout/` in validation. Rows of other agent loops than ours,
and verl's padding rows, are excluded.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from verl_multiturn.observe.metrics import Stats, aggregate, conversations
from verl_multiturn.observe.pass_at_k import passed_shares
from verl_multiturn.rows.reward_numbers import ScoreRange
from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows
from verl_multiturn.verl_bridge.workers.news import RunNews

logger = logging.getLogger(__name__)

PREFIX = "rollout/"
VALIDATION_PREFIX = "val/rollout/"
ASYNC_PREFIX = "rollout/async/"
"""Beginning of the metrics about the ages of tokens, and about samples that were cut."""
FILTER_PREFIX = "rollout/filter/"
"""Beginning of the metrics about groups without signal (`custom.multiturn.filter`)."""


@contextmanager
def observe_samples(
    replay_buffer: Any, stats: list[Stats], look: Callable[[BatchRows], None] = lambda rows: None
) -> Iterator[None]:
    """Add the stats of each batch that verl takes out of its replay buffer to `stats`, while the context lasts.

    verl's validation removes each batch from TransferQueue before it returns. So the batches are looked at when they
    are taken:

        _validate()  →  replay_buffer.sample(…)  →  batch, stats += those of its conversations  →  _validate() goes on

    Args:
        replay_buffer: verl's replay buffer, whose method `sample` is replaced for the time.
        stats: The list that is added to.
        look: Is called with the rows of each batch, before.
    """
    sample = replay_buffer.sample

    def observed(*args: Any, **kwargs: Any) -> Any:
        sampled = sample(*args, **kwargs)
        rows = BatchRows(sampled[0])
        look(rows)
        stats.extend(conversations(rows.stats))
        return sampled

    replay_buffer.sample = observed
    try:
        yield
    finally:
        replay_buffer.sample = sample


def prefixed(prefix: str, stats: list[Stats]) -> dict[str, float]:
    """Return the metrics of conversations, their names beginning with `prefix`."""
    metrics = aggregate(stats)
    if metrics.get("interaction/openings_differ"):
        _warn_of_openings()
    return {prefix + key: value for key, value in metrics.items()}


def validated(stats: list[Stats], scores: ScoreRange) -> dict[str, float]:
    """Return the metrics of a validation's conversations: those of `prefixed`, and pass@k.

    Args:
        stats: The conversations.
        scores: The range of the rewards of the run's validations so far; those of this one are added.
    """
    passed = {VALIDATION_PREFIX + key: value for key, value in passed_shares(stats, scores).items()}
    return prefixed(VALIDATION_PREFIX, stats) | passed


@functools.cache
def _warn_of_openings() -> None:
    logger.warning(
        "conversations of one group begin with different messages of their interaction, so that their advantages "
        "compare different tasks; begin from what the row says, for example its seed (said once; counted in "
        "rollout/interaction/openings_differ)"
    )


def cut_metrics(news: RunNews) -> dict[str, float]:
    """Return how many samples over-sampling has cut since the step before, and the seconds that they took."""
    return {f"{ASYNC_PREFIX}cut_samples": news.cut, f"{ASYNC_PREFIX}cut_seconds": news.cut_s}

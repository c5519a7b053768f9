"""The trainer mixin that reports the rollout's metrics to the trainer's own loggers.

The keys begin with `rollout/` in training and with `val/rollout/` in validation. Rows of other agent loops than ours,
and verl's padding rows, are left out.
"""

from __future__ import annotations

from typing import Any

import transfer_queue

from verl_multiturn.observe.metrics import Stats, aggregate
from verl_multiturn.verl_bridge.agent_loop import STATS

PREFIX = "rollout/"
VALIDATION_PREFIX = "val/rollout/"


class MetricsMixin:
    """Mixin for a trainer class of verl that adds the rollout's metrics; list it before verl's class."""

    replay_buffer: Any

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        """Run verl's step, and add the metrics of its batch, which holds the rows of all the step's updates."""
        batch = super().step(metrics, timing_raw)  # type: ignore[misc]
        metrics.update(_prefixed(PREFIX, list(fetch_stats(batch).values())))
        return batch

    def _validate(self) -> dict[str, Any]:
        """Run verl's validation, and add the metrics of its batches.

        verl removes each batch from TransferQueue before it returns. So the batches are looked at when verl takes them
        out of its replay buffer.
        """
        stats: list[Stats] = []
        sample = self.replay_buffer.sample

        def observed(*args: Any, **kwargs: Any) -> Any:
            sampled = sample(*args, **kwargs)
            stats.extend(fetch_stats(sampled[0]).values())
            return sampled

        self.replay_buffer.sample = observed
        try:
            metrics: dict[str, Any] = super()._validate()  # type: ignore[misc]
        finally:
            self.replay_buffer.sample = sample
        return metrics | _prefixed(VALIDATION_PREFIX, stats)


def fetch_stats(batch: Any) -> dict[str, Stats]:
    """Return the stats that our agent loop left with the rows of a batch, by row key.

    Padding rows and rows of other agent loops have no entry.
    """
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    found = _fetch_metrics(keys, batch.partition_id) if keys else []
    if found is None:  # TransferQueue leaves the column out when one row lacks it, as rows of no agent loop may.
        found = [(_fetch_metrics([key], batch.partition_id) or [{}])[0] for key in keys]
    return {key: metrics[STATS] for key, metrics in zip(keys, found, strict=True) if STATS in metrics}


def _fetch_metrics(keys: list[str], partition_id: str) -> list[dict[str, Any]] | None:
    data = transfer_queue.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["metrics"])
    column = data.get("metrics", None)
    return None if column is None else list(column.tolist())


def _prefixed(prefix: str, stats: list[Stats]) -> dict[str, float]:
    return {prefix + key: value for key, value in aggregate(stats).items()}

"""`BatchRows`: the rows of a batch of verl's trainers, as all our hooks of a step get them.

verl names a row by a text and marks its padding in the row's tag. The names are taken apart here, and the marks are
read here, once. Our agent loop's stats of the rows are fetched when a hook first needs them, in each batch while verl
computes the old log-probs.

Most stages of verl return a new batch object with the same keys, and the batch of a whole step joins those of its
updates. So `StepRows` gives the `BatchRows` that it has as long as keys and tags are the same, and the statistics of a
row are fetched once in a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from verl_multiturn.observe.metrics import Stats
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.compat.row_store import Batch, fetch_stats, put_zeros


class BatchRows:
    """The rows of a batch, in its order. The batch itself is not kept, since verl reorders and replaces it.

    Args:
        batch: verl's batch: `keys`, `tags` and `partition_id`.
        fetched: Statistics that are known already, by key, with None for a row that has none; those of this batch are
            added.
    """

    def __init__(self, batch: Batch, fetched: dict[RowKey, Stats | None] | None = None) -> None:
        self.partition_id: str = batch.partition_id
        self.keys = [RowKey.parse(name) for name in batch.keys]
        tags: list[dict[str, Any]] = list(batch.tags)
        self.tags = dict(zip(self.keys, tags, strict=True))
        """verl's tag of each row."""
        self.padding = dict.fromkeys(key for key, tag in self.tags.items() if tag.get("is_padding", False))
        """Rows that verl added to fill the batch; a dictionary, for their order."""
        self.real = [key for key in self.keys if key not in self.padding]
        """The other rows, in the batch's order."""
        self._fetched = {} if fetched is None else fetched
        self._made_of = list(batch.keys), tags

    def are_of(self, batch: Batch) -> bool:
        """Return whether a batch has these rows, in this order and with these tags."""
        return self._made_of == (batch.keys, batch.tags)

    @cached_property
    def stats(self) -> dict[RowKey, Stats]:
        """The stats of our agent loop for each row. Padding, and rows of other agent loops, have no entry.

        A row of an invalid conversation is invalid, too, whatever its own stats are. `left_out` is the cause of a
        conversation that `leave_out` was called for.
        """
        missing = [key for key in self.real if key not in self._fetched]
        if missing:
            self._fetched.update(fetch_stats(missing, self.partition_id))
        stats = {key: own for key in self.real if (own := self._fetched[key]) is not None}
        broken = {key.conversation for key, own in stats.items() if not own["valid"]}
        return {key: {**own, "valid": key.conversation not in broken} for key, own in stats.items()}

    @property
    def left_out(self) -> dict[str, str]:
        """The cause of each conversation that `leave_out` was called for, by its name."""
        known = [(key, self._fetched.get(key) or {}) for key in self.real]
        return {key.conversation: stats["left_out"] for key, stats in known if "left_out" in stats}

    def leave_out(self, causes: Mapping[str, str]) -> list[RowKey]:
        """Make conversations invalid for the rest of the step, and return the keys of their rows.

        Args:
            causes: The cause of each of them, by the conversation's name.
        """
        keys = [key for key in self.stats if key.conversation in causes]
        for key in keys:
            self._fetched[key] = {**self.stats[key], "valid": False, "left_out": causes[key.conversation]}
        if keys:
            del self.stats
        return keys

    def mask_void(self) -> None:
        """Keep the rows with void turns out of the loss (`custom.multiturn.void_turn_pattern`).

        Their masks are 0 throughout then (columns `response_mask` and `loss_mask`). Nothing else of them changes, and
        no other row changes.
        """
        if void := [key for key, stats in self.stats.items() if stats.get("void")]:
            put_zeros(void, self.partition_id, ["response_mask", "loss_mask"])

    @cached_property
    def groups(self) -> dict[str, dict[str, list[RowKey]]]:
        """The rows without padding: uid → name of the conversation → keys."""
        groups: dict[str, dict[str, list[RowKey]]] = {}
        for key in self.real:
            groups.setdefault(key.uid, {}).setdefault(key.conversation, []).append(key)
        return groups


class StepRows:
    """The `BatchRows` of a step."""

    def __init__(self) -> None:
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the step before."""
        self._fetched: dict[RowKey, Stats | None] = {}
        self._last: BatchRows | None = None

    def of(self, batch: Batch) -> BatchRows:
        """Return the rows of a batch of the step, made anew only where they differ from those of the last call."""
        if self._last is None or not self._last.are_of(batch):
            self._last = BatchRows(batch, self._fetched)
        return self._last

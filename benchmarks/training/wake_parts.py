"""Where the time goes from the end of a batch's last conversation until its last row is stored, from a run's records.

    last conversation ends ──reward──▶ its last reward is there ──rows──▶ the last row is stored ──told──▶ the trainer

In `sync` the conversations of a step are its batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np


class RowEnd(NamedTuple):
    """When a conversation ended, when its reward was there, and when its rows were stored (`time.time`)."""

    conversation: float
    reward: float
    rows: float


class Parts(NamedTuple):
    """The parts of one step's wait, in milliseconds, and how crowded its end was."""

    reward: float
    rows: float
    together: int
    """Conversations that ended while another's reward or row of the wait was still to come."""
    reward_each: float
    """Median wait of one of these for its reward."""
    rows_each: float
    """Median wait of one of these until its rows were stored."""


def ends_of(records: Iterable[Mapping[str, Any]]) -> dict[int, list[RowEnd]]:
    """Return the ends of a run's training conversations, by the step in which they began."""
    found: dict[int, list[RowEnd]] = defaultdict(list)
    for record in records:
        spans = {span["kind"]: span for span in record["timeline"] if span["kind"] in ("reward", "store")}
        if not record["validation"] and len(spans) == 2:
            reward, store = spans["reward"], spans["store"]
            found[record["step"]].append(RowEnd(reward["start"], reward["end"], store["end"]))
    return dict(found)


def parts_of(ends: Iterable[RowEnd]) -> Parts:
    """Return the parts of a step's wait.

    Args:
        ends: The ends of its conversations.
    """
    times = np.array(list(ends), float)
    last, rewarded, stored = times.max(axis=0)
    late = times[times[:, 2] > last]
    reward, rows = np.median(late[:, 1] - late[:, 0]), np.median(late[:, 2] - late[:, 1])
    first, second, each_reward, each_rows = (
        round(1000 * float(seconds), 1) for seconds in (rewarded - last, stored - rewarded, reward, rows)
    )
    return Parts(first, second, len(late), each_reward, each_rows)

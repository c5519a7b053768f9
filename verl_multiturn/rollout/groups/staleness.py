"""The largest age of a trained token: the decisions, apart from the trainer that carries them out.

Words:
- step s samples and trains a batch. The engine then has the weights of version s - 1; before the first step, version 0;
- the age of a token of version v that step s trains is (s - 1) - v. The bound (`custom.multiturn.max_staleness`) is the
  largest age that a trained token may have;
- a group's deadline is the last step that may train it without a token beyond the bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Strategy = Literal["drop", "wait", "mask", "reroll"]

MOST_REROLLS = 3
"""Most restarts of one prompt. After that its group runs to the end, and its old tokens are not trained."""


@dataclass(frozen=True)
class StalenessBound:
    """The bound of the ages, and the fate of a group that would exceed it."""

    max_staleness: int
    strategy: Strategy

    def deadline(self, dispatched: int, oldest: int | None = None) -> int:
        """Return the last step that may train a group whole.

        Args:
            dispatched: Step in which the group was given to the engine. Its tokens have at least the version before.
            oldest: Version of the group's oldest token, once that is known.
        """
        return (dispatched - 1 if oldest is None else oldest) + 1 + self.max_staleness

    def oldest_trained(self, step: int) -> int:
        """Return the oldest version that a step may train; a token without a known version is never trained."""
        return max(0, step - 1 - self.max_staleness)


def earliest(deadlines: Mapping[str, int], count: int) -> list[str]:
    """Return the names of the groups to train next: those with the earliest deadlines.

    Args:
        deadlines: Deadline of each finished group, by its name; equal ones keep their order.
        count: Number of groups to return.
    """
    return sorted(deadlines, key=lambda uid: deadlines[uid])[:count]


def may_take(
    finished: Sequence[int], unfinished: Sequence[int], count: int, step: int, left: int, batch_size: int
) -> bool:
    """Return whether a step can take its next groups now, and every group that stays can still meet its deadline.

    The groups that stay meet their deadlines exactly when, for every step t, those that are due by t are not more than
    the steps until t take. Example with 2 groups in a batch, 2 finished groups due in step 9 and 3 unfinished ones due
    in step 8: step 7 may not take the finished ones, since step 8 could take only 2 of the 3.

    When waiting cannot help, the answer is True, so that no trainer waits in vain.

    Args:
        finished: Deadlines of the finished groups, at least `count` of them.
        unfinished: Deadlines of the groups that are still running or not yet begun.
        count: Number of groups to take.
        step: The step that takes them.
        left: Number of groups that this step takes afterwards.
        batch_size: Number of groups that every later step takes.
    """
    in_order = sorted(finished)
    taken, stay = in_order[:count], in_order[count:]
    if not unfinished or min(unfinished) >= taken[-1]:
        return True  # the same deadlines would be taken if all groups had finished
    due = 0
    for deadline, groups in sorted(Counter([*stay, *unfinished]).items()):
        due += groups
        if due > left + max(0, deadline - step) * batch_size:
            return False
    return True


def to_reroll(prompts: Mapping[str, Mapping[str, Any]], step: int, bound: StalenessBound) -> list[str]:
    """Return the names of the unfinished groups that are begun anew: their deadline has passed.

    Args:
        prompts: Tags of the prompts in TransferQueue, by the prompt's name. `global_steps` is the step in which the
            group was dispatched, `rerolls` how often it was begun anew.
        step: The step that begins.
        bound: The bound of the ages.
    """
    return [
        uid
        for uid, tag in prompts.items()
        if tag["status"] in ("pending", "running")
        and bound.deadline(tag["global_steps"]) < step
        and tag.get("rerolls", 0) < MOST_REROLLS
    ]


def too_old(versions: NDArray[Any], step: int, bound: StalenessBound) -> NDArray[np.bool_]:
    """Return for each token whether a step must not train it, by its age; a version of -1 is not known.

    Args:
        versions: Versions of tokens, `(T,)`.
        step: The step that trains.
        bound: The bound of the ages.
    """
    found: NDArray[np.bool_] = versions < bound.oldest_trained(step)
    return found

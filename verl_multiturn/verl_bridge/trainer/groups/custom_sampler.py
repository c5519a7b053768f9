"""`CustomSampler`: stand-in for a replay buffer of the user's own class, which our hooks cannot ask about groups.

verl takes one from `trainer.v1.sampler.custom_sampler`. It chooses and filters the groups itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_multiturn.verl_bridge.trainer.groups.group_filter import GroupFilter, LeftOut
from verl_multiturn.verl_bridge.trainer.groups.replay_buffer import BufferHooks, Waiter


class CustomSampler:
    """Answers our hooks in the place of `BufferHooks`: without a filter, and without counts.

    Args:
        sampler: The user's sampler.
    """

    def __init__(self, sampler: Any) -> None:
        self.filter = GroupFilter()
        self._sampler = sampler

    def follow(self, waiter: Waiter, look_after: Callable[[], None], left_out: LeftOut) -> None:
        """Look for dead workers and servers while the sampler waits; see `look_after_sampler`."""
        look_after_sampler(self._sampler, partial(waiter.wait, 0.0), look_after)

    def begin_step(self) -> None:
        """Do nothing: nothing is counted."""

    def metrics(self) -> dict[str, float]:
        """Return no metric."""
        return {}

    def take_evicted(self) -> list[str]:
        """Return no group: those that leave are unknown."""
        return []

    def take_left(self) -> dict[str, list[str]]:
        """Return no group: those that leave are unknown."""
        return {}


Sampler = BufferHooks | CustomSampler
"""The object that the hooks of a trainer ask about groups."""


def look_after_sampler(sampler: Any, *looks: Callable[[], None]) -> None:
    """Let a sampler of the user's call `looks`, in order, each time that it lists TransferQueue in `sample`.

    It waits in its own way, so that nothing else would find workers and servers that die meanwhile. A sampler that
    is not a `ReplayBuffer` of verl's is not changed.
    """
    if not isinstance(sampler, ReplayBuffer):
        return
    sample, listing = sampler.sample, sampler._sync_metadata_from_transfer_queue

    def looking() -> None:
        for look in looks:
            look()
        listing()

    def sample_looking(*args: Any, **kwargs: Any) -> Any:
        sampler._sync_metadata_from_transfer_queue = looking
        try:
            return sample(*args, **kwargs)
        finally:
            sampler._sync_metadata_from_transfer_queue = listing

    sampler.sample = sample_looking

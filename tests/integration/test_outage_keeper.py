"""The breakers of a run in its actor: two worker processes, and the death of the actor."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [
    pytest.mark.stack,
    pytest.mark.deaths,
    pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning"),
]


class Worker:
    """A worker whose calls ask a service, as a session's do."""

    def __init__(self) -> None:
        from verl_multiturn.calls.limits import OutageLimits
        from verl_multiturn.calls.outages.process import Outages
        from verl_multiturn.verl_bridge.run_keeper import RayKeeper

        self.watch: Any = Outages(connect=RayKeeper).of("tool search", OutageLimits(), 100)
        self.is_up = True

    async def set(self, is_up: bool) -> None:
        self.is_up = is_up

    async def call(self, conversation: str) -> str:
        from verl_multiturn.calls.outages.guarded_call import GuardedCall

        await self.watch.admit()
        watched = GuardedCall(self.watch, conversation, role="repeatable")
        while True:
            try:
                async with watched:
                    await watched.wait()
                    if not self.is_up:
                        raise ConnectionRefusedError("down")
                    return "fine"
            except ConnectionRefusedError:
                if not watched.again:
                    return "ends" if watched.ends else "told"

    async def until_open(self) -> None:
        while not self.watch.is_open:  # noqa: ASYNC110  # there is no event
            await asyncio.sleep(0.01)


async def test_workers_wait_together_and_a_new_keeper_knows_what_the_old_one_did(cluster: None) -> None:
    import ray

    remote = ray.remote(num_cpus=0, max_concurrency=100)(Worker)
    one, two = remote.remote(), remote.remote()
    assert ray.get([one.call.remote("a"), two.call.remote("b")]) == ["fine", "fine"]
    ray.get([one.set.remote(False), two.set.remote(False)])
    said = ["told"]
    while said[-1] == "told":
        said.append(ray.get(one.call.remote(f"first {len(said) - 1}")))
    assert said[-1] == "ends"
    assert 6 <= len(said) - 1 <= 8  # the two answers may have been reported before, or not
    ray.get(two.until_open.remote())  # it made no call

    waiting = [worker.call.remote(f"w{each}") for each in range(5) for worker in (one, two)]
    keeper = ray.get_actor("verl_multiturn_slots")
    state = ray.get(keeper.outages.remote())["tool search"]
    assert (state.is_open, state.trips, state.error) == (True, 1, "ConnectionRefusedError: down")
    assert ray.get(keeper.touched.remote(["a", "b", "first 0", "first 5"])) == {"first 0", "first 5"}

    process = ray.get(keeper.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(process, signal.SIGKILL)

    held = []

    def known() -> Any:
        from verl_multiturn.verl_bridge.run_keeper import run_keeper

        new = run_keeper()
        held.append(new)  # a keeper that this process has made ends with the last of our references
        return ray.get(new.outages.remote()), ray.get(new.touched.remote(["a", "first 0", "first 5"]))

    while True:
        try:
            outages, touched = known()
        except (ray.exceptions.RayError, ValueError):
            outages, touched = {}, set()
        if outages and outages["tool search"].waiting == 10:
            break
        await asyncio.sleep(0.05)
    assert outages["tool search"].is_open
    assert touched == {"first 0", "first 5"}
    assert ray.wait(waiting, num_returns=10, timeout=0)[0] == []
    ray.get([one.set.remote(True), two.set.remote(True)])
    assert ray.get(waiting) == ["fine"] * 10

"""Workers of a real Ray together: `concurrency_total`, the rules of its keeper, and the end of their tools."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.warm_python import start_ray, stop_ray
from verl_multiturn.calls.shared_slots import SlotKeeper

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


async def test_limits_expiry_and_leaving_the_queue() -> None:
    keeper = SlotKeeper()
    assert await keeper.acquire("t", 2, "a", 0, 60)
    assert await keeper.acquire("t", 2, "b", 0, 60)
    assert not await keeper.acquire("t", 2, "c", 0.01, 60)
    assert await keeper.acquire("other", 1, "d", 0, 60)

    waits = asyncio.create_task(keeper.acquire("t", 2, "e", 60, 60))
    leaves = asyncio.create_task(keeper.acquire("t", 2, "f", 60, 60))
    await asyncio.sleep(0.01)
    await keeper.release("t", "f")
    assert not await leaves
    await keeper.release("t", "a")
    assert await waits
    assert not await keeper.acquire("t", 2, "g", 0, 60)

    assert await keeper.acquire("x", 1, "dies", 0, 0.02)
    assert await keeper.acquire("x", 1, "next", 60, 60)  # the lease has expired by then


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:

    # verl reserves all CPUs, so none remains for the keeper of slots.
    start_ray(num_cpus=0)
    yield
    stop_ray()


async def test_two_worker_processes_share_slots(cluster: None) -> None:
    import ray

    class Holders:
        """Counts the calls of all workers that hold a slot."""

        def __init__(self) -> None:
            self.now = self.most = 0
            self.are_three = asyncio.Event()

        async def enter(self) -> None:
            """Wait until three calls hold a slot at once, which happens since sixteen want one."""
            self.now += 1
            self.most = max(self.most, self.now)
            if self.most >= 3:
                self.are_three.set()
            await self.are_three.wait()

        async def leave(self) -> None:
            self.now -= 1

        async def at_once(self) -> int:
            return self.most

    class Worker:
        """A worker that takes slots as an agent loop worker does."""

        def __init__(self, holders: Any) -> None:
            from verl_multiturn.verl_bridge.run_keeper import RaySlots

            self.slots, self.holders = RaySlots(), holders

        async def call(self, wait_s: float = 10_000) -> bool:
            lease = await self.slots.acquire("t", 3, wait_s, 10_000)
            if lease is None:
                return False
            await self.holders.enter.remote()
            await self.holders.leave.remote()
            await self.slots.release("t", lease)
            return True

        async def cancelled(self) -> None:
            held = [await self.slots.acquire("t", 3, 10_000, 10_000) for _ in range(3)]
            waits = asyncio.ensure_future(self.slots.acquire("t", 3, 10_000, 10_000))
            await asyncio.sleep(0.1)
            waits.cancel()
            for lease in held:
                await self.slots.release("t", lease or "")

        async def are_all_free(self) -> bool:
            held = [await self.slots.acquire("t", 3, 0, 10_000) for _ in range(3)]
            for lease in filter(None, held):
                await self.slots.release("t", lease)
            return None not in held

    holders = ray.remote(num_cpus=0, max_concurrency=50)(Holders).remote()
    workers = [ray.remote(num_cpus=0, max_concurrency=50)(Worker).remote(holders) for _ in range(2)]
    assert all(ray.get([worker.call.remote() for _ in range(8) for worker in workers]))
    assert ray.get(holders.at_once.remote()) == 3
    assert ray.get(workers[1].are_all_free.remote())
    ray.get(workers[0].cancelled.remote())
    while not ray.get(workers[1].are_all_free.remote()):
        pass  # no call waits for the slot that the cancelled one gives back

    ray.kill(ray.get_actor("verl_multiturn_slots"))
    is_made_anew = False  # the loss of the keeper is noticed, and another keeper is made
    while not is_made_anew:
        with contextlib.suppress(ray.exceptions.RayError):
            is_made_anew = await workers[0].call.remote()


def test_the_tools_of_workers_are_closed_at_the_end(cluster: None, tmp_path: Path) -> None:
    import ray

    from verl_multiturn.verl_bridge.trainer.groups.custom_sampler import CustomSampler
    from verl_multiturn.verl_bridge.trainer.hooks import MultiTurnHooks

    class Worker:
        """A worker that uses tools on its loop, as an agent loop worker does."""

        async def use(self, name: str, folder: Path) -> None:
            from verl_multiturn.verl_bridge.closing import close_at_end

            class Tool:
                def __init__(self, how: str) -> None:
                    self.how = self.name = how
                    self.loop = asyncio.get_running_loop()

                async def aclose(self) -> None:
                    await asyncio.sleep(0.01)
                    assert asyncio.get_running_loop() is self.loop
                    (folder / f"{name} {self.how}").touch()
                    if self.how == "raises":
                        raise RuntimeError("boom")

            close_at_end([*(Tool(how) for how in ("closes", "raises")), object()])

    remote = ray.remote(num_cpus=0)(Worker)
    asked, dropped = remote.remote(), remote.remote()
    ray.get([asked.use.remote("asked", tmp_path), dropped.use.remote("dropped", tmp_path)])

    class Trainer:
        def fit(self, agent_loop_manager: Any) -> None:
            raise KeyError("training failed")

    class Ours(MultiTurnHooks, Trainer):
        def __init__(self) -> None:
            self._sampler, self._outages = CustomSampler(None), SimpleNamespace(causes=None)

    with pytest.raises(KeyError, match="training failed"):
        Ours().fit(SimpleNamespace(agent_loop_workers=[asked]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["asked closes", "asked raises"]
    del dropped  # Ray ends the worker, and its atexit functions run
    while len(list(tmp_path.iterdir())) < 4:
        time.sleep(0.02)
    ray.kill(asked)
    with pytest.raises(KeyError):
        Ours().fit(SimpleNamespace(agent_loop_workers=[asked]))  # a dead worker hides no failure

"""One call at a breaker: its waits, and its slot, where an outage begins or ends meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.calls.test_outages import Service, break_it, call, process
from verl_multiturn.calls.invocation import BusyError
from verl_multiturn.calls.outages.guarded_call import GuardedCall


class Queue:
    """A queue for slots, in which an outage begins while the first call waits."""

    def __init__(self, is_busy: bool) -> None:
        self.service, self.watch = Service(), process()
        self.is_busy = is_busy
        self.seen: list[str] = []

    async def take(self) -> None:
        self.seen.append("take")
        if not self.watch.epoch:
            await break_it(self.watch, self.service)
            self.service.is_up = True
            if self.is_busy:
                raise BusyError("no slot")

    def give_back(self) -> None:
        self.seen.append("give back")


async def test_a_slot_is_given_back_where_an_outage_began_during_the_wait_for_it() -> None:
    queue = Queue(is_busy=False)
    guarded = GuardedCall(queue.watch, "a")
    await guarded.take(queue.take, queue.give_back)
    assert queue.seen == ["take", "give back", "take"]
    assert guarded.is_probe
    guarded.answered()


async def test_a_call_without_a_slot_waits_for_the_end_of_an_outage_that_began_meanwhile() -> None:
    queue = Queue(is_busy=True)
    guarded = GuardedCall(queue.watch, "a")
    await guarded.take(queue.take, queue.give_back)
    assert queue.seen == ["take", "take"]
    guarded.answered()


async def test_a_call_without_a_slot_is_refused_where_there_is_no_outage() -> None:
    async def take() -> None:
        raise BusyError("no slot")

    with pytest.raises(BusyError):
        await GuardedCall(process(), "a").take(take, lambda: None)


async def test_what_gives_a_reward_waits_for_no_outage_and_is_no_probe() -> None:
    service, watch = Service(), process()
    await break_it(watch, service)
    guarded = GuardedCall(watch, "a", "score")
    async with asyncio.timeout(0.5):
        async with guarded:
            assert not await guarded.wait()
    assert watch.is_open
    service.is_up = True
    assert [await call(watch, each, service.answer) for each in "ab"] == ["fine"] * 2
    await asyncio.sleep(0.01)
    assert watch.is_open, "the reward was no good probe"

"""Calls that run when their service goes down: those of a `repeatable` tool are held, wait, and are made again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from tests.conftest import CharTokenizer
from tests.idle_loop import skip_waits
from tests.scripted import CALL
from tests.unit.calls.test_outages import Service, call, process
from tests.unit.rollout.test_outage_ends import Remote, Run
from verl_multiturn import StopReason
from verl_multiturn.calls.outages.breaker import WINDOW_S
from verl_multiturn.calls.outages.guarded_call import GuardedCall
from verl_multiturn.calls.outages.process import HOLD_S, REPORT_S, Watch
from verl_multiturn.calls.outages.store import OutageStore
from verl_multiturn.tools.running.results import CallStatus


class Slow(Service):
    """A service whose calls end after some time, by its state then."""

    def __init__(self, least_s: float, most_s: float) -> None:
        super().__init__()
        self._chance = random.Random(0)
        self._span = least_s, most_s

    async def answer(self, conversation: str) -> str:
        await asyncio.sleep(self._chance.uniform(*self._span))
        return await super().answer(conversation)


async def begin(watches: list[Watch], service: Slow, count: int, repeat: bool = True) -> list[asyncio.Task[str]]:
    """Begin a call of each of so many conversations, in all processes alike, and take the service down beneath them."""
    calls = [
        asyncio.create_task(call(watches[each % len(watches)], f"c{each}", service.answer, repeat))
        for each in range(count)
    ]
    await asyncio.sleep(0)
    service.is_up = False
    return calls


@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize("down_s", [1.0, 60.0])
async def test_every_call_of_a_burst_that_fails_is_made_again(processes: int, down_s: float) -> None:
    keeper, service = OutageStore(), Slow(0.01, 0.5)
    watches = [process(keeper) for _ in range(processes)]
    calls = await begin(watches, service, 128)
    await asyncio.sleep(0.5 + down_s)
    assert not any(each.done() for each in calls)
    assert (await keeper.outages())["tool search"].trips == 1
    service.is_up = True
    assert await asyncio.gather(*calls) == ["fine"] * 128
    assert await keeper.touched([f"c{each}" for each in range(128)]) == set(), "none has seen a failure"


async def test_answers_of_calls_that_began_before_a_failure_say_nothing_of_it() -> None:
    keeper, service = OutageStore(), Slow(0.01, 0.5)
    watch = process(keeper)

    async def early(_: str) -> str:
        await asyncio.sleep(0.3)
        return "fine"

    earlier = [asyncio.create_task(call(watch, f"e{each}", early)) for each in range(20)]
    calls = await begin([watch], service, 64)
    await asyncio.sleep(30)
    assert [each.result() for each in earlier] == ["fine"] * 20
    assert not any(each.done() for each in calls)
    service.is_up = True
    assert await asyncio.gather(*calls) == ["fine"] * 64


async def test_calls_that_fail_after_all_go_on_again_are_made_again() -> None:
    keeper, service = OutageStore(), Slow(0.01, 0.5)
    watch = process(keeper)
    release = asyncio.Event()

    async def hangs(conversation: str) -> str:
        if not release.is_set():
            await release.wait()
            raise ConnectionResetError("at last")
        return "fine"

    hanging = [asyncio.create_task(call(watch, f"h{each}", hangs, repeat=True)) for each in range(4)]
    calls = await begin([watch], service, 64)
    await asyncio.sleep(20)
    service.is_up = True
    assert await asyncio.gather(*calls) == ["fine"] * 64
    assert not watch.is_open
    release.set()
    assert await asyncio.gather(*hanging) == ["fine"] * 4
    assert await keeper.touched([f"h{each}" for each in range(4)]) == set()


async def test_a_burst_of_calls_that_may_not_be_repeated_is_as_it_was() -> None:
    keeper, service = OutageStore(), Slow(0.01, 0.5)
    watch = process(keeper)
    calls = await begin([watch], service, 64, repeat=False)
    said = Counter(await asyncio.gather(*calls))
    assert asyncio.get_running_loop().time() <= 0.6
    assert set(said) == {"told: down", "ends"}
    assert set(service.got.values()) == {1}, "none is made twice"
    names = {f"c{each}" for each in range(64)}
    assert await keeper.touched(sorted(names)) == names


async def test_one_failure_among_healthy_calls_is_told_when_a_later_call_is_answered() -> None:
    service, watch = Slow(0.1, 0.2), process()
    loop = asyncio.get_running_loop()
    failed_at = 0.0

    async def fails(_: str) -> str:
        nonlocal failed_at
        failed_at = loop.time()
        raise ConnectionRefusedError("once")

    async def conversation(number: int) -> None:
        for _ in range(20):
            assert await call(watch, f"c{number}", service.answer, repeat=True) == "fine"

    others = [asyncio.create_task(conversation(each)) for each in range(8)]
    await asyncio.sleep(0.55)
    assert await call(watch, "a", fails, repeat=True) == "told: once"
    assert loop.time() - failed_at <= 0.4, "a call that begins within 0.2 s is answered within 0.2 s"
    await asyncio.gather(*others)
    await asyncio.sleep(2 * REPORT_S)
    keeper = await watch.outages.ask(_itself)
    assert await keeper.touched(["a"]) == set()
    assert (await keeper.outages())["tool search"].trips == 0


async def test_a_healthy_service_of_which_single_calls_fail_delays_them_by_a_fraction_of_a_second() -> None:
    service, watch, chance = Slow(0.1, 0.5), process(), random.Random(1)
    loop, delays = asyncio.get_running_loop(), list[float]()

    async def conversation(number: int) -> None:
        failed_at = 0.0

        async def answer(name: str) -> str:
            nonlocal failed_at
            said = await service.answer(name)
            if chance.random() < 0.1:
                failed_at = loop.time()
                raise ConnectionRefusedError("busy")
            return said

        for _ in range(10):
            if await call(watch, f"c{number}", answer, repeat=True) != "fine":
                delays.append(loop.time() - failed_at)
            await asyncio.sleep(chance.uniform(0, 2))

    await asyncio.gather(*(conversation(each) for each in range(64)))
    assert len(delays) > 30
    assert sum(service.got.values()) == 640, "no call is made again"
    assert sum(delays) / len(delays) < 0.5, "about as long as a call lasts"
    assert sum(delay > 1 for delay in delays) <= 2, "after the last calls nobody calls"


async def test_a_failure_beside_which_nobody_calls_is_told_after_a_fixed_time_and_the_next_one_at_once() -> None:
    service, watch = Service(), process()
    loop = asyncio.get_running_loop()
    service.is_up = False
    assert await call(watch, "a", service.answer, repeat=True) == "told: down"
    assert loop.time() == pytest.approx(HOLD_S, abs=0.01)
    assert await call(watch, "b", service.answer, repeat=True) == "told: down"
    assert loop.time() == pytest.approx(HOLD_S, abs=0.01)
    service.is_up = True
    assert await call(watch, "c", service.answer, repeat=True) == "fine"
    service.is_up = False
    assert await call(watch, "d", service.answer, repeat=True) == "told: down"
    assert loop.time() == pytest.approx(2 * HOLD_S, abs=0.01)
    keeper = await watch.outages.ask(_itself)
    assert (await keeper.outages())["tool search"].outages == 3


async def test_a_failure_that_was_told_is_judged_if_the_breaker_opens_on_it() -> None:
    service, watch = Service(), process()
    service.is_up = False
    assert [await call(watch, f"c{each}", service.answer, repeat=True) for each in range(7)] == ["told: down"] * 7
    keeper = await watch.outages.ask(_itself)
    last = asyncio.create_task(call(watch, "last", service.answer, repeat=False))
    assert await last == "ends"
    names = {"last", *(f"c{each}" for each in range(7))}
    assert await keeper.touched(sorted(names)) == names


async def test_a_call_by_which_its_service_ends_is_made_again_once() -> None:
    service, watch = Slow(0.01, 0.1), process()
    loop, ended = asyncio.get_running_loop(), Counter[str]()

    async def answer(name: str) -> str:
        if name == "poison" and service.is_up:
            ended[name] += 1
            service.is_up = False
            loop.call_later(20, lambda: setattr(service, "is_up", True))
        return await service.answer(name)

    async def conversation(number: int) -> list[str]:
        said = []
        while not bad.done():
            said.append(await call(watch, f"c{number}", answer, repeat=True))
            await asyncio.sleep(0.1)
        return said

    bad = asyncio.create_task(call(watch, "poison", answer, repeat=True))
    others = [asyncio.create_task(conversation(each)) for each in range(30)]
    assert await bad in ("told: down", "ends")
    assert ended["poison"] <= 3
    assert loop.time() < 120
    await asyncio.gather(*others)


async def test_a_conversation_whose_time_is_up_while_its_failure_is_held_ends_in_time() -> None:
    tool = Remote()
    run = Run(tool)
    tool.down = {"execute"}
    outcome = await run.play("a", [CALL, "ok"], wall_clock_s=HOLD_S / 2)
    assert asyncio.get_running_loop().time() == pytest.approx(HOLD_S / 2, abs=0.01)
    assert (outcome.stop_reason, outcome.outages) == (StopReason.WALL_CLOCK, ["tool echo"])
    assert await run.keeper.touched(["a"]) == set()
    await run.break_it()
    assert await run.keeper.touched(["a"]) == {"a"}, "it has met the outage, as the others have"
    assert tool.counts["create"] == tool.counts["release"]


async def test_whole_groups_whose_calls_ran_are_valid_and_have_seen_nothing() -> None:
    class Slowly(Remote):
        async def execute(self, instance_id: str, parameters: object, **kwargs: object) -> object:
            await asyncio.sleep(0.3)
            return await super().execute(instance_id, parameters, **kwargs)  # type: ignore[arg-type]

    tool = Slowly()
    run = Run(tool)
    playing = [asyncio.create_task(run.play(f"c{each}", [CALL, "ok"], wall_clock_s=10)) for each in range(64)]
    await asyncio.sleep(0.1)
    tool.down = {"execute"}
    await asyncio.sleep(100)
    tool.down = set()
    outcomes = await asyncio.gather(*playing)
    assert {outcome.stop_reason for outcome in outcomes} == {StopReason.FINISHED}
    assert all(outcome.valid and not outcome.outages for outcome in outcomes)
    assert not any("down" in CharTokenizer().decode(outcome.trajectory.ids) for outcome in outcomes)
    assert all(call.seconds == pytest.approx(0.3) for outcome in outcomes for call in outcome.calls)


async def test_a_failure_of_long_ago_takes_nothing_from_a_burst() -> None:
    """A step may end with one failure, and the service be down when the next one begins."""
    service, watch = Slow(0.01, 0.5), process()
    service.is_up = False
    assert await call(watch, "lone", service.answer, repeat=True) == "told: down"
    await asyncio.sleep(WINDOW_S + 1)
    calls = await begin([watch], service, 64)
    await asyncio.sleep(30)
    assert not any(each.done() for each in calls)
    service.is_up = True
    assert await asyncio.gather(*calls) == ["fine"] * 64


async def test_a_call_that_is_made_again_gets_what_the_model_wrote() -> None:
    class Taking(Remote):
        async def execute(self, instance_id: str, parameters: dict[str, object], **kwargs: object) -> object:
            taken = {"text": parameters.pop("text")}
            await asyncio.sleep(0.3)
            return await super().execute(instance_id, taken, **kwargs)

    tool = Taking()
    run = Run(tool)
    playing = [asyncio.create_task(run.play(f"c{each}", [CALL, "ok"])) for each in range(16)]
    await asyncio.sleep(0.1)
    tool.down = {"execute"}
    await asyncio.sleep(30)
    tool.down = set()
    outcomes = await asyncio.gather(*playing)
    assert [call.status for outcome in outcomes for call in outcome.calls] == [CallStatus.OK] * 16


async def test_a_call_lasts_as_long_as_it_ran_however_long_its_failure_is_held() -> None:
    tool = Remote()
    run = Run(tool)
    tool.down = {"execute"}
    outcome = await run.play("a", [CALL, "ok"])
    assert asyncio.get_running_loop().time() == pytest.approx(HOLD_S, abs=0.01)
    assert outcome.calls[0].seconds == pytest.approx(0, abs=0.01)


async def test_a_cancelled_call_whose_failure_is_held_leaves_nothing_behind() -> None:
    service, watch = Service(), process()
    service.is_up = False
    guarded = GuardedCall(watch, "a", "repeatable")

    async def fails() -> None:
        async with guarded:
            await guarded.wait()
            await service.answer("a")

    skip_waits()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(fails(), HOLD_S / 2)
    assert (guarded.met, guarded.again) == (True, False)
    assert not watch.running
    assert not watch._held


async def _itself(keeper: object) -> OutageStore:
    assert isinstance(keeper, OutageStore)
    return keeper

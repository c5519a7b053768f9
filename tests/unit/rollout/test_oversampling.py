"""Over-sampling: which samples of a group stay, and which are cut."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from verl_multiturn.rollout.groups import oversampling
from verl_multiturn.rollout.groups.oversampling import FirstValid, samples_to_start


@pytest.mark.parametrize(
    ("wanted", "rate", "started"),
    [
        (8, 0, 8),
        (8, 0.25, 11),
        (8, 0.5, 16),
        (8, 0.01, 9),
        (1, 0.25, 2),
        (16, 0.2, 20),
        (21, 0.3, 30),  # 30.000000000000004 in floats
        (17, 0.32, 25),
    ],
)
def test_how_many_samples_begin(wanted: int, rate: float, started: int) -> None:
    assert samples_to_start(wanted, rate) == started


class Group:
    """A group whose samples end on the test's command."""

    def __init__(self, wanted: int, started: int) -> None:
        self.samples = FirstValid(wanted, started)
        self.ends: list[asyncio.Future[bool | Exception]] = [
            asyncio.get_running_loop().create_future() for _ in range(started)
        ]
        self.events: list[str] = []
        self.on_cancel: Callable[[int], Awaitable[Any]] | None = None
        self.tasks = [asyncio.ensure_future(self.run(number)) for number in range(started)]

    async def run(self, number: int) -> None:
        await self.samples.run(number, lambda: self.sample(number))

    async def sample(self, number: int) -> None:
        self.events.append(f"{number} begins")
        try:
            valid = await asyncio.shield(self.ends[number])
        except asyncio.CancelledError:
            self.events.append(f"{number} cut")
            if self.on_cancel is None:
                raise
            await self.on_cancel(number)
            valid = True
        if isinstance(valid, Exception):
            raise valid
        if await self.samples.stays(number, valid):
            self.events.append(f"{number} stays")

    async def end(self, *ends: tuple[int, Any]) -> list[str]:
        """Let samples end in the same moment, and return the events since the last call."""
        for number, valid in ends:
            self.ends[number].set_result(valid)
        return await self.happened()

    async def happened(self) -> list[str]:
        for _ in range(20):
            await asyncio.sleep(0)
        happened, self.events = self.events, []
        return happened


async def test_the_first_valid_ones_stay_and_the_others_are_cut() -> None:
    group = Group(wanted=2, started=4)
    assert await group.happened() == ["0 begins", "1 begins", "2 begins", "3 begins"]
    assert await group.end((3, True)) == ["3 stays"]
    assert await group.end((1, True)) == ["1 stays", "0 cut", "2 cut"]
    assert [task.result() for task in group.tasks] == [None] * 4
    assert group.samples.cut_samples == 2
    assert group.samples.cut_s > 0


async def test_of_several_that_end_in_one_moment_only_as_many_as_there_are_places_stay() -> None:
    group = Group(wanted=2, started=5)
    await group.happened()
    happened = await group.end((4, True), (0, True), (2, True), (3, True))
    assert sorted(happened) == ["0 stays", "1 cut", "2 cut", "3 cut", "4 stays"]
    assert group.samples.cut_samples == 3


async def test_a_sample_that_ends_although_it_was_cut_does_not_stay(caplog: pytest.LogCaptureFixture) -> None:
    group = Group(wanted=1, started=3)

    async def end_anyway(number: int) -> None:
        await asyncio.sleep(0.01)

    group.on_cancel = end_anyway
    await group.happened()
    assert await group.end((0, True)) == ["0 stays", "1 cut", "2 cut"]
    await asyncio.gather(*group.tasks)
    assert group.events == []
    assert group.samples.cut_samples == 2
    assert caplog.messages == []


async def test_the_seconds_of_cut_samples_last_until_each_of_them_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(oversampling, "time", SimpleNamespace(monotonic=lambda: clock.now))
    group = Group(wanted=1, started=3)

    async def release_tools(number: int) -> None:
        clock.now += 4
        raise asyncio.CancelledError

    group.on_cancel = release_tools
    await group.happened()
    clock.now = 2.0
    await group.end((0, False))
    clock.now = 5.0
    assert await group.end((1, True)) == ["1 stays", "2 cut"]
    assert group.samples.cut_s == 2 + (5 + 4)


async def test_the_error_of_a_cut_sample_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    group = Group(wanted=1, started=2)

    async def fail(number: int) -> None:
        raise RuntimeError("the tool is broken")

    group.on_cancel = fail
    await group.happened()
    with caplog.at_level(logging.ERROR):
        assert await group.end((0, True)) == ["0 stays", "1 cut"]
    assert [task.result() for task in group.tasks] == [None, None]
    assert caplog.messages == ["sample 1 failed after it was cut: RuntimeError: the tool is broken"]


async def test_an_invalid_one_waits_and_is_cut_when_enough_valid_ones_come() -> None:
    group = Group(wanted=2, started=4)
    await group.happened()
    assert await group.end((0, False)) == []
    assert await group.end((1, True)) == ["1 stays"]
    assert not group.tasks[0].done()
    assert await group.end((2, True)) == ["2 stays", "3 cut"]
    assert [task.result() for task in group.tasks] == [None] * 4
    assert group.samples.cut_samples == 2


@pytest.mark.parametrize(
    ("valid", "stay"),
    [
        ([False, True, False, False], ["1 stays", "0 stays", "2 stays"]),
        ([False, False, False, True], ["3 stays", "0 stays", "1 stays"]),
        ([False, False, False, False], ["0 stays", "1 stays", "2 stays"]),
        ([True, True, False, False], ["0 stays", "1 stays", "2 stays"]),
    ],
)
async def test_with_too_few_valid_ones_invalid_ones_fill_the_group(valid: list[bool], stay: list[str]) -> None:
    group = Group(wanted=3, started=4)
    await group.happened()
    happened = []
    for each in enumerate(valid):
        happened += await group.end(each)
    assert happened == stay
    assert all(task.done() for task in group.tasks)
    assert group.samples.cut_samples == 1


async def test_a_sample_that_fails_takes_no_place_and_holds_nobody_up() -> None:
    group = Group(wanted=2, started=3)
    await group.happened()
    assert await group.end((0, False), (1, RuntimeError("broken"))) == []
    assert await group.end((2, True)) == ["2 stays", "0 stays"]
    with pytest.raises(RuntimeError, match="broken"):
        group.tasks[1].result()

    last = Group(wanted=2, started=3)
    await last.happened()
    assert await last.end((0, False), (2, True)) == ["2 stays"]
    assert await last.end((1, RuntimeError("broken"))) == ["0 stays"]
    assert str(last.tasks[1].exception()) == "broken"
    assert last.samples.cut_samples == 0


async def test_samples_that_have_not_begun_are_cut_too() -> None:
    samples = FirstValid(1, 3)
    begun, stayed = [], []

    async def sample(number: int) -> None:  # never waits, so that it is over before the next one begins
        begun.append(number)
        if await samples.stays(number, True):
            stayed.append(number)

    await asyncio.gather(*(samples.run(number, lambda number=number: sample(number)) for number in range(3)))
    assert begun == stayed == [0]
    assert samples.cut_samples == 2


async def test_a_cancelled_group_raises_in_all_its_samples_and_nothing_stays_afterwards() -> None:
    group = Group(wanted=2, started=4)
    await group.happened()
    assert await group.end((0, True), (1, False)) == ["0 stays"]
    for task in group.tasks:
        task.cancel()
    assert await group.happened() == ["2 cut", "3 cut"]
    assert [task.cancelled() for task in group.tasks] == [False, True, True, True]
    assert group.samples.cut_samples == 0


async def test_a_group_that_is_cancelled_in_the_moment_of_its_last_end() -> None:
    group = Group(wanted=2, started=3)
    await group.happened()
    await group.end((0, False))
    group.ends[1].set_result(True)
    group.ends[2].set_result(False)
    for task in group.tasks:
        task.cancel()
    assert [event for event in await group.happened() if event.endswith("stays")] == []
    assert all(task.cancelled() for task in group.tasks)

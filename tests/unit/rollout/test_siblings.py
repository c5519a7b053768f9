"""Siblings that wait for one another: who is compared, when, and what a cancellation leaves."""

import asyncio
import contextvars
from collections.abc import Sequence

import pytest

from verl_multiturn.rollout.groups.siblings import Siblings

own: contextvars.ContextVar[str] = contextvars.ContextVar("own", default="nobody's")


class Comparison:
    """Notes what was compared."""

    def __init__(self, takes: bool = False, raises: Exception | None = None) -> None:
        self.seen: list[tuple[list[str], bool]] = []
        self.context = ""
        self.takes, self.raises, self.ended = takes, raises, ""

    async def __call__(self, joined: Sequence[str], failed: bool) -> None:
        self.seen.append((list(joined), failed))
        self.context = own.get()
        if self.raises is not None:
            raise self.raises
        try:
            if self.takes:
                await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            self.ended = "cancelled"
            raise


async def take_part(siblings: Siblings[str], number: int, joins: bool = True, raises: bool = False) -> str:
    own.set(f"of {number}")
    with siblings.running(number):
        if raises:
            raise ValueError("an author's mistake")
        if joins:
            await siblings.join(number, f"c{number}")
            await siblings.compared()
            return "compared"
    return "gone"


async def test_they_are_compared_once_when_the_last_has_ended_in_the_order_of_their_numbers() -> None:
    comparison = Comparison()
    siblings = Siblings(3, comparison)
    waiting = [asyncio.create_task(take_part(siblings, number)) for number in (2, 0)]
    await asyncio.sleep(0.01)
    assert (comparison.seen, [task.done() for task in waiting]) == ([], [False, False])
    assert await take_part(siblings, 1) == "compared"
    assert await asyncio.gather(*waiting) == ["compared"] * 2
    assert comparison.seen == [(["c0", "c1", "c2"], False)]
    assert comparison.context == "nobody's"


@pytest.mark.parametrize("last", [0, 1])
async def test_one_that_takes_no_part_is_not_waited_for(last: int) -> None:
    comparison = Comparison()
    siblings = Siblings(2, comparison)
    first = asyncio.create_task(take_part(siblings, 1 - last, joins=last == 0))
    await asyncio.sleep(0)
    await take_part(siblings, last, joins=last != 0)
    await first
    assert comparison.seen == [(["c1"], False)]


async def test_nobody_is_compared_where_nobody_joined() -> None:
    comparison = Comparison()
    siblings = Siblings(2, comparison)
    assert [await take_part(siblings, number, joins=False) for number in (0, 1)] == ["gone", "gone"]
    assert comparison.seen == []


async def test_the_comparison_knows_that_one_has_raised() -> None:
    comparison = Comparison()
    siblings = Siblings(2, comparison)
    waiting = asyncio.create_task(take_part(siblings, 0))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="an author's mistake"):
        await take_part(siblings, 1, raises=True)
    assert await waiting == "compared"
    assert comparison.seen == [(["c0"], True)]


async def test_a_mistake_is_raised_to_each_of_them() -> None:
    siblings = Siblings(2, Comparison(raises=ValueError("no judge")))
    found = await asyncio.gather(*(take_part(siblings, number) for number in (0, 1)), return_exceptions=True)
    assert list(map(repr, found)) == ["ValueError('no judge')"] * 2


async def test_a_cancelled_group_ends_its_comparison_first() -> None:
    comparison = Comparison(takes=True)
    siblings = Siblings(2, comparison)
    tasks = [asyncio.create_task(take_part(siblings, number)) for number in (0, 1)]
    await asyncio.sleep(0.01)
    assert comparison.seen
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    assert comparison.ended == "cancelled"


@pytest.mark.parametrize("end", ["gone", "joins", "cancelled"])
async def test_a_group_that_is_cancelled_while_one_is_missing_compares_nobody(end: str) -> None:
    async def run() -> None:
        with siblings.running(2):
            await asyncio.sleep(3600)

    comparison = Comparison()
    siblings = Siblings(3, comparison)
    waiting = [asyncio.create_task(take_part(siblings, number)) for number in (0, 1)]
    waiting += [asyncio.create_task(run())] if end == "cancelled" else []
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert all(task.cancelled() for task in waiting)
    if end != "cancelled":
        await take_part(siblings, 2, joins=end == "joins")
    await asyncio.sleep(0)
    assert comparison.seen == []

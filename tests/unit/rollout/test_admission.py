"""The door of a generation server."""

import asyncio

import pytest

from verl_multiturn.verl_bridge.servers.admission import Admission

pytestmark = pytest.mark.stack


async def test_a_closed_door_lets_nobody_in() -> None:
    door = Admission()
    assert door.enter()
    door.close()
    assert (door.enter(), door.is_open) == (False, False)
    door.open()
    assert (door.enter(), door.is_open) == (True, True)


async def test_who_waits_is_told_when_the_door_opens() -> None:
    door = Admission()
    door.close()
    waiting = [asyncio.ensure_future(door.opened()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    door.open()
    assert await asyncio.gather(*waiting) == [True, True, True]
    assert await door.opened()


async def test_nobody_waits_for_a_server_that_leaves() -> None:
    door = Admission()
    door.close()
    waiting = asyncio.ensure_future(door.opened())
    await asyncio.sleep(0)
    door.close(leaves=True)
    assert not await waiting
    assert not await door.opened()
    door.open()
    assert await door.opened()


async def test_a_server_that_leaves_is_given_time_to_come_back() -> None:
    door = Admission()
    door.close(leaves=True)
    assert not await door.opened(0.01)
    waiting = asyncio.ensure_future(door.opened(60))
    await asyncio.sleep(0.01)
    door.open()
    assert await waiting


async def test_the_last_one_out_empties_the_room() -> None:
    door = Admission()
    assert await door.emptied(0)
    door.enter()
    door.enter()
    door.leave()
    assert not await door.emptied(0.01)
    emptied = asyncio.ensure_future(door.emptied(60))
    await asyncio.sleep(0)
    door.leave()
    assert await emptied

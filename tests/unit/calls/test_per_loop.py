"""Each event loop's own resources: where they are opened, and when they are closed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from verl_multiturn.calls.per_loop import PerLoop


class Pool:
    """A resource that remembers where it was closed."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended = ""

    async def close(self) -> None:
        assert asyncio.get_running_loop() is self.loop
        self.ended += "closed"

    def let_go(self) -> None:
        self.ended += "let go"


@pytest.fixture
def other() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


async def _one(pools: PerLoop[Pool], key: str | None = None) -> Pool:
    return pools.get(Pool, key)


async def test_the_last_conversation_closes() -> None:
    pools = PerLoop(Pool.close, counted=True)
    pools.enter("a")
    pools.enter("b")
    pool = await _one(pools)
    assert await _one(pools) is pool
    await pools.leave("a")
    assert pool.ended == ""
    await pools.leave("b")
    await pools.leave("never entered")
    assert pool.ended == "closed"
    with pytest.raises(RuntimeError, match="no conversation is open on this event loop"):
        await _one(pools)  # it would never be closed
    assert pools.everywhere() == []
    pools.enter("c")
    assert await _one(pools) is not pool


async def test_a_key_is_closed_by_itself_and_with_the_others() -> None:
    pools = PerLoop(Pool.close)
    one, two = await _one(pools, "one"), await _one(pools, "two")
    await pools.close("one")
    await pools.close("three")
    assert (one.ended, two.ended) == ("closed", "")
    await pools.aclose()
    await pools.aclose()
    assert (one.ended, two.ended) == ("closed", "closed")


def test_event_loops_have_their_own(other: asyncio.AbstractEventLoop) -> None:
    pools = PerLoop(Pool.close, Pool.let_go)
    first = other.run_until_complete(_one(pools))

    async def use() -> Pool:
        second = await _one(pools)
        assert pools.everywhere() == [first, second]
        await pools.aclose()
        return second

    second = asyncio.run(use())
    assert (first.ended, second.ended) == ("", "closed")
    assert other.run_until_complete(_one(pools)) is first


def test_what_a_closed_event_loop_has_left_is_let_go_by_the_next_one(other: asyncio.AbstractEventLoop) -> None:
    pools = PerLoop(Pool.close, Pool.let_go)
    first = other.run_until_complete(_one(pools))
    other.close()
    assert first.ended == ""
    second = asyncio.run(_one(pools))
    assert first.ended == "let go"
    assert pools.everywhere() == [second]


class Broken(Pool):
    """A pool that cannot be let go."""

    def let_go(self) -> None:
        super().let_go()
        raise ValueError("it is broken")


def test_what_a_closed_event_loop_has_left_raises_into_no_other(
    other: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave() -> list[Pool]:
        return [pools.get(Broken, "a"), pools.get(Broken, "b"), pools.get(Pool, "c")]

    pools = PerLoop[Pool](Pool.close, lambda pool: pool.let_go())
    left = other.run_until_complete(leave())
    other.close()
    own = asyncio.run(_one(pools))
    assert [pool.ended for pool in left] == ["let go"] * 3
    assert pools.everywhere() == [own]
    text = "what a closed event loop has left cannot be closed: ValueError: it is broken"
    assert [record.getMessage() for record in caplog.records] == [text] * 2


class Stuck(Pool):
    """A pool that cannot be closed, or not in time."""

    async def close(self) -> None:
        await super().close()
        await asyncio.sleep(3600)


async def test_one_that_does_not_close_in_time_keeps_no_other_open() -> None:
    pools = PerLoop[Pool](lambda pool: pool.close())
    opened = pools.get(Stuck, "a"), pools.get(Pool, "b")
    closing = asyncio.ensure_future(pools.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert [pool.ended for pool in opened] == ["closed", "closed"]

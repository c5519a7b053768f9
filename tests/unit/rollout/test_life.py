"""The life of a conversation: who sees it, stops of its clock, and its leftovers after each kind of end."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import pytest

from tests.conftest import EchoTool
from tests.idle_loop import hold_up
from tests.scripted import CALL, run
from tests.unit.proxy.test_proxy_endpoint import ROW, serving
from tests.unit.replay.test_replayed import call, record, replay
from verl_multiturn import Limits, StopReason, ToolResponse
from verl_multiturn.calls.timeline import during, is_kept
from verl_multiturn.replay.comparison import differences
from verl_multiturn.rollout.engines.protocol import Generation
from verl_multiturn.rollout.life import Life, current, expire, live, run_out, running, stood_still_s, stopped

Look = Callable[[], Any]
Seen = tuple[str | None, str | None, bool]
NOTHING: Seen = (None, None, False)


class Heard:
    """Events of conversations at a listener."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.spans: dict[str, list[str]] = {}
        """Kinds of the spans of each conversation when it was over."""

    def begun(self, life: Any) -> None:
        self.events.append("begun")

    def over(self, life: Any) -> None:
        self.events.append(f"over {life.status} {life.error}".rstrip())
        self.spans[life.id] = [span.kind for span in life.timeline.spans]


@contextmanager
def living(heard: Heard, name: str = "c", group: str = "g") -> Iterator[Any]:
    """Let a conversation live, as our worker does."""
    with live(Life(name, group, number=1), heard) as life:
        life.at_last.append(lambda _: heard.events.append("left"))
        yield life


def seen() -> Seen:
    """Return the name and the group of the running conversation, and whether its timeline is kept."""
    life = current()
    return (None, None, is_kept()) if life is None else (life.id, life.group, is_kept())


@asynccontextmanager
async def limited(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Run the clock of a conversation that may last so many seconds."""
    async with asyncio.timeout(seconds) as deadline, running(deadline):
        yield deadline


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def _of(look: Look) -> Any:
    return look()


async def in_the_same_task(look: Look) -> Any:
    return look()


async def in_a_task(look: Look) -> Any:
    return await asyncio.create_task(_of(look))


async def in_a_task_of_a_task(look: Look) -> Any:
    return await asyncio.create_task(in_a_task(look))


async def in_a_group(look: Look) -> Any:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_of(look))
    return task.result()


async def in_a_callback(look: Look) -> Any:
    loop = asyncio.get_running_loop()
    found = loop.create_future()
    loop.call_soon(lambda: found.set_result(look()))
    return await found


async def in_a_callback_of_an_executor(look: Look) -> Any:
    return await asyncio.to_thread(look)


async def in_a_thread_with_a_copy(look: Look) -> Any:
    return await _thread(partial(contextvars.copy_context().run, look))


async def in_a_thread(look: Look) -> Any:
    return await _thread(look)


async def in_an_empty_context(look: Look) -> Any:
    return await asyncio.get_running_loop().create_task(_of(look), context=contextvars.Context())


async def _thread(look: Look) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(look()))
    thread.start()
    await asyncio.to_thread(thread.join)
    return found[0]


COPIED = [
    in_the_same_task,
    in_a_task,
    in_a_task_of_a_task,
    in_a_group,
    in_a_callback,
    in_a_callback_of_an_executor,
    in_a_thread_with_a_copy,
]
"""Ways on which a context goes along."""
APART = [in_a_thread, in_an_empty_context]
ON_THE_LOOP = [in_the_same_task, in_a_task, in_a_task_of_a_task, in_a_group, in_a_callback]
Way = Callable[[Look], Awaitable[Any]]


@pytest.mark.parametrize("way", COPIED)
async def test_a_conversation_is_seen_where_its_context_goes(way: Way) -> None:
    assert await way(seen) == NOTHING
    with living(Heard()):
        assert await way(seen) == ("c", "g", True)
    assert await way(seen) == NOTHING


@pytest.mark.parametrize("way", APART)
async def test_no_conversation_is_seen_in_a_context_of_its_own(way: Way) -> None:
    with living(Heard()):
        assert await way(seen) == NOTHING


@pytest.mark.parametrize("way", COPIED)
async def test_each_of_several_at_once_sees_itself(way: Way) -> None:
    async def one(name: str) -> list[Seen]:
        found = []
        with living(Heard(), name, f"group of {name}"):
            for _ in range(3):
                found.append(await way(seen))
                await asyncio.sleep(0)
        return [*found, seen()]

    names = [f"{number}" for number in range(5)]
    for name, found in zip(names, await asyncio.gather(*map(one, names)), strict=True):
        assert found == [(name, f"group of {name}", True)] * 3 + [NOTHING]


@pytest.mark.parametrize("way", [in_a_task, in_a_callback, in_a_thread_with_a_copy])
async def test_what_outlives_a_conversation_adds_nothing_to_it(way: Way) -> None:
    heard, goes_on = Heard(), asyncio.Event()

    async def late() -> Seen:
        with during("call", "late"), stopped():
            await goes_on.wait()
        with during("call", "later"), stopped():
            return await way(seen)

    with living(heard) as life:
        async with limited(10):
            with during("generation"):
                pass
            task = asyncio.create_task(late())
            await settle()
    assert life.timeline is not None
    assert life.timeline.doing() is None
    goes_on.set()
    assert (await task)[:2] == ("c", "g")
    assert heard.spans == {"c": ["generation"]}
    assert [span.kind for span in life.timeline.spans] == ["generation"]  # a thread may make its record only now
    assert heard.events == ["begun", "over finished", "left"]


@pytest.fixture
def heard() -> Heard:
    return Heard()


POINTS = ["before", "begun", "running", "stopped", "nested", "after nested", "rewarded", "tidying", "after"]


async def converse(heard: Heard, point: str, reached: asyncio.Event, outside: list[Seen]) -> None:
    """Live a conversation which hangs at one point."""

    async def here(name: str) -> None:
        if name == point:
            reached.set()
            await asyncio.Event().wait()

    try:
        await here("before")
        with living(heard):
            try:
                await here("begun")
                async with limited(60):
                    await here("running")
                    with stopped(), during("pause"):
                        await here("stopped")
                    async with limited(30):  # a conversation that its tool runs
                        await here("nested")
                    await here("after nested")
                await here("rewarded")
            finally:
                await here("tidying")
        outside.append(seen())
        await here("after")
    finally:
        outside.append(seen())


async def cancelled_itself(task: asyncio.Task[None]) -> None:
    task.cancel()


async def cancelled_twice(task: asyncio.Task[None]) -> None:
    task.cancel()
    task.cancel()


async def cancelled_by_a_group(task: asyncio.Task[None]) -> None:
    async def failing() -> None:
        raise ValueError

    async def waiting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            task.cancel()

    async def fail_together() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(waiting())
            await asyncio.sleep(0)
            group.create_task(failing())

    with pytest.raises(ExceptionGroup):
        await fail_together()


@pytest.mark.parametrize("cancel", [cancelled_itself, cancelled_twice, cancelled_by_a_group])
@pytest.mark.parametrize("point", POINTS)
async def test_whenever_it_is_cancelled_it_ends_once(
    heard: Heard, point: str, cancel: Callable[[asyncio.Task[None]], Awaitable[None]]
) -> None:
    reached, outside = asyncio.Event(), list[Seen]()
    task = asyncio.create_task(converse(heard, point, reached, outside))
    await reached.wait()
    await cancel(task)
    await asyncio.wait({task})
    assert task.cancelled()
    assert set(outside) == {NOTHING}
    ends = {"before": [], "after": ["begun", "over finished", "left"]}
    assert heard.events == ends.get(point, ["begun", "over cancelled", "left"])
    assert seen() == NOTHING


async def test_one_that_is_cancelled_before_its_task_runs_never_began(heard: Heard) -> None:
    task = asyncio.create_task(converse(heard, "begun", asyncio.Event(), []))
    task.cancel()
    await asyncio.wait({task})
    assert heard.events == []


@pytest.mark.parametrize("point", POINTS[1:7])
async def test_one_whose_time_limit_outside_is_up_was_cancelled(heard: Heard, point: str) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await converse(heard, point, asyncio.Event(), [])
    assert heard.events == ["begun", "over cancelled", "left"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("bad"), "over error ValueError: bad"),
        (TimeoutError(), "over error TimeoutError"),
        (asyncio.CancelledError(), "over cancelled"),
    ],
)
async def test_what_it_raises_is_said_and_goes_on(heard: Heard, error: BaseException, said: str) -> None:
    with pytest.raises(type(error)) as raised, living(heard):
        raise error
    assert raised.value is error
    assert heard.events == ["begun", said, "left"]
    assert seen() == NOTHING


@pytest.mark.parametrize("is_swallowed", [True, False])
async def test_a_sample_that_was_cut_is_not_cancelled(heard: Heard, is_swallowed: bool) -> None:
    async def sample() -> None:
        with living(heard) as life:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not is_swallowed:
                    raise
            finally:
                life.status = "cut"

    task = asyncio.create_task(sample())
    await settle()
    task.cancel()
    await asyncio.wait({task})
    assert (task.cancelled(), heard.events) == (not is_swallowed, ["begun", "over cut", "left"])


class Deaf(Heard):
    """A listener that raises at one of its calls."""

    def __init__(self, event: str) -> None:
        super().__init__()
        self.event = event

    def begun(self, life: Any) -> None:
        super().begun(life)
        if self.event == "begun":
            raise OSError("deaf")

    def over(self, life: Any) -> None:
        super().over(life)
        if self.event == "over":
            raise OSError("deaf")


@pytest.mark.parametrize("error", [None, ValueError("wrong")])
async def test_each_listener_hears_of_the_end_though_others_raise(heard: Heard, error: Exception | None) -> None:
    first, second, status = Deaf("over"), Deaf("over"), "finished" if error is None else "error ValueError: wrong"
    life = Life("c", "g", number=1, at_last=[lambda _: heard.events.append("left")])

    def lives() -> None:
        with live(life, first, second, heard):
            if error is not None:
                raise error

    with pytest.raises(OSError, match="deaf"):
        lives()
    assert [each.events for each in (first, second, heard)] == [
        ["begun", f"over {status}"],
        ["begun", f"over {status}"],
        ["begun", f"over {status}", "left"],
    ]


async def test_a_listener_that_raises_at_the_beginning_leaves_none_without_an_end(heard: Heard) -> None:
    deaf, later = Deaf("begun"), Heard()
    with pytest.raises(OSError, match="deaf"), live(Life("c", "g"), heard, deaf, later):
        raise AssertionError("it does not live")
    assert [each.events for each in (heard, deaf, later)] == [["begun", "over error OSError: deaf"], ["begun"], []]
    assert current() is None


async def test_one_that_gives_its_place_up_early_gives_it_up_once(heard: Heard) -> None:
    with living(heard):
        life = current()
        assert life is not None
        life.leave()
        assert (heard.events, life.asks_no_more) == (["begun", "left"], True)
    assert heard.events == ["begun", "left", "over finished"]


def stand() -> None:
    with stopped():
        hold_up(100)


@pytest.mark.parametrize("way", ON_THE_LOOP)
@pytest.mark.parametrize("is_followed", [True, False])
async def test_the_clock_is_stopped_where_the_context_goes(heard: Heard, way: Way, is_followed: bool) -> None:
    async def conversation() -> None:
        async with limited(10):
            await way(stand)
            assert stood_still_s() == pytest.approx(100, abs=0.1)
            await asyncio.sleep(0.01)

    if is_followed:
        with living(heard):
            await conversation()
    else:
        await conversation()


async def test_the_clock_is_not_stopped_in_a_context_of_its_own() -> None:
    async def conversation() -> None:
        async with limited(10):
            await in_an_empty_context(stand)
            await asyncio.sleep(0.01)

    with pytest.raises(TimeoutError):
        await conversation()


@pytest.mark.parametrize("is_followed", [True, False])
async def test_of_two_at_once_each_has_its_own_time(is_followed: bool) -> None:
    goes_on = asyncio.Event()

    async def conversation(stands: bool) -> str:
        try:
            async with limited(10):
                if stands:
                    with stopped():
                        await goes_on.wait()
                await goes_on.wait()
        except TimeoutError:
            return "time up"
        return "finished"

    async def one(name: str, stands: bool) -> str:
        if not is_followed:
            return await conversation(stands)
        with living(Heard(), name):
            return await conversation(stands)

    both = [asyncio.create_task(one("a", True)), asyncio.create_task(one("b", False))]
    await settle()
    hold_up(100)
    await asyncio.sleep(0.01)
    goes_on.set()
    assert await asyncio.gather(*both) == ["finished", "time up"]


@pytest.mark.parametrize("is_followed", [True, False])
@pytest.mark.parametrize(
    ("outer_stands", "inner_stands", "ends"),
    [
        (False, False, ("inner", "outer")),
        (False, True, ("outer",)),
        (True, False, ("inner",)),
        (True, True, ()),
    ],
)
async def test_a_conversation_that_a_tool_runs_has_a_clock_of_its_own(
    heard: Heard, is_followed: bool, outer_stands: bool, inner_stands: bool, ends: tuple[str, ...]
) -> None:
    """Both may take 10 s, of which 100 pass, while the one, the other, or both are stopped."""
    ended: list[str] = []

    async def tool() -> None:
        try:
            async with limited(10):
                if inner_stands:
                    stand()
                else:
                    hold_up(100)
                await asyncio.sleep(0.01)
        except TimeoutError:
            ended.append("inner")

    async def conversation() -> None:
        try:
            async with limited(10):
                if outer_stands:
                    with stopped():
                        await asyncio.create_task(tool())
                else:
                    # The outer one's time is up first: it waits for its tool, which ends by itself.
                    await asyncio.shield(task := asyncio.create_task(tool()))
                await asyncio.sleep(0.01)
        except TimeoutError:
            ended.append("outer")
            await asyncio.wait({task})
        if is_followed:
            assert seen() == ("c", "g", True)

    if is_followed:
        with living(heard):
            await conversation()
    else:
        await conversation()
    assert sorted(ended) == list(ends)


@pytest.mark.parametrize("is_followed", [True, False])
async def test_two_tools_at_once_may_each_run_one(heard: Heard, is_followed: bool) -> None:
    goes_on = asyncio.Event()

    async def tool(stands: bool) -> str:
        try:
            async with limited(10):
                assert seen() == (("c", "g", True) if is_followed else NOTHING)
                if stands:
                    with stopped():
                        await goes_on.wait()
                await goes_on.wait()
        except TimeoutError:
            return "time up"
        return "finished"

    async def conversation() -> list[str]:
        async with limited(1000):
            both = [asyncio.create_task(tool(stands)) for stands in (True, False)]
            await settle()
            hold_up(100)
            await asyncio.sleep(0.01)
            goes_on.set()
            found = await asyncio.gather(*both)
            stand()  # its own clock can be stopped as before
            assert stood_still_s() == pytest.approx(100, abs=0.1)
            return found

    if is_followed:
        with living(heard):
            assert await conversation() == ["finished", "time up"]
    else:
        assert await conversation() == ["finished", "time up"]


async def test_one_after_the_other_have_their_own_clocks(heard: Heard) -> None:
    """The first one's leftovers do not stop the second one's."""
    goes_on = asyncio.Event()

    async def late() -> None:
        with stopped():
            await goes_on.wait()
        stand()

    with living(heard):
        async with limited(10):
            left = asyncio.create_task(late())
            await settle()
        async with limited(1000) as deadline:
            due = deadline.when()
            goes_on.set()
            await left
            assert (deadline.when(), stood_still_s()) == (due, 0.0)


@pytest.mark.parametrize("is_followed", [True, False])
async def test_a_task_that_is_cancelled_while_the_clock_stands_lets_it_go_on(heard: Heard, is_followed: bool) -> None:
    async def waiting() -> None:
        with stopped():
            await asyncio.Event().wait()

    async def conversation() -> None:
        async with limited(10) as deadline:
            both = [asyncio.create_task(waiting()), asyncio.create_task(waiting())]
            await settle()
            assert deadline.when() is None
            both[0].cancel()
            await settle()
            assert deadline.when() is None  # the other one still waits
            hold_up(100)
            both[1].cancel()
            await settle()
            assert deadline.when() == pytest.approx(asyncio.get_running_loop().time() + 10, abs=0.1)

    if is_followed:
        with living(heard):
            await conversation()
    else:
        await conversation()


@pytest.mark.parametrize("is_nested", [True, False])
async def test_the_time_that_is_let_be_up_is_that_of_the_innermost(heard: Heard, is_nested: bool) -> None:
    with pytest.raises(RuntimeError, match="there is no conversation whose time could be up"):
        expire()

    async def over() -> str:
        try:
            async with limited(1000):
                await asyncio.create_task(run_out())
        except TimeoutError:
            return "time up"
        return "finished"

    with living(heard):
        if not is_nested:
            assert await over() == "time up"
            return
        async with limited(1000) as deadline:
            assert await over() == "time up"
            assert not deadline.expired()


class Nesting(EchoTool):
    """A tool that runs a conversation of its own for each call."""

    def __init__(self, wall_clock_s: float | None) -> None:
        super().__init__()
        self.wall_clock_s = wall_clock_s
        self.found: list[Any] = []

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        tool = EchoTool({"execute": "hang"} if self.wall_clock_s is not None else {})
        self.found.append((await run([CALL, "ok"], tool, wall_clock_s=self.wall_clock_s), seen()))
        return ToolResponse("done")


@pytest.mark.parametrize(("wall_clock_s", "reason"), [(None, "finished"), (0.05, "wall_clock")])
async def test_a_tool_runs_a_whole_conversation(heard: Heard, wall_clock_s: float | None, reason: str) -> None:
    tool = Nesting(wall_clock_s)
    with living(heard):
        outcome = await run([CALL + CALL, "ok"], tool, wall_clock_s=60.0)
        assert seen() == ("c", "g", True)
    assert outcome.stop_reason is StopReason.FINISHED
    assert [(str(each.stop_reason), where) for each, where in tool.found] == [(reason, ("c", "g", True))] * 2
    assert heard.events == ["begun", "over finished", "left"]
    assert heard.spans["c"].count("generation") == 2 + 2 * (2 if reason == "finished" else 1)


class Looking:
    """An engine that notes whose generation it is, and stalls for longer than the session's time.

    Args:
        at_once: Number of generations that stall at once.
    """

    def __init__(self, at_once: int) -> None:
        self.seen: list[tuple[str, Seen]] = []
        self._all_there = asyncio.Barrier(at_once)

    async def generate(self, ask: Any) -> Generation:
        self.seen.append((ask.request_id.partition(".")[0], seen()))
        with stopped():
            await self._all_there.wait()  # the server closes a connection on which nothing comes for so long
            hold_up(100)
        return Generation([5], [-0.5], [0], "stop")


@pytest.mark.parametrize("at_once", [False, True])
async def test_the_requests_of_an_agent_belong_to_its_own_conversation(heard: Heard, at_once: bool) -> None:
    names = ["a", "b", "c"]
    engine, served = Looking(len(names) if at_once else 1), set[Seen]()
    async with serving("undecided", engine=engine, wall_clock_s=1000.0) as endpoint:
        handle = endpoint._server._handle

        async def look(*args: Any) -> Any:
            served.add(seen())  # the server is all conversations', and outlives the first one
            return await handle(*args)

        endpoint._server._handle = look  # type: ignore[method-assign]

        async def session(name: str) -> StopReason:
            with living(heard, name, f"group of {name}"):
                outcome, _ = await endpoint.run(name, ROW, {})
            return outcome.stop_reason

        if at_once:
            ends = await asyncio.gather(*map(session, names))
        else:
            ends = [await session(name) for name in names]
    assert ends == [StopReason.FINISHED] * 3
    assert served == {NOTHING}
    assert sorted(engine.seen) == [(name, (name, f"group of {name}", True)) for name in names]
    assert heard.spans == {name: ["generation", "request"] for name in names}


@pytest.mark.parametrize("where", ["alone", "followed", "in another one", "in another one that is followed"])
async def test_a_replay_ends_where_its_time_was_up(heard: Heard, where: str) -> None:
    turns = ["One.", call("late")]
    recorded = await record(turns, Limits(4096, 4096, wall_clock_s=0.02), user=True)
    assert (recorded["time_up"], recorded["stop_reason"]) == ("tools", "wall_clock")

    async def again() -> list[Any]:
        if "in another one" not in where:
            return differences(recorded, await replay(recorded, Limits(4096, 4096), user=True))
        async with limited(1000) as deadline:
            found = differences(recorded, await replay(recorded, Limits(4096, 4096), user=True))
            assert not deadline.expired()
        return found

    if "followed" not in where:
        assert await again() == []
        return
    with living(heard):
        assert await again() == []
    assert heard.events == ["begun", "over finished", "left"]

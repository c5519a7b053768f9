"""`limits:` of a tool: deadline, queue, slots, retries, cache, size; and tools that end a conversation."""

import asyncio
import contextlib
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import EchoTool
from tests.idle_loop import hold_up
from verl_multiturn import ConfigError, ToolContractError
from verl_multiturn.calls.loop_blocks import CallWatch
from verl_multiturn.calls.slots import Gates
from verl_multiturn.calls.tasks import Alarms, done_within
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.processes.pool import WorkerPool
from verl_multiturn.tools.loading.call_limits import attach_limits
from verl_multiturn.tools.loading.functions import function_tool
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.results import CallStatus
from verl_multiturn.tools.running.session import ToolSession
from verl_multiturn.tools.services.http_client import UnavailableError

HI = ToolCall("echo", '{"text": "hi"}', "c1")


class Flaky(EchoTool):
    """A tool whose first `failures` calls fail."""

    repeatable = True
    pure = True

    def __init__(self, failures: int = 0, error: Exception | None = None) -> None:
        super().__init__()
        self.failures = failures
        self.error = error or ConnectionError("no route")

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        answer = await super().execute(instance_id, parameters, **kwargs)
        if self.counts["execute"] <= self.failures:
            raise self.error
        return answer


def limited(tool: Any, **limits: Any) -> Any:
    attach_limits(tool, limits, "limits")
    return tool


BACKOFF = "verl_multiturn.tools.running.session.BACKOFF_S"


def session(gates: Gates, tool: Any, name: str = "r1") -> ToolSession:
    return ToolSession(name, {tool.name: tool}, {}, gates, 8)


async def test_its_own_deadline() -> None:
    tool = limited(EchoTool({"execute": "hang"}), timeout_s=0.02)
    async with session(Gates(Gate, 60), tool) as opened:
        (result,) = await opened.execute([HI])
    assert (result.status, result.text) == (CallStatus.TIMEOUT, "Error: the tool did not answer within 0.02 s")


async def test_retries_where_the_tool_allows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKOFF, 0.001)
    tool = limited(Flaky(2), retries=2)
    async with session(Gates(Gate, 5), tool) as opened:
        (result,) = await opened.execute([HI])
    assert (result.status, result.text, result.attempts) == (CallStatus.OK, "hi", 3)

    tool = limited(Flaky(3), retries=2)
    async with session(Gates(Gate, 5), tool) as opened:
        (result,) = await opened.execute([HI])
    assert (result.status, result.text, result.attempts) == (
        CallStatus.ERROR,
        "Error: ConnectionError: no route",
        3,
    )


async def test_the_service_says_when_it_wants_to_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    soon, late = UnavailableError("busy"), UnavailableError("busy")
    soon.next_try_s, late.next_try_s = 0.0, 60.0
    for error, backoff_s, attempts in ((soon, 50.0, 3), (late, 0.001, 1)):
        monkeypatch.setattr(BACKOFF, backoff_s)
        tool = limited(Flaky(2, error), retries=2, timeout_s=5)
        async with session(Gates(Gate, 60), tool) as opened:
            (result,) = await opened.execute([HI])
        assert (result.status, result.attempts) == (CallStatus.OK if attempts == 3 else CallStatus.ERROR, attempts)


async def test_what_the_model_did_wrong_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKOFF, 0.001)
    tool = limited(Flaky(1, ValueError("no such page")), retries=2)
    async with session(Gates(Gate, 5), tool) as opened:
        (result,) = await opened.execute([HI])
    assert (result.status, result.attempts) == (CallStatus.ERROR, 1)


async def test_the_deadline_holds_over_all_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKOFF, 50.0)
    tool = limited(Flaky(5), retries=5, timeout_s=0.5)
    async with session(Gates(Gate, 5), tool) as opened:
        (result,) = await opened.execute([HI])
    assert (result.status, result.attempts) == (CallStatus.ERROR, 1)


async def test_slots_of_all_conversations_and_the_queue_budget() -> None:
    tool = limited(EchoTool({"execute": 0.05}), concurrency=2)
    gates = Gates(Gate, 5)
    async with session(gates, tool, "a") as one, session(gates, tool, "b") as two:
        answers = await asyncio.gather(*(opened.execute([HI, HI, HI]) for opened in (one, two)))
    assert tool.most_running == 2
    results = [result for answer in answers for result in answer]
    assert {result.status for result in results} == {CallStatus.OK}
    assert max(result.queue_s for result in results) > 0.05

    tool = limited(EchoTool({"execute": 0.3}), concurrency=1, queue_timeout_s=0.05)
    async with session(Gates(Gate, 5), tool) as opened:
        results = await opened.execute([HI, HI])
    assert [result.status for result in results] == [CallStatus.OK, CallStatus.OVERLOADED]
    assert "busy" in results[1].text
    assert tool.counts["execute"] == 1


async def test_a_cancelled_wait_gives_nothing_away() -> None:
    tool = limited(EchoTool({"execute": 0.05}), concurrency=1)
    gates = Gates(Gate, 5)
    async with session(gates, tool) as opened:
        tasks = [asyncio.create_task(opened.execute([HI])) for _ in range(4)]
        await asyncio.sleep(0.01)
        for task in tasks[:3]:
            task.cancel()
        assert (await tasks[3])[0].status is CallStatus.OK
        assert (await opened.execute([HI]))[0].status is CallStatus.OK


async def test_a_slot_that_comes_together_with_a_cancellation_is_handed_on() -> None:
    gate = Gates(Gate, 5).of(limited(EchoTool(), concurrency=1))
    assert gate.try_enter()
    first, second = (asyncio.create_task(gate.enter()) for _ in range(2))
    await asyncio.sleep(0)
    gate.leave(None)  # the first caller's turn
    first.cancel()
    assert await second is None
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not gate.try_enter()
    gate.leave(None)
    assert gate.try_enter()


class Leases:
    """Shared slots of one process, which remember the requests and the leases."""

    def __init__(self, free: bool = True) -> None:
        self.free = free
        self.held: set[str] = set()
        self.asked: list[tuple[str, int]] = []

    async def acquire(self, tool: str, limit: int, wait_s: float, lease_s: float) -> str | None:
        self.asked.append((tool, limit))
        if not self.free:
            await asyncio.sleep(0)
            return None
        self.held.add(lease := f"lease {len(self.asked)}")
        return lease

    async def release(self, tool: str, lease: str) -> None:
        self.held.remove(lease)


async def test_slots_shared_by_all_workers() -> None:
    tool = limited(EchoTool(), concurrency_total=3)
    leases = Leases()
    async with session(Gates(Gate, 5, leases), tool) as opened:
        results = await opened.execute([HI, HI])
    await asyncio.sleep(0)
    assert [result.status for result in results] == [CallStatus.OK, CallStatus.OK]
    assert (leases.asked, leases.held) == ([("echo", 3)] * 2, set())

    gates = Gates(Gate, 5, Leases(free=False))
    async with session(gates, tool) as opened:
        assert (await opened.execute([HI]))[0].status is CallStatus.OVERLOADED


async def test_the_cache_of_a_pure_tool() -> None:
    tool = limited(Flaky(), cache=1)
    gates = Gates(Gate, 5)
    async with session(gates, tool, "a") as opened:
        first, second = [(await opened.execute([HI]))[0] for _ in range(2)]
    async with session(gates, tool, "b") as opened:
        third = (await opened.execute([HI]))[0]
        await opened.execute([ToolCall("echo", '{"text": "other"}', "c2")])
        fourth = (await opened.execute([HI]))[0]
    assert [result.text for result in (first, second, third, fourth)] == ["hi"] * 4
    assert [result.cached for result in (first, second, third, fourth)] == [False, True, True, False]
    assert tool.counts["execute"] == 3


async def test_rows_with_other_kwargs_share_no_answer() -> None:
    class Row(EchoTool):
        pure = True

        async def create(self, instance_id: str, **kwargs: Any) -> None:
            self.created = kwargs["of"]

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
            return f"{self.created} {kwargs['of']}"

    tool, gates = limited(Row(), cache=8), Gates(Gate, 5)
    answers = []
    for created, executed in ((1, 2), (3, 2), (2, 1), (1, 2)):
        row = {"echo": {"create_kwargs": {"of": created}, "execute_kwargs": {"of": executed}}}
        async with ToolSession("r", {"echo": tool}, row, gates, 1) as opened:
            answers.append((await opened.execute([HI]))[0].text)
    assert answers == ["1 2", "3 2", "2 1", "1 2"]


async def test_an_error_is_not_kept() -> None:
    tool = limited(Flaky(1), cache=8)
    async with session(Gates(Gate, 5), tool) as opened:
        results = [(await opened.execute([HI]))[0].status for _ in range(2)]
    assert results == [CallStatus.ERROR, CallStatus.OK]


async def test_a_long_answer_loses_its_middle() -> None:
    tool = limited(EchoTool({"returns": "a" * 5_000_000 + "b" * 5_000_000}), response_characters=100)
    async with session(Gates(Gate, 5), tool) as opened:
        (result,) = await opened.execute([HI])
    assert result.text == "a" * 50 + "\n…[9999900 characters left out]…\n" + "b" * 50
    assert result.truncated


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"retries": 2}, "does not declare that calling it twice is safe; set `repeatable = True`"),
        ({"cache": 2}, "set `pure = True`"),
        ({"timeout": 2}, "did you mean 'timeout_s'"),
        ({"concurrency": 0}, "greater than 0"),
    ],
)
def test_limits_that_cannot_be(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        limited(EchoTool(), **limits)
    with pytest.raises(ConfigError, match="expected a mapping"):
        attach_limits(EchoTool(), 3, "limits")


def test_what_a_function_is_advised_is_the_way_of_functions() -> None:
    def look(key: str) -> str:
        """Look."""
        return key

    with pytest.raises(ConfigError, match=r"set `@tool\(repeatable=True\)` on the function, or retries to 0"):
        limited(function_tool(look), retries=2)
    with pytest.raises(ConfigError, match=r"set `@tool\(pure=True\)` on the function, or cache to 0"):
        limited(function_tool(look), cache=10)


async def test_a_forked_child_does_not_go_on_with_the_conversation() -> None:
    class Forks(EchoTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            child = os.fork()
            if child == 0:
                return "child"
            return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))  # noqa: ASYNC222  # it ends at once

    async with session(Gates(Gate, 5), Forks()) as opened:
        (result,) = await opened.execute([HI])
    assert result.text == "70"


async def test_a_tool_that_holds_up_the_loop_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Blocks(EchoTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            while not watch.found:  # the fault under test
                time.sleep(0.01)  # noqa: ASYNC251
            return "x"

    with caplog.at_level(logging.ERROR), CallWatch(blocked_s=0.2) as watch:
        async with session(Gates(Gate, 5), Blocks()) as opened:
            await opened.execute([HI])
        await asyncio.sleep(0.3)
    assert set(watch.found) == {"tool 'echo': execute"}
    assert "tool 'echo': execute has held up the event loop" in caplog.text
    assert "test_tool_limits.py:" in caplog.text


async def test_a_tool_that_keeps_the_interpreters_lock_is_named_when_it_gives_it_back() -> None:
    class Matches(EchoTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            length = 16
            while not watch.found:  # each search takes twice as long, and the watch can look only between two
                re.match(r"(a+)+$", "a" * length + "b")
                length += 1
            return "x"

    with CallWatch(blocked_s=0.2) as watch:
        async with session(Gates(Gate, 50), Matches()) as opened:
            await opened.execute([HI])
    assert set(watch.found) == {"tool 'echo': execute"}


async def test_a_contract_error_of_the_tool_itself_raises() -> None:
    async with session(Gates(Gate, 5), EchoTool({"execute": ToolContractError("wrong")})) as opened:
        with pytest.raises(ToolContractError, match="wrong"):
            await opened.execute([HI])


class InSteps(EchoTool):
    """A tool that waits several times, 0.05 s in all; once it has begun, another callback blocks the loop."""

    def __init__(self, blocked_s: float) -> None:
        super().__init__()
        self.blocked_s = blocked_s

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if self.blocked_s:
            asyncio.get_running_loop().call_later(0.01, hold_up, self.blocked_s)
        for _ in range(5):
            await asyncio.sleep(0.01)
            await asyncio.to_thread(int)
        return "in time"


async def test_a_call_is_not_late_because_another_one_held_up_the_loop() -> None:
    tool = limited(InSteps(90), timeout_s=60)
    async with session(Gates(Gate, 60), tool) as opened:
        (result,) = await opened.execute([HI])
    assert (result.status, result.text) == (CallStatus.OK, "in time")


async def test_a_call_that_hangs_is_late_though_the_loop_is_held_up() -> None:
    tool = limited(EchoTool({"execute": "hang"}), timeout_s=0.2)
    loop = asyncio.get_running_loop()
    async with session(Gates(Gate, 60), tool) as opened:
        for after_s in (0.01, 0.1, 0.5):
            loop.call_later(after_s, hold_up, 0.15)
        (result,) = await opened.execute([HI])
    assert result.status is CallStatus.TIMEOUT


class HeldUpLoop(asyncio.SelectorEventLoop):
    """A loop whose clock moves only when a callback reports that it blocks the loop."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def hold_up(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("step_s", [0.03, 0.1, 0.4, 3.0])
def test_on_a_loop_that_is_always_busy_a_call_is_late_after_twice_its_limit(step_s: float) -> None:
    async def main() -> None:
        async def busy() -> None:
            while True:
                loop.hold_up(step_s)
                await asyncio.sleep(0)

        others = [asyncio.create_task(busy()) for _ in range(8)]
        assert not await done_within(loop.create_future(), Alarms(1.0))
        for other in others:
            other.cancel()

    with contextlib.closing(HeldUpLoop()) as loop:
        loop.run_until_complete(main())
        # asyncio needs two turns of the loop for a timer, of which there are two, and one for a future.
        assert 1.0 <= loop.now <= 2.25 + 5 * 8 * step_s


@pytest.mark.parametrize("held_s", [0.9, 1.5, 100.0])
def test_a_loop_that_stood_still_once_makes_no_call_late_however_long(held_s: float) -> None:
    async def in_steps() -> None:
        for _ in range(10):
            loop.hold_up(0.01)
            await asyncio.sleep(0)

    async def main() -> bool:
        loop.call_soon(loop.hold_up, held_s)
        return await done_within(asyncio.create_task(in_steps()), Alarms(1.0))

    with contextlib.closing(HeldUpLoop()) as loop:
        assert loop.run_until_complete(main())


async def test_the_queue_is_not_left_because_another_one_held_up_the_loop() -> None:
    tool = limited(InSteps(60), concurrency=1, queue_timeout_s=40)
    gates = Gates(Gate, 60)
    async with session(gates, tool, "a") as first, session(gates, tool, "b") as second:
        (one,), (two,) = await asyncio.gather(first.execute([HI]), second.execute([HI]))
    assert (one.status, two.status) == (CallStatus.OK, CallStatus.OK)


async def test_a_worker_process_is_not_late_because_another_one_held_up_the_loop(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import socket, time\n"
        "lines = socket.socket(fileno=0).makefile('rw')\n"
        "print('{}', file=lines, flush=True)\n"
        "for line in lines:\n"
        "    time.sleep(0.1)\n"
        "    print('{\"a\": 1}', file=lines, flush=True)\n"
    )
    pool = WorkerPool(script, {}, timeout_s=60, processes=1)
    await pool.ask({})  # it has started
    asyncio.get_running_loop().call_later(0.01, hold_up, 90)
    assert await pool.ask({}) == {"a": 1}
    await pool.close()


async def test_a_worker_that_was_stopped_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "answers.py"
    script.write_text(
        "import os, socket\n"
        "lines = socket.socket(fileno=0).makefile('rw')\n"
        "print('{}', file=lines, flush=True)\n"
        "for line in lines:\n"
        "    print('{\"process\": %d}' % os.getpid(), file=lines, flush=True)\n"
    )
    pool = WorkerPool(script, {}, timeout_s=60.0, processes=1)
    first = await pool.ask({})
    worker = psutil.Process(first["process"])
    worker.suspend()
    while worker.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110 - the state of a process knows no event
        await asyncio.sleep(0.001)
    assert await pool.ask({}) == first
    await pool.close()

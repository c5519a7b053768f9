"""MCP tools with real servers, over stdio and HTTP, that die, hang, freeze, flood and lie."""

import asyncio
import gc
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import uvloop

from tests.conftest import free_port, has_ended
from tests.servers.older_http import OlderHttpServer
from tests.servers.starting import (
    PLAIN,
    WORKSHOP,
    BreakingRoute,
    HttpServer,
    Tools,
    by_name,
    children,
    gone,
    open_files,
    plain,
    text,
    until,
)
from verl_multiturn.calls.invocation import TimedOutError
from verl_multiturn.calls.limits import CallLimits, outage_rules
from verl_multiturn.calls.outages.causes import cause_of, next_try_s
from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.mcp_tools import mcp_tools
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.results import CallResult, CallStatus
from verl_multiturn.tools.running.session import ToolSession
from verl_multiturn.tools.services.http_client import UnavailableError


@pytest.fixture(scope="module")
def http_server() -> Iterator[HttpServer]:
    server = HttpServer()
    yield server
    server.stop()


@pytest.fixture(scope="module", params=["stdio", "http"])
def workshop(request: pytest.FixtureRequest, http_server: HttpServer) -> Tools:
    settings = (
        {"command": "python", "args": [WORKSHOP, "stdio"]} if request.param == "stdio" else {"url": http_server.url}
    )
    return by_name(mcp_tools(settings, "tools.yaml: tools[0].mcp"))


@pytest.fixture(scope="module")
def stdio_workshop() -> Tools:
    return by_name(mcp_tools({"command": "python", "args": [WORKSHOP, "stdio"]}, "tools.yaml: tools[0].mcp"))


one_loop = pytest.mark.asyncio(loop_scope="module")
"""A test with `tools` or `stdio`: its server goes on behind it, since each start takes a second of CPU."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tools(workshop: Tools) -> AsyncIterator[Tools]:
    yield workshop
    await workshop["add"].aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stdio(stdio_workshop: Tools) -> AsyncIterator[Tools]:
    yield stdio_workshop
    await stdio_workshop["add"].aclose()


async def in_session(tools: Tools, *calls: tuple[str, dict[str, Any]], timeout_s: float = 60) -> list[CallResult]:
    """Execute the calls of one turn, as a conversation does."""
    asked = [ToolCall(name, json.dumps(arguments), f"c{i}") for i, (name, arguments) in enumerate(calls)]
    async with ToolSession("r1", tools, {}, Gates(Gate, timeout_s), 100) as session:
        return await session.execute(asked)


# Answers of servers.


@one_loop
async def test_what_a_server_answers(tools: Tools) -> None:
    assert await text(tools, "add", a=1, b=2) == "3"
    assert json.loads(await text(tools, "structured")) == {"answer": 42, "unit": "µm"}
    assert await text(tools, "link") == "https://example.org/more"
    with pytest.raises(ValueError, match="no such shelf"):
        await text(tools, "fail", text="no such shelf")
    picture = await tools["picture"].execute("r1", {})
    assert picture.text == "a square"
    assert picture.image is not None
    assert [(image.size, image.getpixel((0, 0))) for image in picture.image] == [((8, 8), (255, 0, 0))]
    with pytest.raises(RuntimeError, match=r"an image that cannot be read: .* image file <_io\.BytesIO object>$"):
        await tools["broken_picture"].execute("r1", {})


@one_loop
async def test_a_name_that_no_schema_allows_is_mapped(tools: Tools) -> None:
    assert tools["odd_name_with_signs"].remote_name == "odd name/with:signs"
    assert await text(tools, "odd_name_with_signs") == "odd"


@one_loop
async def test_a_result_reaches_the_conversation(tools: Tools) -> None:
    results = await in_session(tools, ("add", {"a": 2, "b": 3}), ("fail", {"text": "no"}), ("add", {"a": "x", "b": 1}))
    assert [result.status for result in results] == [CallStatus.OK, CallStatus.ERROR, CallStatus.BAD_ARGUMENTS]
    assert results[0].text == "5"
    assert results[1].text == "Error executing tool fail: no"  # the SDK marks it


@one_loop
async def test_ten_megabytes_are_cut(tools: Tools) -> None:
    (flood,) = await in_session(tools, ("flood", {"megabytes": 10}))
    assert flood.status is CallStatus.OK
    assert flood.truncated
    assert len(flood.text) < 200_000


async def test_an_older_server_that_prints_and_asks_is_refused_what_it_asks_for() -> None:
    tools = by_name(plain("asks"))
    answer = await text(tools, "ask")
    await tools["ask"].aclose()
    assert answer == "sampling/createMessage: Sampling not supported; elicitation/create: Elicitation not supported"


@one_loop
async def test_what_no_connection_can_send_breaks_none(tools: Tools) -> None:
    before = await text(tools, "pid")
    assert await text(tools, "echo", text="\ud800 \x00 \u202e 🦀") == "? \x00 \u202e 🦀"
    assert await text(tools, "pid") == before


# Concurrency and cancellation.


@one_loop
async def test_fifty_calls_at_once_over_one_connection(tools: Tools) -> None:
    async with asyncio.timeout(60):
        met = await asyncio.gather(*(text(tools, "meet", count=50) for _ in range(50)))
        answers = await asyncio.gather(*(text(tools, "echo", text=str(i)) for i in range(50)))
        pids = await asyncio.gather(*(text(tools, "pid") for _ in range(5)))
    assert met == ["met"] * 50
    assert answers == [str(i) for i in range(50)]
    assert len(set(pids)) == 1


@one_loop
async def test_a_call_that_hangs_is_cut_and_cancelled_at_the_server(tools: Tools) -> None:
    before = await text(tools, "pid")
    (hung,) = await in_session(tools, ("hang", {"name": "cut"}), timeout_s=3.0)
    assert hung.status is CallStatus.TIMEOUT

    async def was_told() -> bool:
        return "cut" in (await text(tools, "cancellations")).split()

    await until(was_told)
    assert await text(tools, "pid") == before


@one_loop
async def test_cancelled_calls_leave_the_others_alone(tools: Tools) -> None:
    calls = [asyncio.create_task(text(tools, "echo", text=str(i), delay_s=60 if i < 20 else 0.2)) for i in range(40)]
    for moment in range(4):
        await asyncio.sleep(0.02 * moment)
        for call in calls[moment * 5 : moment * 5 + 5]:
            call.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [result for result in results[:20] if not isinstance(result, asyncio.CancelledError)] == []
    assert results[20:] == [str(i) for i in range(20, 40)]


@one_loop
async def test_a_first_call_that_is_cancelled_does_not_stop_the_connection(stdio: Tools) -> None:
    first = asyncio.create_task(text(stdio, "pid"))
    second = asyncio.create_task(text(stdio, "pid"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == await text(stdio, "pid")


async def test_a_broken_tcp_connection_ends_its_own_call_alone(http_server: HttpServer) -> None:
    async with BreakingRoute(http_server.port, b"break here") as route:
        tools = by_name(await asyncio.to_thread(mcp_tools, {"url": route.url}, "tools.yaml: tools[0].mcp"))
        try:
            slow = [asyncio.create_task(text(tools, "echo", text=str(i), delay_s=1.0)) for i in range(5)]
            await text(tools, "add", a=1, b=2)  # on their connection
            with pytest.raises(RuntimeError, match="the tool server ended during the call; call it again"):
                await text(tools, "echo", text="break here")
            assert route.breaks == 1
            assert await text(tools, "add", a=1, b=2) == "3"
            assert await asyncio.gather(*slow) == [str(i) for i in range(5)]
        finally:
            await tools["add"].aclose()


JSON = {"content-type": "application/json"}
BREAKS: dict[str, tuple[int, dict[str, str], bytes]] = {
    "headers": (200, JSON, b""),
    "json": (200, JSON, b'{"jsonrpc"'),
    "capitals": (200, {"content-type": "Application/JSON"}, b"{"),
    "error": (400, JSON, b"{"),
    "redirect": (307, {"location": "/mcp/"}, b"<html>"),
    "no_gzip": (200, {**JSON, "content-encoding": "gzip", "content-length": "5"}, b"plain"),
    "events": (200, {"content-type": "text/event-stream"}, b"event: message\n"),
}


@pytest.mark.parametrize("case", BREAKS)
async def test_an_answer_that_breaks_off_ends_its_own_call_alone(case: str) -> None:
    server = OlderHttpServer()
    tools = by_name(mcp_tools({"url": server.url}, "here"))
    try:
        before = await text(tools, "session")
        server.release.clear()
        slow = asyncio.create_task(text(tools, "session"))
        await until(lambda: _is(server.held == 1))
        server.broken = BREAKS[case]
        with pytest.raises(RuntimeError, match="the tool server ended during the call; call it again"):
            await text(tools, "session")
        server.release.set()
        assert await slow == before
    finally:
        server.release.set()
        await tools["session"].aclose()
        server.stop()


async def _is(found: bool) -> bool:
    return found


async def test_a_notification_whose_answer_does_not_end_stops_no_call() -> None:
    server = OlderHttpServer()
    tools = by_name(mcp_tools({"url": server.url}, "here"))
    try:
        before = await text(tools, "session")
        server.release.clear()
        server.endless = "notifications/cancelled"
        cancelled = asyncio.create_task(text(tools, "session"))
        await until(lambda: _is(server.held == 1))
        cancelled.cancel()
        await until(lambda: _is(server.begun == 1))
        after = asyncio.create_task(text(tools, "session"))
        await until(lambda: _is(server.held == 2))
        server.release.set()
        assert await after == before
    finally:
        server.release.set()
        await tools["session"].aclose()
        server.stop()


async def test_a_session_whose_end_is_not_answered_is_given_up() -> None:
    server = OlderHttpServer()
    tools = by_name(mcp_tools({"url": server.url, "start_timeout_s": 5}, "here"))
    try:
        await text(tools, "session")
        server.release.clear()
        server.endless = "DELETE"
        await tools["session"].aclose()
        assert server.sessions
    finally:
        server.release.set()
        server.stop()


async def test_a_status_is_an_outage_whatever_its_body() -> None:
    server = OlderHttpServer()
    tools = by_name(mcp_tools({"url": server.url}, "here"))
    try:
        await text(tools, "session")
        server.broken = 503, JSON, b"{"
        with pytest.raises(UnavailableError, match=r"failed \(HTTP 503\)"):
            await text(tools, "session")
    finally:
        await tools["session"].aclose()
        server.stop()


# Servers that die.


@one_loop
async def test_a_server_that_dies_answers_every_call_and_the_next_one_finds_a_new_server(stdio: Tools) -> None:
    before = await text(stdio, "pid")
    hanging = [("hang", {}) for _ in range(5)]
    async with asyncio.timeout(120):
        results = await in_session(stdio, *hanging, ("die", {"delay_s": 0.1}))
    assert [result.status for result in results] == [CallStatus.ERROR] * 6
    assert results[0].text == "Error: RuntimeError: the tool server ended during the call; call it again"
    after = await text(stdio, "pid")
    assert after != before


@one_loop
async def test_a_server_that_dies_between_two_calls_is_not_noticed(stdio: Tools) -> None:
    before = int(await text(stdio, "pid"))
    os.kill(before, 9)
    connection = stdio["pid"].server._servers._connection

    async def has_ended() -> bool:
        return not connection.takes_calls

    await until(has_ended)
    assert int(await text(stdio, "pid")) != before


async def test_an_http_server_that_dies_and_comes_back() -> None:
    server = HttpServer(free_port())
    tools = by_name(mcp_tools({"url": server.url}, "tools.yaml: tools[0].mcp"))
    try:
        assert await text(tools, "add", a=1, b=2) == "3"
        async with asyncio.timeout(120):
            results = await in_session(tools, ("hang", {}), ("hang", {}), ("die", {"delay_s": 0.1}))
            assert [result.status for result in results] == [CallStatus.ERROR] * 3
            assert all("the tool server ended during the call" in result.text for result in results)
            server.process.wait()
            (gone,) = await in_session(tools, ("pid", {}))
        assert gone.status is CallStatus.ERROR
        assert "the tool server" in gone.text
        again = HttpServer(server.port)
        try:
            assert int(await text(tools, "pid")) == again.process.pid
        finally:
            again.stop()
    finally:
        await tools["add"].aclose()
        server.stop()


async def test_an_older_http_server_that_forgets_its_sessions() -> None:
    server = OlderHttpServer()
    tools = by_name(mcp_tools({"url": server.url}, "here"))
    try:
        before = await text(tools, "session")
        server.sessions.clear()
        with pytest.raises(RuntimeError, match="call it again"):
            await text(tools, "session")
        assert await text(tools, "session") != before
        await tools["session"].aclose()
        assert server.sessions == set()
    finally:
        await tools["session"].aclose()
        server.stop()


REFUSALS: dict[int, tuple[str, dict[str, str]]] = {
    401: (r"does not take the key \(HTTP 401\); correct mcp\.headers", {}),
    403: (r"does not take the key \(HTTP 403\); correct mcp\.headers", {}),
    405: (r"is not at this address \(HTTP 405\); correct mcp\.url", {}),
    407: (r"is behind a proxy that refuses \(HTTP 407\); correct the password in HTTP_PROXY", {}),
    308: (r"is not at this address \(HTTP 308\); correct mcp\.url", {"location": "http://127.0.0.2:9/mcp"}),
    302: (r"is not at this address \(HTTP 302\); correct mcp\.url", {"location": "/other"}),
    429: (r"failed \(HTTP 429\)", {"retry-after": "7"}),
    503: (r"failed \(HTTP 503\)", {"retry-after": "7"}),
    504: (r"failed \(HTTP 504\)", {}),
}


@pytest.mark.parametrize("status", REFUSALS)
async def test_a_status_that_says_that_the_server_is_not_there_is_an_outage(status: int) -> None:
    server = OlderHttpServer()
    tools = by_name(mcp_tools({"url": server.url}, "here"))
    problem, headers = REFUSALS[status]
    try:
        before = await text(tools, "session")
        server.refusal = status, headers
        with pytest.raises(UnavailableError, match=f"the tool server {problem}") as caught:
            await text(tools, "session", name="server/discover")  # a method of the protocol, which this is not
        assert [cause_of(caught.value, whose) for whose in ("model", "outage")] == [
            "model" if status == 504 else "outage",
            "outage",
        ]
        assert next_try_s(caught.value) == (7 if "retry-after" in headers else None)
        assert server.asked == 1
        server.refusal = None
        assert await text(tools, "session") == before, "the session lives on"
        await tools["session"].aclose()
        server.refusal = status, headers
        with pytest.raises(ConnectionError, match=problem) as unavailable:
            await text(tools, "session")
        assert cause_of(unavailable.value, "model") == "outage"
        assert next_try_s(unavailable.value) == (7 if "retry-after" in headers else None)
        with pytest.raises(ConfigError, match=problem):
            mcp_tools({"url": server.url}, "here")
    finally:
        await tools["session"].aclose()
        server.stop()


@pytest.mark.parametrize("status", [400, 413, 422, 500])
async def test_another_status_is_the_models(status: int) -> None:
    server = OlderHttpServer()
    tools = by_name(mcp_tools({"url": server.url}, "here"))
    try:
        await text(tools, "session")
        server.refusal = status, {}
        with pytest.raises(ValueError, match="Server returned an error response") as caught:
            await text(tools, "session")
        assert cause_of(caught.value, "outage") == "model"
    finally:
        await tools["session"].aclose()
        server.stop()


async def test_an_address_without_a_server_is_an_outage() -> None:
    server = OlderHttpServer()
    tools = by_name(mcp_tools({"url": server.url}, "here"))
    try:
        await tools["session"].aclose()
        server.refusal = 404, {}
        with pytest.raises(ConnectionError, match=r"not at this address \(HTTP 404\); correct mcp\.url") as caught:
            await text(tools, "session")
        assert cause_of(caught.value, "model") == "outage"
    finally:
        await tools["session"].aclose()
        server.stop()


async def test_a_server_that_does_not_start_again_and_then_does(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    program = f"test -e {lock} && exit 1; exec {sys.executable} {PLAIN} asks"
    tools = by_name(mcp_tools({"command": "sh", "args": ["-c", program]}, "here"))
    await tools["ask"].aclose()
    lock.touch()
    for _ in range(3):
        with pytest.raises(ConnectionError, match="the tool server is not available") as caught:
            await text(tools, "ask")
        assert cause_of(caught.value, "model") == "outage"
    lock.unlink()
    assert "Sampling" in await text(tools, "ask")
    await tools["ask"].aclose()


@one_loop
async def test_code_that_ends_its_server_or_never_ends_is_no_outage(stdio: Tools) -> None:
    for name, arguments in (("die", {"delay_s": 0.1}), ("die", {"delay_s": 0.1})):
        with pytest.raises(RuntimeError, match="ended during the call") as caught:
            await text(stdio, name, **arguments)
        assert cause_of(caught.value, "outage") == "bug"
    rules = outage_rules(stdio["die"], CallLimits(), "here")
    assert cause_of(TimedOutError(), rules.timeouts or "model") == "model"


@one_loop
async def test_a_frozen_server_is_replaced(stdio: Tools) -> None:
    before = int(await text(stdio, "pid"))
    frozen = await in_session(stdio, ("freeze", {}), *[("pid", {}) for _ in range(7)], timeout_s=4)
    assert {result.status for result in frozen} == {CallStatus.TIMEOUT}
    assert int(await text(stdio, "pid")) != before
    await gone(before)


# Nothing remains.


async def test_nothing_is_left_after_aclose(workshop: Tools) -> None:
    async def use() -> None:
        await asyncio.gather(*(text(workshop, "echo", text="x") for _ in range(20)))
        hanging = asyncio.create_task(text(workshop, "hang"))
        await asyncio.sleep(0.05)
        hanging.cancel()
        await asyncio.wait({hanging})
        await workshop["add"].aclose()

    await use()
    before = children(), open_files(), set(threading.enumerate()), asyncio.all_tasks()
    await use()

    async def closed() -> bool:
        return open_files() <= before[1] and set(threading.enumerate()) <= before[2]

    await until(closed)
    assert (children(), asyncio.all_tasks()) == (before[0], before[3])


@one_loop
async def test_aclose_during_a_call_ends_the_call(tools: Tools) -> None:
    hanging = asyncio.create_task(text(tools, "hang"))
    await text(tools, "pid")
    await tools["add"].aclose()
    with pytest.raises(RuntimeError, match="ended during the call"):
        await hanging
    assert await text(tools, "add", a=1, b=1) == "2"


async def test_aclose_before_the_server_has_started(tmp_path: Path) -> None:
    before, lock = children(), tmp_path / "lock"
    program = f"test -e {lock} && sleep 600; exec {sys.executable} {PLAIN} asks"
    tools = by_name(mcp_tools({"command": "sh", "args": ["-c", program]}, "here"))
    await tools["ask"].aclose()
    lock.touch()
    first = asyncio.create_task(text(tools, "ask"))
    while children() == before:  # noqa: ASYNC110 a process sets no asyncio.Event
        await asyncio.sleep(0.005)
    await tools["ask"].aclose()
    with pytest.raises(ConnectionError, match="it was closed"):
        await first
    assert children() == before


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_end_of_a_loop_leaves_the_server_to_the_next_one(stdio_workshop: Tools, new_loop: Any) -> None:
    async def main(name: str) -> tuple[int, list[str]]:
        hanging = asyncio.create_task(text(stdio_workshop, "hang", name=name))
        answers = await text(stdio_workshop, "pid"), await text(stdio_workshop, "cancellations")
        assert not hanging.done()
        return int(answers[0]), answers[1].split()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        first, _ = runner.run(main("of the first loop"))
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(main("of the second loop"))[0] == first
        runner.run(stdio_workshop["add"].aclose())
    assert first not in children()


async def test_the_server_that_listed_the_tools_serves_them_and_ends_with_them() -> None:
    before = children()
    tools = by_name(mcp_tools({"command": "python", "args": [WORKSHOP, "stdio"]}, "here"))
    started = children() - before
    assert len(started) == 2  # the guard and the program
    pid = int(await text(tools, "pid"))
    assert pid in started
    assert children() - before == started
    del tools
    gc.collect()
    for each in started:  # the guard ends after the program
        await gone(each)


@pytest.mark.parametrize("started_by", ["itself", "a shell"])
def test_a_frozen_server_ends_with_a_worker_that_is_killed(started_by: str) -> None:
    program = f"""
import asyncio
from verl_multiturn.tools.mcp_tools import mcp_tools

command = ["python", {WORKSHOP!r}, "stdio"]
if {started_by!r} == "a shell":  # which stays, as the one that npx starts
    command = ["sh", "-c", {shlex.join([sys.executable, WORKSHOP, "stdio"])!r} + "; true"]
tools = {{t.name: t for t in mcp_tools({{"command": command[0], "args": command[1:]}}, "here")}}

async def main():
    print((await tools["pid"].execute("r1", {{}})).text, flush=True)
    await tools["freeze"].execute("r1", {{}})

asyncio.run(main())
"""
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    server = psutil.Process(int(worker.stdout.readline()))
    while server.status() != "sleeping":
        time.sleep(0.01)
    time.sleep(0.2)
    worker.kill()
    worker.communicate()
    deadline = time.monotonic() + 120
    while not has_ended(server):
        assert time.monotonic() < deadline
        time.sleep(0.01)

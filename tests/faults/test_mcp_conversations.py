"""MCP servers of `per: conversation`: each conversation has its own, whatever dies, hangs, waits or is killed."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import ROOT, has_ended
from tests.servers.older_http import OlderHttpServer
from tests.servers.starting import WORKSHOP, HttpServer, Tools, by_name, children, text, until
from verl_multiturn.calls.limits import set_limits
from verl_multiturn.calls.outages.process import OutageEndError, Outages
from verl_multiturn.calls.slots import Gates
from verl_multiturn.calls.timeline import Timeline, kept
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.loading.call_limits import ToolLimits
from verl_multiturn.tools.mcp_tools import mcp_tools
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.results import CallResult, CallStatus
from verl_multiturn.tools.running.session import ToolSession
from verl_multiturn.tools.services import mcp_transport

NOTES = str(ROOT / "tests" / "servers" / "notes.py")


def notes(*options: str, **settings: Any) -> Tools:
    """Return the tools of a server of notes for each conversation."""
    given = {"command": "python", "args": [NOTES, *options], "per": "conversation", "ready": 2, **settings}
    return by_name(mcp_tools(given, "tools.yaml: tools[0].mcp"))


def session(name: str, tools: Tools, timeout_s: float = 60, outages: Outages | None = None) -> ToolSession:
    return ToolSession(name, tools, {}, Gates(Gate, timeout_s, None, outages), 100)


async def ask(session: ToolSession, *calls: tuple[str, dict[str, Any]]) -> list[CallResult]:
    return await session.execute(
        [ToolCall(name, json.dumps(arguments), f"c{index}") for index, (name, arguments) in enumerate(calls)]
    )


async def closed(tools: Tools) -> None:
    await next(iter(tools.values())).aclose()


def log_of(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()]


# State.


async def test_each_conversation_has_the_state_of_its_own_server_and_processes_are_counted(tmp_path: Path) -> None:
    before, log = children(), tmp_path / "log"
    tools = notes(f"log={log}")
    assert len(log_of(log)) == 1, "reading the YAML starts one process"
    pids: list[str] = []

    async def converse(index: int) -> None:
        async with session(f"r{index}", tools) as mine:
            for note in range(3):
                await ask(mine, ("add", {"text": f"{index}.{note}"}))
                await asyncio.sleep(0)
            read, pid = await ask(mine, ("read", {}), ("pid", {}))
            assert read.text.split() == [f"{index}.0", f"{index}.1", f"{index}.2"]
            pids.append(pid.text)

    for batch in range(2):
        await asyncio.gather(*(converse(batch * 8 + index) for index in range(8)))
    assert len(set(pids)) == 16, "no process serves two conversations"
    await closed(tools)
    started = log_of(log)
    assert str(started[0]) in pids, "the process that listed the tools serves a conversation"
    assert {int(pid) for pid in pids} <= set(started)
    assert len(started) <= 16 + 2
    assert children() == before


async def test_the_servers_of_the_sdk_over_both_transports() -> None:
    server = HttpServer()
    try:
        stdio = by_name(
            mcp_tools({"command": "python", "args": [WORKSHOP, "stdio"], "per": "conversation", "ready": 0}, "here")
        )
        async with session("r1", stdio) as one, session("r2", stdio) as two:
            pids = [(await ask(each, ("pid", {})))[0].text for each in (one, two)]
            beside = await ask(one, *[("beside", {})] * 3)
            assert [each.text for each in beside] == ["1"] * 3, "calls of a turn run one after the other"
        assert len(set(pids)) == 2
        await closed(stdio)
        http = by_name(mcp_tools({"url": server.url, "per": "conversation"}, "here"))
        async with session("r1", http) as mine:
            assert (await ask(mine, ("add", {"a": 1, "b": 2})))[0].text == "3"
        await closed(http)
    finally:
        server.stop()


async def test_over_http_each_conversation_has_a_session() -> None:
    server = OlderHttpServer()
    tools = by_name(mcp_tools({"url": server.url, "per": "conversation", "most": 3}, "here"))
    try:
        async with session("r1", tools) as one, session("r2", tools) as two:
            found = [(await ask(each, ("session", {})))[0].text for each in (one, two, one)]
            assert found[0] == found[2] != found[1]
            server.sessions.discard(found[0])
            (gone,) = await ask(one, ("session", {}))
            assert gone.status is CallStatus.ERROR
            assert "does not come back, and its state is lost" in gone.text
        await closed(tools)
        assert server.sessions == set(), "release ends the session"
    finally:
        await closed(tools)
        server.stop()


async def test_a_server_over_http_without_sessions_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    server = OlderHttpServer()
    whole = server.answer

    def without(request: dict[str, Any], _: str | None) -> Any:
        one = next(iter(server.sessions), None)
        status, content, _headers = whole(request, one)
        return status, content, {}

    monkeypatch.setattr(server, "answer", without)
    try:
        with pytest.raises(ConfigError, match=r"opens no sessions.*put \$\{conversation.id\} into its url"):
            mcp_tools({"url": server.url, "per": "conversation"}, "here")
        named = {"url": server.url + "?of=${conversation.id}", "per": "conversation"}
        tools = by_name(mcp_tools(named, "here"))
        async with session("r1", tools) as mine:
            assert (await ask(mine, ("session", {})))[0].status is CallStatus.OK
        await closed(tools)
    finally:
        server.stop()


async def test_the_folder_of_a_conversation_is_its_own_and_ends_with_it() -> None:
    tools = notes("file=${conversation.folder}/notes", "of=${conversation.id}", cwd="${conversation.folder}")
    async with session("r1", tools) as one, session("r2", tools) as two:
        places = [json.loads((await ask(each, ("where", {})))[0].text) for each in (one, two)]
        await ask(one, ("add", {"text": "mine"}))
        assert (Path(places[0][0]) / "notes").read_text() == "mine"
        assert os.listdir(places[1][0]) == []
        assert places[0][1] == f"file={places[0][0]}/notes"
        assert places[0][2] != places[1][2]
    await closed(tools)
    assert not {os.path.basename(place) for place, *_ in places} & set(os.listdir(tempfile.gettempdir()))


async def test_a_row_may_have_some_of_the_tools_and_the_last_release_ends_the_server(tmp_path: Path) -> None:
    before = children()
    tools = notes(ready=0)
    async with session("r1", {name: tools[name] for name in ("add", "read")}) as mine:
        await ask(mine, ("add", {"text": "a"}))
        assert (await ask(mine, ("read", {})))[0].text == "a"
    await tools["add"].create("r2")
    await tools["read"].create("r2")
    await tools["add"].execute("r2", {"text": "b"})
    await tools["add"].release("r2")
    await tools["add"].release("r2")
    assert await text_of(tools, "read", "r2") == "b", "another tool still uses the server"
    await tools["read"].release("r2")
    with pytest.raises(RuntimeError, match="between `create` and `release`"):
        await tools["read"].execute("r2", {})
    await closed(tools)
    assert children() == before


async def text_of(tools: Tools, name: str, conversation: str) -> str:
    return (await tools[name].execute(conversation, {})).text


# Places.


async def test_conversations_beyond_the_most_wait_in_order_and_the_wait_is_counted(tmp_path: Path) -> None:
    log, most = tmp_path / "log", 3
    tools = notes(f"log={log}", most=most, ready=2)
    ended: list[int] = []
    alive: list[int] = []

    async def converse(index: int) -> float:
        timeline = Timeline()
        with kept(timeline):
            async with session(f"r{index}", tools) as mine:
                await ask(mine, ("add", {"text": str(index)}))
                alive.append(sum(psutil.pid_exists(pid) and not gone(pid) for pid in log_of(log)))
                assert (await ask(mine, ("read", {})))[0].text == str(index)
        ended.append(index)
        assert mine.place_s is not None
        waited = [span for span in timeline.spans if span.kind == "wait"]
        assert len(waited) == 1
        return mine.place_s

    waits = await asyncio.gather(*(converse(index) for index in range(9)))
    assert max(alive) <= most
    assert min(waits) < max(waits)
    assert sorted(ended) == list(range(9))
    await closed(tools)


def gone(pid: int) -> bool:
    try:
        return has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


async def test_a_conversation_without_a_place_in_time_ends_as_in_an_outage() -> None:
    tools = notes(most=1, ready=1)
    for tool in tools.values():
        set_limits(tool, {"queue_timeout_s": 0.2}, ToolLimits, "here")
    async with session("r1", tools) as mine:
        with pytest.raises(OutageEndError, match=r"no place was free within 0.2 s: all 1 servers of 'mcp.most'"):
            async with session("r2", tools):
                raise AssertionError("not reached")
        assert (await ask(mine, ("echo", {"text": "on"})))[0].text == "on"
    async with session("r3", tools) as later:
        assert (await ask(later, ("read", {})))[0].text == ""
    await closed(tools)


async def test_who_waits_and_is_cancelled_takes_no_place() -> None:
    tools = notes(most=1, ready=0)
    async with session("r1", tools):
        waiting = asyncio.create_task(session("r2", tools).__aenter__())
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
    async with session("r3", tools) as mine:
        assert (await ask(mine, ("echo", {"text": "on"})))[0].text == "on"
    await closed(tools)


async def test_two_entries_with_one_place_each_do_not_lock_each_other_out() -> None:
    one, other = notes(most=1, ready=0, prefix="one_"), notes(most=1, ready=0, prefix="other_")
    orders = [{**one, **other}, {**other, **one}]

    async def converse(index: int) -> None:
        async with session(f"r{index}", orders[index % 2]) as mine:
            await ask(mine, ("one_echo", {"text": "a"}), ("other_echo", {"text": "b"}))

    async with asyncio.timeout(120):
        await asyncio.gather(*(converse(index) for index in range(6)))
    await closed(one)
    await closed(other)


# Faults.


async def test_a_server_that_dies_in_create_is_an_outage_and_the_next_one_may_live(tmp_path: Path) -> None:
    flag = tmp_path / "dies"
    tools = notes(f"dies={flag}", ready=0)
    flag.touch()
    async with session("r1", tools, outages=Outages()) as mine:
        (call,) = await ask(mine, ("read", {}))
        assert call.text == (
            "Error: the tool is not available (ServerAwayError: the tool server is not available (Connection closed))"
        )
        assert mine.outages
    flag.unlink()
    async with session("r2", tools) as mine:
        assert (await ask(mine, ("echo", {"text": "on"})))[0].text == "on"
    await closed(tools)


async def test_ready_servers_that_end_are_replaced_one_after_the_other_with_pauses(tmp_path: Path) -> None:
    flag, log = tmp_path / "dies", tmp_path / "log"
    tools = notes(f"dies={flag}", f"log={log}", ready=1)
    pool = tools["echo"].server._servers
    async with session("r1", tools):
        flag.touch()
    while pool._failures < 2 or pool._pause is None:  # noqa: ASYNC110 a process sets no asyncio.Event
        await asyncio.sleep(0.02)
    # The one that listed the tools, the first ready one, one for each failure, and the one that starts now.
    assert len(log_of(log)) <= pool._failures + 3
    flag.unlink()
    for number in range(2, 100):  # one that had begun before may still be handed out
        async with session(f"r{number}", tools) as mine:
            (call,) = await ask(mine, ("echo", {"text": "on"}))
        if call.status is CallStatus.OK:
            break
    assert call.text == "on"
    await closed(tools)


async def test_a_server_that_dies_in_a_call_does_not_come_back() -> None:
    tools = notes()
    async with session("r1", tools) as mine, session("r2", tools) as other:
        await ask(mine, ("add", {"text": "a"}))
        calls = [await ask(mine, ("die", {})), await ask(mine, ("read", {}))]
        assert [call.status for (call,) in calls] == [CallStatus.ERROR] * 2
        assert [call.text.partition(": ")[2] for (call,) in calls] == [
            "RuntimeError: the tool server ended during the call; it does not come back, and its state is lost",
            "RuntimeError: the tool server has ended; it does not come back, and its state is lost",
        ]
        assert (await ask(other, ("echo", {"text": "on"})))[0].text == "on"
    await closed(tools)


async def test_a_server_that_stays_holds_up_no_release_and_keeps_its_place_until_it_has_ended() -> None:
    before = children()
    tools = notes("stays=1", most=1, ready=0)
    async with session("r1", tools) as mine:
        pid = int((await ask(mine, ("pid", {})))[0].text)
    assert pid in children(), "release does not wait for it"
    async with session("r2", tools) as mine:
        assert pid not in children()
        assert int((await ask(mine, ("pid", {})))[0].text) != pid
    await closed(tools)
    assert children() == before


@pytest.mark.parametrize("moment_s", [0.0, 0.01, 0.1, 0.3])
async def test_a_cancelled_conversation_leaves_nothing(tmp_path: Path, moment_s: float) -> None:
    before = children()
    (tmp_path / "slow").touch()
    tools = notes(f"slow={tmp_path / 'slow'}", "file=${conversation.folder}/x", f"log={tmp_path / 'log'}", ready=0)

    async def converse(name: str) -> None:
        async with session(name, tools) as mine:
            await ask(mine, ("echo", {"text": "x"}))

    running = [asyncio.create_task(converse(f"r{index}")) for index in range(3)]
    await asyncio.sleep(moment_s)
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    assert all(task.cancelled() for task in running)
    servers = tools["add"].server._servers

    async def have_ended() -> bool:
        return not servers._alive and children() <= before  # type: ignore[attr-defined]

    await until(have_ended)
    assert servers._seats == {}  # type: ignore[attr-defined]
    await closed(tools)


@pytest.mark.parametrize(("how", "refused"), [("missing", True), ("changed", False), ("more", False)])
async def test_a_server_that_lists_other_tools_later_is_named(
    tmp_path: Path, how: str, refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    tools = notes(f"other={other}", ready=0)
    other.write_text(how)
    async with session("r1", tools) as mine:
        (call,) = await ask(mine, ("echo", {"text": "on"}))
    if refused:
        assert "no longer lists the tool 'read' that it listed when tools.yaml: tools[0].mcp was read" in call.text
    else:
        assert call.text == "on"
    assert ("its tool 'read' has another description or schema" in caplog.text) is (how == "changed")
    await closed(tools)
    other.unlink()
    without = notes(f"other={other}", ready=0, exclude=["read"])
    other.write_text(how)
    async with session("r2", without) as mine:
        assert (await ask(mine, ("echo", {"text": "on"})))[0].text == "on"
    await closed(without)


async def test_a_server_that_writes_to_its_standard_output_confuses_no_conversation() -> None:
    tools = notes("chatty=1")
    async with session("r1", tools) as one, session("r2", tools) as two:
        said = [(await ask(each, ("echo", {"text": name})))[0].text for each, name in ((one, "1"), (two, "2"))]
    assert said == ["1", "2"]
    await closed(tools)


def test_a_server_that_needs_a_terminal_is_refused_with_its_words() -> None:
    before = children()
    with pytest.raises(ConfigError, match=r"did not list its tools[^;]*; its last words:\nI need a terminal"):
        notes("tty=1")
    shell = {"command": "sh", "args": ["-c", "read answer < /dev/tty"], "per": "conversation"}
    with pytest.raises(ConfigError, match=r"/dev/tty"):
        mcp_tools(shell, "here")
    assert children() <= before


async def test_a_pool_that_cannot_start_one_more_ends_only_that_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = notes(ready=0)
    async with session("r1", tools) as mine:

        def refuse(*_: Any, **__: Any) -> Any:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        with monkeypatch.context() as broken:
            broken.setattr(mcp_transport, "stdio_client", refuse)
            async with session("r2", tools, outages=Outages()) as other:
                (call,) = await ask(other, ("read", {}))
                assert "Resource temporarily unavailable" in call.text
                assert other.outages
        assert (await ask(mine, ("echo", {"text": "on"})))[0].text == "on"
        async with session("r3", tools) as third:
            assert (await ask(third, ("echo", {"text": "on"})))[0].text == "on"
    await closed(tools)


def test_a_worker_killed_with_sixteen_servers_open_leaves_neither_processes_nor_folders(tmp_path: Path) -> None:
    program = f"""
import asyncio
from verl_multiturn.tools.mcp_tools import mcp_tools

settings = {{
    "command": "python",
    "args": [{NOTES!r}, "file=${{conversation.folder}}/notes", "log={tmp_path / "log"}"],
    "per": "conversation",
    "ready": 2,
}}
tools = {{tool.name: tool for tool in mcp_tools(settings, "here")}}

async def main():
    for index in range(16):
        await tools["add"].create(f"r{{index}}")
        await tools["add"].execute(f"r{{index}}", {{"text": "x"}})
    print((await tools["where"].execute("r3", {{}})).text, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""
    (folders := tmp_path / "folders").mkdir()
    worker = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folders)},
    )
    assert worker.stdout is not None
    worker.stdout.readline()
    servers = log_of(tmp_path / "log")
    assert len(servers) >= 16
    assert len(list(folders.glob("*/notes"))) == 16
    worker.kill()
    worker.communicate()
    deadline = time.monotonic() + 120
    while not all(gone(pid) for pid in servers) or list(folders.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_ends_by_itself_closes_its_servers(tmp_path: Path) -> None:
    program = f"""
import asyncio
from verl_multiturn.tools.mcp_tools import mcp_tools

settings = {{"command": "python", "args": [{NOTES!r}, "log={tmp_path / "log"}"], "per": "conversation", "ready": 1}}
tools = {{tool.name: tool for tool in mcp_tools(settings, "here")}}
asyncio.run(tools["add"].create("r1"))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert all(gone(pid) for pid in log_of(tmp_path / "log"))


# Settings.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"per": "turn"}, "per: Input should be 'worker' or 'conversation', got 'turn'"),
        ({"ready": 2}, "ready: means nothing with 'per: worker'; remove it, or set per: conversation"),
        ({"most": 2}, "most: means nothing with 'per: worker'"),
        (
            {"per": "conversation", "ready": 3, "most": 2},
            "ready: 3 processes cannot be ready where there are at most 2",
        ),
        ({"per": "conversation", "most": 0}, "most: Input should be greater than or equal to 1"),
        ({"per": "conversation", "ready": -1}, "ready: Input should be greater than or equal to 0"),
        ({"args": ["${conversation.folder}"]}, r"args[0]: '${conversation.folder}' is of one conversation"),
        ({"env": {"A": "x${conversation.id}"}}, r"env.A: '${conversation.id}' is of one conversation"),
        ({"per": "conversation", "args": ["${conversation.name}"]}, "'${conversation.name}' has no value here; known"),
        ({"per": "conversation", "cwd": "${conversation.folder}/a"}, "cwd: expected '${conversation.folder}' alone"),
        (
            {"command": None, "url": "http://127.0.0.1:9/mcp", "per": "conversation", "ready": 1},
            "ready: means nothing to a server with 'url'",
        ),
        (
            {"command": None, "url": "http://127.0.0.1:9/${conversation.folder}", "per": "conversation"},
            "url: '${conversation.folder}' has no value here",
        ),
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    before = children()
    given = {"command": "python", **settings}
    with pytest.raises(ConfigError) as caught:
        mcp_tools({key: value for key, value in given.items() if value is not None}, "tools.yaml: tools[0].mcp")
    assert message in str(caught.value)
    assert children() <= before


async def test_per_worker_stays_as_it_was() -> None:
    tools = by_name(mcp_tools({"command": "python", "args": [NOTES]}, "here"))
    async with session("r1", tools) as one, session("r2", tools) as two:
        await ask(one, ("add", {"text": "a"}))
        assert (await ask(two, ("read", {})))[0].text == "a", "all conversations share one server"
        assert one.place_s is None
    assert await text(tools, "read") == "a"
    await closed(tools)

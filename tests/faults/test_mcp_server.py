"""`verl-multiturn mcp`: clients that leave, are killed, share a session or come from elsewhere; tools that print."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from mcp import Client
from PIL import Image

from tests.long.tools.out_server import Served, serve, until, words
from tests.long.tools.tools_out import COMMAND, MODERN, TOOLS, environment, kill_clients, kwargs, text_of, till
from verl_multiturn.tools.loading.registry import build_tools

pytestmark = pytest.mark.slow
_WAIT_S = 120.0
_JSON = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
_HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}


def message(method: str, params: dict[str, Any], number: int | None = 1) -> dict[str, Any]:
    """Return a request, or a notification without a number."""
    return {"jsonrpc": "2.0", "method": method, "params": params, **({} if number is None else {"id": number})}


def pays(amount: int, number: int, **more: Any) -> dict[str, Any]:
    """Return a call of the till."""
    return message("tools/call", {"name": "till", "arguments": {"amount": amount, **more}}, number)


class Piped:
    """A server over stdio, spoken to line by line."""

    def __init__(self, *arguments: str) -> None:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen([*COMMAND, *arguments], env=environment(), **pipes)  # type: ignore[call-overload]
        self.lines: list[str] = []
        self.say(message("initialize", _HELLO, 0), message("notifications/initialized", {}, None))
        assert self.read()["id"] == 0

    def say(self, *messages: dict[str, Any]) -> None:
        for each in messages:
            self.process.stdin.write((json.dumps(each) + "\n").encode())
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        self.lines.append(self.process.stdout.readline().decode())
        return json.loads(self.lines[-1])  # type: ignore[no-any-return]

    def end(self, how: signal.Signals | None = None) -> tuple[int, str]:
        """End the server, by the end of its standard input or a signal; return its status and its errors."""
        if how is None:
            self.process.stdin.close()
        else:
            self.process.send_signal(how)
        rest = self.process.stdout.read().decode().splitlines()
        assert [json.loads(line)["jsonrpc"] for line in rest] == ["2.0"] * len(rest)
        errors = self.process.stderr.read().decode()
        return self.process.wait(_WAIT_S), errors


Pipe = Callable[..., Piped]


@pytest.fixture
def piped() -> Iterator[Pipe]:
    """Start servers over stdio, and end those that a test leaves."""
    servers: list[Piped] = []

    def start(*arguments: str) -> Piped:
        servers.append(Piped(*arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait()
        for stream in (server.process.stdin, server.process.stdout, server.process.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def waits_for(log: Path, word: str) -> None:
    """Wait until a word stands in a till's log."""
    until = time.monotonic() + _WAIT_S
    while word not in (log.read_text() if log.is_file() else ""):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_over_stdio_nothing_but_the_protocol_is_written_whatever_is_printed(piped: Pipe, tmp_path: Path) -> None:
    """The most frequent report about servers over stdio: one line that a tool or its module prints ends the session."""
    entries = [
        {kind: f"{TOOLS}.{name}", "limits": {"timeout_s": 1.0}}
        for name, kind in {
            "chatter": "function",
            "picture": "function",
            "hang": "function",
            "Broken": "class_name",
        }.items()
    ]
    path = tmp_path / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": entries}))
    server = piped(str(path))

    def ask(name: str, arguments: dict[str, Any], number: int) -> dict[str, Any]:
        server.say(message("tools/call", {"name": name, "arguments": arguments}, number))
        answer = server.read()
        assert answer["id"] == number
        return answer["result"]  # type: ignore[no-any-return]

    assert ask("chatter", {"depth": 3}, 1)["content"] == [{"type": "text", "text": "said 3"}]
    text, image = ask("picture", {"width": 3}, 2)["content"]
    assert text["text"] == "red"
    drawn = Image.open(io.BytesIO(base64.b64decode(image["data"])))
    assert (image["mimeType"], drawn.size, drawn.getpixel((0, 0))) == ("image/png", (3, 2), (255, 0, 0))
    late, wrong, strange, unknown = (
        ask("hang", {}, 3),
        ask("chatter", {"depth": "x"}, 4),
        ask("broken", {}, 5),
        ask("no", {}, 6),
    )
    assert [answer["isError"] for answer in (late, wrong, strange, unknown)] == [True] * 4
    assert late["content"][0]["text"] == "the tool did not answer within 1 s"
    assert wrong["content"][0]["text"] == 'argument \'depth\': "x" is not of type "integer"'
    assert unknown["content"][0]["text"] == "there is no tool 'no'; the tools are: chatter, picture, hang, broken"
    assert "_meta" not in wrong
    status, errors = server.end()  # the thread of `hang` runs for ever
    assert status == 0
    assert all(each in errors for each in ("a module that prints", "printed", "written", "from a program"))
    assert [json.loads(line)["jsonrpc"] for line in server.lines] == ["2.0"] * 7


@pytest.mark.parametrize(
    "how",
    [
        None,
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, marks=pytest.mark.long),
    ],
)
def test_over_stdio_a_session_is_released_once_however_the_server_ends(
    how: signal.Signals | None, piped: Pipe, tmp_path: Path
) -> None:
    server = piped(str(till(tmp_path)), *kwargs(), "--rewards")
    server.say(pays(1, 1))
    assert server.read()["result"]["_meta"] == {
        "verl-multiturn/status": "ok",
        "verl-multiturn/reward": 0.25,
        "verl-multiturn/metrics": {"payments": 1},
    }
    server.say(pays(1, 2, wait_s=600))
    waits_for(tmp_path / "log", "waits")
    status, errors = server.end(how)
    assert status == (130 if how is signal.SIGINT else 0)
    assert words(tmp_path / "log") == ["create", "waits", "release"]
    assert json.loads(errors.splitlines()[-1]) == {"session": "stdio", "rewards": {"till": 1001.0}}
    assert "Traceback" not in errors


def test_a_client_that_is_killed_while_its_call_runs_leaves_no_server(piped: Pipe, tmp_path: Path) -> None:
    server = piped(str(till(tmp_path)))
    server.say(pays(1, 1, wait_s=0.5))
    waits_for(tmp_path / "log", "waits")
    server.process.stdout.close()  # as when its process ends
    server.process.stdin.close()
    errors = server.process.stderr.read().decode()
    assert server.process.wait(_WAIT_S) == 0
    assert words(tmp_path / "log") == ["create", "waits", "release"]
    assert "Traceback" not in errors


def test_a_client_that_reads_nothing_and_closes_its_end_leaves_no_server(piped: Pipe, tmp_path: Path) -> None:
    """It reads neither stream: the SDK logs the ids, which fill standard error."""
    server = piped(str(till(tmp_path)))
    server.say(*({**pays(1, 1), "id": f"{number} " + "y" * 100_000} for number in range(4)))  # answers have the id
    waits_for(tmp_path / "log", "create")
    server.process.stdin.close()  # and its standard output stays open, and full
    assert server.process.wait(_WAIT_S) == 0
    assert words(tmp_path / "log") == ["create", "release"]


def test_a_server_without_any_client_ends(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, str(till(tmp_path))],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_WAIT_S,
        check=True,
    )
    assert done.stdout == b""
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--kwargs", "{"], r"--kwargs '\{': no JSON"),
        (["--kwargs", "[1]"], r"--kwargs '\[1\]': expected an object, got list"),
        (["--kwargs", '{"tin": {}}'], "--kwargs: tools_kwargs names 'tin', which is no tool of the YAML"),
        (["--kwargs", '{"till": {"create_kwargs": {"x": 1}}}'], "--kwargs: tool 'till': create"),
        (["--kwargs", '{"till": {"shown": false}}'], "--kwargs: tools_kwargs\\['till'\\]\\['shown'\\] is False"),
        (["--idle-s", "3"], "--idle-s 3.0: means nothing over stdio"),
        (["--http", "TAKEN"], r"--host 127.0.0.1 --http \d+: cannot listen there"),
        (["--http", "0", "--host", "203.0.113.1"], r"--host 203.0.113.1 --http 0: cannot listen there"),
    ],
)
def test_bad_options_are_refused_by_name(more: list[str], said: str, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from verl_multiturn.cli.main import app
    from verl_multiturn.tool_servers import mcp_server

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.MonkeyPatch.context() as patch:
        patch.setattr(mcp_server, "Wire", lambda: SimpleNamespace(close=lambda: None))  # the streams are the test's own
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(
            app, ["mcp", str(till(tmp_path)), *(port if word == "TAKEN" else word for word in more)]
        )
    assert done.exit_code == 2
    assert re.search(said, done.stderr)


def test_a_client_at_the_other_end_of_a_pipe_reads_why_the_server_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, str(till(tmp_path)), "--kwargs", "{"],
        input=b"", capture_output=True, env=environment(), timeout=_WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert b"--kwargs '{': no JSON" in done.stderr


# ---------------------------------------------------------------------------------------------------------- HTTP


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """Serve a till whose sessions may be idle for long."""
    async with serve(tmp_path, most=8, idle_s=600.0) as server:
        yield server


@asynccontextmanager
async def protocol_session(address: str) -> AsyncIterator[httpx.AsyncClient]:
    """Begin a session of the protocol, and give a client that belongs to it."""
    async with httpx.AsyncClient(headers=_JSON, timeout=_WAIT_S, trust_env=False) as http:
        begun = await http.post(address, json=message("initialize", _HELLO))
        assert begun.status_code == 200
        http.headers["mcp-session-id"] = begun.headers["mcp-session-id"]
        await http.post(address, json=message("notifications/initialized", {}, None))
        yield http


def answer_of(response: httpx.Response) -> dict[str, Any]:
    """Return the message in an answer, which may be a stream of events."""
    text = response.text
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return json.loads(data[-1] if data else text)  # type: ignore[no-any-return]


async def test_two_clients_on_one_session_share_it_and_each_gets_its_own_answers(served: Served) -> None:
    async with protocol_session(served.address) as one:  # noqa: SIM117  # the second needs the first
        async with httpx.AsyncClient(headers=one.headers, timeout=_WAIT_S, trust_env=False) as other:
            calls = [one.post(served.address, json=pays(1, n)) for n in range(2, 7)]
            calls += [other.post(served.address, json=pays(1, n)) for n in range(12, 17)]
            answers = [answer_of(answer) for answer in await asyncio.gather(*calls)]
    texts = {answer["id"]: answer["result"]["content"][0]["text"] for answer in answers}
    assert sorted(texts) == [*range(2, 7), *range(12, 17)]
    assert set(texts.values()) == {f"{n} payments, {1000 + n} cents" for n in range(1, 11)}
    name = f"{served.address}/both"
    async with Client(name, mode=MODERN) as first, Client(name, mode=MODERN) as second:
        shared = await asyncio.gather(*(each.call_tool("till", {"amount": 1}) for each in (first, second) * 5))
    assert {text_of(each) for each in shared} == set(texts.values())
    assert served.count("create") == 2


async def test_two_clients_with_one_id_at_the_same_time_mix_no_answers(served: Served) -> None:
    """The SDK alone never answers the first of the two."""
    async with protocol_session(served.address) as one:  # noqa: SIM117  # the second needs the first
        async with httpx.AsyncClient(headers=one.headers, timeout=_WAIT_S, trust_env=False) as other:
            slow = asyncio.ensure_future(one.post(served.address, json=pays(5, 7, wait_s=1.0)))
            await until(lambda: served.count("waits") == 1)
            for number in (7, "7"):
                refused = await other.post(served.address, json=pays(2, number))  # type: ignore[arg-type]
                assert refused.status_code == 400
                assert f"the id {number!r} belongs to a request" in refused.json()["error"]["message"]
            assert "1 payments, 1005 cents" in (await slow).text
            assert "2 payments, 1007 cents" in (await other.post(served.address, json=pays(2, 7))).text


async def test_a_session_that_was_deleted_is_gone_for_everybody(served: Served) -> None:
    async with protocol_session(served.address) as http:
        assert "1001" in (await http.post(served.address, json=pays(1, 2))).text
        assert (await http.delete(served.address)).status_code == 200
        assert served.count("release") == 1
        assert (await http.post(served.address, json=pays(1, 3))).status_code == 404
        assert (await http.delete(served.address)).status_code == 404
    name = f"{served.address}/deleted"
    async with Client(name) as client, httpx.AsyncClient(trust_env=False) as http:
        assert text_of(await client.call_tool("till", {"amount": 1})) == "1 payments, 1001 cents"
        assert (await http.delete(name)).status_code == 204
        answer = await client.call_tool("till", {"amount": 1})
    assert answer.is_error
    assert text_of(answer) == "not executed, the session has ended: its client has ended it; begin another session"
    assert (served.count("create"), served.count("release")) == (2, 2)


async def test_a_session_ends_when_it_is_not_used_and_not_while_it_is(tmp_path: Path) -> None:
    async with serve(tmp_path, idle_s=0.5) as served, protocol_session(served.address) as http:
        late = await http.post(served.address, json=pays(1, 2, wait_s=1.5))  # longer than a session may be idle
        assert "1001" in late.text
        await until(lambda: served.count("release") == 1)
        assert (await http.post(served.address, json=pays(1, 3))).status_code == 404
        async with Client(f"{served.address}/name", mode=MODERN) as client:
            await client.call_tool("till", {"amount": 1})
            await until(lambda: served.count("release") == 2)
            answer = await client.call_tool("till", {"amount": 1})
            assert text_of(answer).endswith("has ended: it was not used for 0.5 s; begin another session")
        assert served.host.number == 0


async def test_a_stream_that_its_client_holds_open_is_a_use_and_one_that_is_gone_is_none(tmp_path: Path) -> None:
    async with serve(tmp_path, idle_s=0.5) as served, protocol_session(served.address) as http:
        async with http.stream("GET", served.address) as stream:
            if stream.status_code == 404:
                pytest.skip("this machine is so busy that the session was idle before its stream was there")
            await http.post(served.address, json=pays(1, 2))
            await asyncio.sleep(1.5)
            assert "1002" in (await http.post(served.address, json=pays(1, 3))).text
        await until(lambda: served.count("release") == 1)
        assert (await http.post(served.address, json=pays(1, 4))).status_code == 404


async def test_a_call_that_its_client_takes_back_ends_and_the_session_goes_on(served: Served) -> None:
    async with protocol_session(served.address) as http:
        call = asyncio.ensure_future(http.post(served.address, json=pays(500, 5, wait_s=600)))
        await until(lambda: served.count("waits") == 1)
        await http.post(served.address, json=message("notifications/cancelled", {"requestId": 5}, None))
        assert "1 payments, 1001" in (await http.post(served.address, json=pays(1, 6))).text
        call.cancel()
    async with Client(f"{served.address}/taken-back", mode=MODERN) as client:
        late = asyncio.ensure_future(client.call_tool("till", {"amount": 500, "wait_s": 600}))
        await until(lambda: served.count("waits") == 2)
        late.cancel()
        assert text_of(await client.call_tool("till", {"amount": 1})) == "1 payments, 1001 cents"


async def test_so_many_sessions_and_no_more(served: Served) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for number in range(8):
            client = await stack.enter_async_context(Client(f"{served.address}/{number}", mode=MODERN))
            assert not (await client.call_tool("till", {"amount": 1})).is_error
            await stack.enter_async_context(protocol_session(served.address))
        async with httpx.AsyncClient(headers=_JSON, trust_env=False) as http:
            assert (await http.post(served.address, json=message("initialize", _HELLO))).status_code == 503
            last = await stack.enter_async_context(Client(f"{served.address}/last", mode=MODERN))
            answer = await last.call_tool("till", {"amount": 1})
            assert text_of(answer) == "not executed, all 8 sessions are in use; end one, or call it later"
            await http.delete(f"{served.address}/0")
        assert not (await last.call_tool("till", {"amount": 1})).is_error


async def test_each_address_serves_the_versions_with_or_without_sessions(served: Served) -> None:
    async with Client(served.address) as client:
        assert client.protocol_version == "2025-11-25"
    async with Client(f"{served.address}/new") as client:
        assert client.protocol_version == MODERN
    async with httpx.AsyncClient(headers=_JSON, trust_env=False) as http:
        modern = {"mcp-protocol-version": MODERN, "mcp-session-id": "any"}
        first = await http.post(served.address, json=message("tools/list", {}, 3), headers=modern)
        other = await http.post(f"{served.address}/old", json=message("initialize", _HELLO, 4))
    assert (first.status_code, first.json()["id"]) == (other.status_code, other.json()["id"] - 1) == (400, 3)
    assert "for other versions use /mcp/NAME, where NAME is the session" in first.json()["error"]["message"]
    assert other.json()["error"]["message"] == f"this address serves MCP {MODERN}; for other versions use /mcp"


@pytest.mark.parametrize("path", ["", "/named"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [({"host": "evil.example:80"}, 421), ({"origin": "http://evil.example"}, 403), ({"origin": "null"}, 403)],
)
async def test_a_page_of_another_site_is_refused_by_its_host_or_origin(
    path: str, headers: dict[str, str], status: int, served: Served
) -> None:
    """A name that resolves to this machine (DNS rebinding) does not get a page of another site in."""
    version = {"mcp-protocol-version": MODERN} if path else {}
    async with httpx.AsyncClient(headers={**_JSON, **version, **headers}, trust_env=False) as http:
        address = served.address + path
        assert (await http.post(address, json=message("initialize", _HELLO))).status_code == status
        assert (await http.post(served.address + "/x", json=message("initialize", _HELLO))).status_code == status
        del http.headers["mcp-protocol-version" if path else "accept"]
        if path:
            assert (await http.delete(address)).status_code == status


async def test_other_addresses_and_bodies_are_refused(served: Served) -> None:
    async with httpx.AsyncClient(headers=_JSON, trust_env=False) as http:
        elsewhere = await http.post(served.address.removesuffix("/mcp") + "/", json={})
        assert (elsewhere.status_code, elsewhere.text[:8]) == (404, "no '/' h")
        assert (await http.post(f"{served.address}/a/b", json={})).status_code == 404
        assert (await http.post(f"{served.address}/{'n' * 129}", json={})).status_code == 404
        unknown = await http.post(served.address, json=pays(1, 1), headers={"mcp-session-id": "none"})
        assert unknown.status_code == 404  # by which a client begins another session
        assert (await http.post(served.address, content=b"x" * (5 << 20))).status_code == 413
        for body in (b"{", b"[" * 5000, b"[]", b"7"):
            answer = await http.post(served.address, content=body, headers={"mcp-protocol-version": MODERN})
            assert answer.status_code == 400


async def test_our_own_client_begins_another_session_after_a_restart(tmp_path: Path) -> None:
    """Reports name clients that stay broken; ours gets 404 and begins anew."""
    (tmp_path / "again").mkdir()
    async with serve(tmp_path) as served:
        (tool,) = await asyncio.to_thread(
            build_tools, {"mcp": {"url": served.address, "start_timeout_s": 10 * _WAIT_S}}, "tools[0]"
        )
        assert served.count("create") == 0  # to list the tools begins no session of them
        assert (await tool.execute("a", {"amount": 1})).text == "1 payments, 1001 cents"
        with pytest.raises(ValueError, match=r'^"amount" is a required property$'):  # marked as an error once
            await tool.execute("a", {})
    port = int(served.address.removesuffix("/mcp").rpartition(":")[2])
    async with serve(tmp_path / "again", port):
        answered = ""
        for _ in range(5):
            try:
                answered = (await tool.execute("a", {"amount": 1})).text
                break
            except (ConnectionError, RuntimeError, ValueError):
                await asyncio.sleep(0.5)
        await tool.aclose()
    assert answered == "1 payments, 1001 cents"


async def test_sessions_whose_clients_are_killed_are_released_once(tmp_path: Path) -> None:
    async with serve(tmp_path, idle_s=3.0) as served:
        named = [f"{served.address}/killed-{number}" for number in range(2)]
        assert await kill_clients([served.address, served.address, *named]) == 4
        await until(lambda: served.count("release") == 4)
        assert served.host.number == 0

"""`verl-multiturn a2a` with the official client and our own: sessions at once, cancelled calls, killed clients."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from PIL import Image

pytest.importorskip("a2a.client", reason="needs a2a-sdk: bash scripts/test.sh installs requirements/a2a.lock")

from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.helpers.proto_helpers import new_data_part
from a2a.types import (
    CancelTaskRequest,
    GetTaskRequest,
    ListTasksRequest,
    Message,
    Part,
    Role,
    SendMessageRequest,
    Task,
    TaskState,
)
from a2a.utils.errors import InvalidParamsError, TaskNotFoundError
from google.protobuf.json_format import MessageToDict
from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.long.tools.a2a_schemas import a2a_schemas
from tests.long.tools.out_tools import Listed, Till
from tests.servers.a2a_agents import serving
from verl_multiturn import BaseTool, ToolResponse, ToolSchema
from verl_multiturn.cli.main import app
from verl_multiturn.tool_servers import a2a_server
from verl_multiturn.tool_servers.a2a_server import build_app
from verl_multiturn.tool_servers.sessions import ToolHost
from verl_multiturn.tools.a2a_tools import A2aTool, a2a_tools
from verl_multiturn.tools.services.a2a_extension import URI

OBJECT = {"type": "object", "properties": {}}


def named(name: str, parameters: Any = OBJECT) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"{name} ü", "parameters": parameters}}


@contextlib.asynccontextmanager
async def served(*tools: BaseTool, **settings: Any) -> AsyncIterator[tuple[str, ToolHost]]:
    host = ToolHost({tool.name: tool for tool in tools}, **settings)
    app, handler = build_app(host, "tools", "127.0.0.1")
    async with serving(app) as url:
        try:
            yield url, host
        finally:
            await host.aclose()
            await handler.aclose()


async def load(url: str, **settings: Any) -> dict[str, A2aTool]:
    tools = await asyncio.to_thread(a2a_tools, {"url": url, **settings}, "tools[0].a2a")
    return {tool.name: tool for tool in tools}


@contextlib.asynccontextmanager
async def client_of(url: str, streaming: bool = True, version: str = "1.0") -> AsyncIterator[Client]:
    """Connect as the official SDK does."""
    async with httpx.AsyncClient(timeout=60) as http:
        card = await A2ACardResolver(http, url).get_agent_card()
        card.supported_interfaces[0].protocol_version = version
        yield ClientFactory(ClientConfig(httpx_client=http, streaming=streaming)).create(card)


async def ask(client: Client, context: str, *parts: Part | str) -> Task:
    """Send a message, and return the task that it became, as far as it was sent."""
    sent = [Part(text=part) if isinstance(part, str) else part for part in parts]
    message = Message(message_id=uuid4().hex, role=Role.ROLE_USER, parts=sent, context_id=context)
    task = Task()
    async for event in client.send_message(SendMessageRequest(message=message)):
        kind = event.WhichOneof("payload")
        if kind == "task":
            task.MergeFrom(event.task)
        elif kind == "artifact_update":
            task.artifacts.append(event.artifact_update.artifact)
        else:
            task.status.CopyFrom(event.status_update.status)
    return task


def call(tool: str, **arguments: Any) -> str:
    return json.dumps({"tool": tool, "arguments": arguments})


def text_of(task: Task) -> str:
    parts = task.artifacts[0].parts if task.artifacts else task.status.message.parts
    return str(parts[0].text)


def till(folder: Path) -> Till:
    return Till({"log": str(folder / "log")})


def ends_of(folder: Path) -> Counter[str]:
    """Return how often each of `create` and `release` was called, and for how many sessions."""
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    found = Counter(words[0] for words in lines)
    found["sessions"] = len({words[1] for words in lines})
    return found


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 a server sets no asyncio.Event
            await asyncio.sleep(0.01)


# Out and back.


def test_schemas_come_back_unchanged() -> None:
    assert a2a_schemas(100, 1) == {"a2a_schemas": 100, "a2a_changed": 0}


ARGUMENTS = {
    "whole": 1,
    "float": 1.0,
    "large": 12345678901234567890123,
    "small": 1e-300,
    "minus": -0.0,
    "text": 'ü 名前 🎲 \u2028 \x00 </s> \\ "',
    "nested": {"b": [1, 1.0, None, True, {"": 2**53 + 1}], "a": 0.1},
}


async def test_arguments_come_through_unchanged() -> None:
    async with served(Listed({}, ToolSchema.read(named("echo"), "x"))) as (url, _):
        tools = await load(url)
        await tools["echo"].create("r1")
        said = await tools["echo"].execute("r1", ARGUMENTS)
        await tools["echo"].release("r1")
    assert said.text == json.dumps(ARGUMENTS, ensure_ascii=False)


@pytest.mark.parametrize("streaming", [True, False])
async def test_arguments_come_through_the_official_client(streaming: bool) -> None:
    echo = Listed({}, ToolSchema.read(named("echo"), "x"))
    async with served(echo) as (url, _), client_of(url, streaming) as client:
        assert text_of(await ask(client, "one", call("echo", **ARGUMENTS))) == json.dumps(ARGUMENTS, ensure_ascii=False)


async def test_names_are_chosen_and_prefixed() -> None:
    listed = [Listed({}, ToolSchema.read(named(name), "x")) for name in ("add", "sub", "mul")]
    async with served(*listed) as (url, _):
        tools = await load(url, include=["?u*"], exclude=["mul"], prefix="their_")
        assert list(tools) == ["their_sub"]
        assert tools["their_sub"].tool_schema.as_dict() == {
            **named("sub"),
            "function": {**named("sub")["function"], "name": "their_sub"},
        }
        await tools["their_sub"].create("r1")
        assert (await tools["their_sub"].execute("r1", {"x": 1})).text == '{"x": 1}'
        await tools["their_sub"].release("r1")


class Painter(BaseTool):
    """A tool with pictures, half characters and errors."""

    def get_schema(self) -> dict[str, Any]:
        return named("paint", {"type": "object", "properties": {"what": {"type": "string"}}})

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        if parameters.get("what") == "error":
            raise ValueError("no colours")
        if parameters.get("what") == "half":
            return ToolResponse("half \ud800")
        return ToolResponse("red", [Image.new("RGB", (4, 4), (255, 0, 0))])


async def test_pictures_and_errors_come_through() -> None:
    async with served(Painter({})) as (url, _):
        tools = await load(url)
        await tools["paint"].create("r1")
        red = await tools["paint"].execute("r1", {})
        half = await tools["paint"].execute("r1", {"what": "half"})
        with pytest.raises(ValueError, match=r"^no colours$"):  # our session puts the mark before it
            await tools["paint"].execute("r1", {"what": "error"})
        with pytest.raises(ValueError, match=r"^argument 'what': 5 is not of type \"string\"$"):
            await tools["paint"].execute("r1", {"what": 5})
        await tools["paint"].release("r1")
    assert red.text == "red"
    assert red.image is not None
    assert red.image[0].getpixel((0, 0)) == (255, 0, 0)
    assert half.text == "half ?"


# Sessions.


async def test_64_sessions_at_once_are_not_mixed_and_released_once(tmp_path: Path) -> None:
    async with served(till(tmp_path), kwargs={"till": {"create_kwargs": {"budget": 1000}}}) as (url, host):
        tool = (await load(url))["till"]

        async def play(number: int) -> list[str]:
            await tool.create(f"c{number}")
            said = [(await tool.execute(f"c{number}", {"amount": number})).text for _ in range(3)]
            await tool.release(f"c{number}")
            return said

        said = await asyncio.gather(*map(play, range(64)))
        assert said == [
            [f"{turn} payments, {1000 + turn * number} cents" for turn in (1, 2, 3)] for number in range(64)
        ]
        assert host.number == 0, "our client ends its sessions"
    assert ends_of(tmp_path) == {"create": 64, "release": 64, "sessions": 64}


@pytest.mark.parametrize("streaming", [True, False])
async def test_the_official_client(streaming: bool, tmp_path: Path) -> None:
    async with (
        served(till(tmp_path), report=lambda key, rewards: None) as (url, host),
        client_of(url, streaming) as client,
    ):
        one, two = await ask(client, "one", call("till", amount=5)), await ask(client, "two", call("till", amount=7))
        again = await ask(client, "one", call("till", amount=6))
        assert [text_of(each) for each in (one, two, again)] == [
            "1 payments, 5 cents",
            "1 payments, 7 cents",
            "2 payments, 11 cents",
        ]
        assert MessageToDict(again.artifacts[0].metadata) == {
            f"{URI}/status": "ok",
            f"{URI}/reward": 0.25,
            f"{URI}/metrics": {"payments": 2.0},
        }
        assert (await client.get_task(GetTaskRequest(id=one.id))).artifacts == one.artifacts
        wrong = await ask(client, "one", call("till", amount="x"))
        assert wrong.status.state == TaskState.TASK_STATE_FAILED
        assert text_of(wrong) == 'argument \'amount\': "x" is not of type "integer"'
        end = await ask(client, "one", '{"end": true}')
        assert text_of(end) == "the session has ended"
        assert MessageToDict(end.artifacts[0].metadata) == {f"{URI}/rewards": {"till": 11.0}}
        late = await ask(client, "one", call("till", amount=5))
        assert "the session has ended: its client has ended it; begin another" in text_of(late)
        assert host.number == 1
    assert ends_of(tmp_path) == {"create": 2, "release": 2, "sessions": 2}


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_of_the_older_protocol(streaming: bool, tmp_path: Path) -> None:
    async with served(till(tmp_path)) as (url, _), client_of(url, streaming, version="0.3") as client:
        said = [await ask(client, "one", call("till", amount=5)) for _ in range(2)]
    assert text_of(said[1]) == "2 payments, 10 cents"


async def test_rewards_are_hidden(tmp_path: Path) -> None:
    async with served(till(tmp_path)) as (url, _), client_of(url) as client:
        said = [await ask(client, "one", text) for text in (call("till", amount=5), call("none"), '{"end": true}')]
        assert [each.artifacts[0].metadata.fields for each in said if each.artifacts] == [{}, {}]
        assert not said[1].status.message.metadata.fields


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (new_data_part({"tool": "till", "arguments": {"amount": 1}}), "a data part turns 1 into 1.0"),
        ("Please put 5 cents in.", "'Please put 5 cents in.' is no call of a tool; send JSON text such as"),
        ("[1]", "names no tool"),
        ('{"tool": 5}', "names no tool"),
        ('{"tool": "till", "args": {}}', "'args' is no part of a call"),
        ("[" * 100_000, "is no call of a tool"),
        ('{"tool": "pay", "arguments": {}}', "there is no tool 'pay'; the tools are: till"),
        ('{"tool": "till", "arguments": []}', "the arguments must be a JSON object, not list"),
        ('{"tool": "till"}', '"amount" is a required property'),
        ('{"tool": "till", "arguments": {"amount": "\\ud800"}}', "half a character"),
    ],
)
async def test_a_message_that_is_no_call_is_refused(part: Part | str, text: str, tmp_path: Path) -> None:
    async with served(till(tmp_path)) as (url, _), client_of(url) as client:
        said = await ask(client, "one", part)
        assert said.status.state in (TaskState.TASK_STATE_REJECTED, TaskState.TASK_STATE_FAILED)
        assert text in text_of(said)


async def test_a_task_that_is_cancelled_ends_its_call(tmp_path: Path) -> None:
    async with served(till(tmp_path)) as (url, host), client_of(url) as client, client_of(url) as other:
        message = Message(message_id="m", role=Role.ROLE_USER, parts=[Part(text=call("till", amount=1, wait_s=3600))])
        message.context_id = "one"
        events = client.send_message(SendMessageRequest(message=message))
        task = (await anext(events)).task
        await until(lambda: "waits" in (tmp_path / "log").read_text() if (tmp_path / "log").exists() else False)
        assert (await other.cancel_task(CancelTaskRequest(id=task.id))).status.state == TaskState.TASK_STATE_CANCELED
        assert [each.status_update.status.state async for each in events] == [TaskState.TASK_STATE_CANCELED]
        assert text_of(await ask(other, "one", call("till", amount=1))) == "1 payments, 1 cents"
        assert host.number == 1


async def test_a_client_lists_no_sessions_of_others(tmp_path: Path) -> None:
    async with served(till(tmp_path)) as (url, _), client_of(url) as client, client_of(url) as other:
        mine = await ask(client, "one", call("till", amount=1))
        with pytest.raises(InvalidParamsError, match="name the context"):
            await other.list_tasks(ListTasksRequest())
        assert [task.id for task in (await client.list_tasks(ListTasksRequest(context_id="one"))).tasks] == [mine.id]


async def test_only_the_latest_tasks_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2a_server, "_MOST_TASKS", 2)
    async with served(till(tmp_path)) as (url, _), client_of(url) as client:
        tasks = [await ask(client, "one", call("till", amount=1)) for _ in range(3)]
        assert (await client.get_task(GetTaskRequest(id=tasks[2].id))).id == tasks[2].id
        with pytest.raises(TaskNotFoundError):
            await client.get_task(GetTaskRequest(id=tasks[0].id))


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "http://evil.example"}])
async def test_pages_of_other_sites_are_refused(headers: dict[str, str], tmp_path: Path) -> None:
    async with served(till(tmp_path)) as (url, _), httpx.AsyncClient() as http:
        for method, path in (("GET", "/.well-known/agent-card.json"), ("POST", "/a2a")):
            answer = await http.request(method, url + path, headers=headers, json={})
            assert answer.status_code in (403, 421)


# The command.


@contextlib.asynccontextmanager
async def command(folder: Path, *options: str) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Start the server of a till; it is ended by SIGTERM."""
    entry = {"class_name": "tests.long.tools.out_tools.Till", "config": {"log": str(folder / "log")}}
    (folder / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    words = [sys.executable, "-m", "verl_multiturn.cli", "a2a", str(folder / "tools.yaml"), "--port", "0", *options]
    path = os.pathsep.join([str(ROOT), *sys.path[1:]])
    process = await asyncio.create_subprocess_exec(
        *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert process.stdout is not None
    line = ""
    while not line.startswith("serving"):
        line = (await process.stdout.readline()).decode()
        assert line
    try:
        yield line.split()[4].rstrip(";"), process
    finally:
        process.send_signal(signal.SIGTERM)
        _, said = await process.communicate()
        (folder / "said").write_bytes(said)
        assert process.returncode == 0


CLIENT = """
import asyncio, json, sys
import httpx
from a2a.client import A2ACardResolver, ClientConfig, ClientFactory
from a2a.types import Message, Part, SendMessageRequest

async def main():
    async with httpx.AsyncClient(timeout=60) as http:
        card = await A2ACardResolver(http, sys.argv[1]).get_agent_card()
        client = ClientFactory(ClientConfig(httpx_client=http)).create(card)
        for arguments in ({"amount": 3}, {"amount": 3, "wait_s": 3600}):
            text = json.dumps({"tool": "till", "arguments": arguments})
            message = Message(message_id=text, role="ROLE_USER", parts=[Part(text=text)], context_id=sys.argv[2])
            async for event in client.send_message(SendMessageRequest(message=message)):
                pass

asyncio.run(main())
"""


@pytest.mark.slow
async def test_sessions_of_killed_clients_are_released_once(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), *sys.path[1:]])
    async with command(tmp_path, "--idle-s", "600", "--rewards") as (url, _):
        words = [sys.executable, "-c", CLIENT, url]
        clients = [
            await asyncio.create_subprocess_exec(*words, f"killed{number}", env={**os.environ, "PYTHONPATH": path})
            for number in range(2)
        ]
        await until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().count("waits") == 2)
        for each in clients:
            each.kill()
            await each.wait()
        async with client_of(url) as client:  # the other sessions go on
            assert text_of(await ask(client, "well", call("till", amount=1))) == "1 payments, 1 cents"
            await ask(client, "well", '{"end": true}')
    assert ends_of(tmp_path) == {"create": 3, "release": 3, "waits": 2, "sessions": 3}
    rewards = [json.loads(line) for line in (tmp_path / "said").read_text().splitlines() if line.startswith("{")]
    assert sorted(each["session"] for each in rewards) == ["killed0", "killed1", "well"]


async def test_a_session_without_calls_is_released(tmp_path: Path) -> None:
    async with served(till(tmp_path), idle_s=0.05) as (url, host), client_of(url) as client:
        await ask(client, "one", call("till", amount=1))
        await until(lambda: host.number == 0)
        await until(lambda: ends_of(tmp_path) == {"create": 1, "release": 1, "sessions": 1})
        assert "it was not used for 0.05 s" in text_of(await ask(client, "one", call("till", amount=1)))
    assert ends_of(tmp_path) == {"create": 1, "release": 1, "sessions": 1}


def test_a_missing_package_is_named_by_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "verl_multiturn.tool_servers.a2a_server")
    monkeypatch.setitem(sys.modules, "a2a", None)
    for name in [name for name in sys.modules if name.startswith("a2a.")]:
        monkeypatch.delitem(sys.modules, name)
    ran = CliRunner().invoke(app, ["a2a", str(tmp_path / "none.yaml")])
    assert ran.exit_code == 2
    assert "a2a needs the package a2a-sdk, 1.3 or newer; install it: pip install" in ran.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["none.yaml"], "none.yaml"),
        (["tools.yaml", "--kwargs", "5"], "--kwargs '5': expected an object, got int"),
        (["tools.yaml", "--port", "0", "--host", "nowhere.invalid"], "--host nowhere.invalid --port 0"),
    ],
)
def test_a_wrong_command_is_refused(
    options: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    entry = {"class_name": "tests.long.tools.out_tools.Till", "config": {"log": "log"}}
    Path("tools.yaml").write_text(json.dumps({"tools": [entry]}))
    ran = CliRunner().invoke(app, ["a2a", *options])
    assert (ran.exit_code, text in ran.stderr) == (2, True)

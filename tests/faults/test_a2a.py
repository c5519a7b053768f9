"""Agents of A2A, made with the official SDK or scripted: they hang, ask back without end, flood, die and lie."""

import asyncio
import contextlib
import io
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("a2a.client", reason="needs a2a-sdk: bash scripts/test.sh installs requirements/a2a.lock")

from a2a.helpers.proto_helpers import new_data_part
from a2a.server.agent_execution import RequestContext
from a2a.server.tasks import TaskUpdater
from a2a.types import AgentCapabilities, AgentExtension, AgentInterface, Part
from google.protobuf.json_format import MessageToDict
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.servers.a2a_agents import agent, card, parts, scripted, serving, text_of
from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.a2a_tools import A2aTool, a2a_tools
from verl_multiturn.tools.base import ToolResponse
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.results import CallResult, CallStatus
from verl_multiturn.tools.running.session import ToolSession
from verl_multiturn.tools.services.http_client import ServiceFailedError, UnavailableError

WHERE = "tools.yaml: tools[0].a2a"
Said = dict[str, Any]


async def load(url: str, **settings: Any) -> list[A2aTool]:
    """Load in a thread: it blocks, and the agent of the test runs here."""
    return await asyncio.to_thread(a2a_tools, {"url": url, **settings}, WHERE)


async def one(url: str, *texts: str, **settings: Any) -> list[ToolResponse]:
    """Send messages in one conversation, and return the answers."""
    (tool,) = await load(url, **settings)
    await tool.create("r1")
    try:
        return [await tool.execute("r1", {"message": text}) for text in texts]
    finally:
        await tool.release("r1")


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 an agent sets no asyncio.Event
            await asyncio.sleep(0.01)


def message(text: str) -> ToolCall:
    return ToolCall("Travel_agent", json.dumps({"message": text}), "c")


def status(state: str, text: str = "", **ids: str) -> Said:
    said: Said = {"state": f"TASK_STATE_{state}"}
    if text:
        said["message"] = {"messageId": "m", "role": "ROLE_AGENT", "parts": [{"text": text}]}
    return {"statusUpdate": {"taskId": "t1", "contextId": "c1", **ids, "status": said}}


def task(state: str, **fields: Any) -> Said:
    return {"id": "t1", "contextId": "c1", "status": {"state": f"TASK_STATE_{state}"}, **fields}


async def echo(context: RequestContext, updater: TaskUpdater) -> None:
    await updater.start_work()
    await updater.add_artifact(parts(f"you said {text_of(context)}"))
    await updater.complete()


async def hang(context: RequestContext, updater: TaskUpdater) -> None:
    await updater.start_work()
    await asyncio.sleep(3600)


async def ask_back(context: RequestContext, updater: TaskUpdater) -> None:
    await updater.requires_input(updater.new_agent_message(parts(f"{text_of(context)}, and then?")))


# Answers.


@pytest.mark.parametrize("streaming", [True, False])
async def test_an_agent_is_one_tool_that_knows_a_conversation(streaming: bool) -> None:
    async with agent(echo, streaming, [("trips", "Plans trips."), ("hotels", "Finds beds.")]) as (url, worker):
        (tool,) = await load(url, prefix="my ", exclude=["hot*"])
        assert tool.name == "my_Travel_agent"
        assert tool.tool_schema.function.description == "Plans journeys.\n- trips: Plans trips."
        for conversation in ("a", "b"):
            await tool.create(conversation)
        said = [(await tool.execute(each, {"message": f"ü{each}"})).text for each in ("a", "b", "a")]
        for conversation in ("a", "b"):
            await tool.release(conversation)
    assert said == ["you said üa", "you said üb", "you said üa"]
    first, second, third = worker.contexts
    assert first == third != second
    assert worker.cancelled == []


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_question_is_the_answer_and_the_next_call_goes_on(streaming: bool) -> None:
    async def work(context: RequestContext, updater: TaskUpdater) -> None:
        if text_of(context) == "Rome":
            await echo(context, updater)
        else:
            await ask_back(context, updater)

    async with agent(work, streaming) as (url, worker):
        asked, said, more = await one(url, "book", "Rome", "book")
        assert (asked.text, said.text, more.text) == ("book, and then?", "you said Rome", "book, and then?")
        assert worker.tasks[0] == worker.tasks[1] != worker.tasks[2]
        assert len(set(worker.contexts)) == 1
        assert worker.cancelled == worker.tasks[2:], "a task that still waits is cancelled at the end"


async def test_parts_are_shown_or_named() -> None:
    held = io.BytesIO()
    Image.new("RGB", (8, 8), (255, 0, 0)).save(held, "PNG")

    async def work(context: RequestContext, updater: TaskUpdater) -> None:
        await updater.add_artifact(
            [
                Part(text="a"),
                Part(text="b"),
                new_data_part({"n": 1, "x": 0.5, "big": 2.0**60, "text": "ü"}),
                Part(raw=held.getvalue(), media_type="image/png"),
                Part(raw=b"%PDF", media_type="application/pdf", filename="r.pdf"),
                Part(raw="größe".encode(), media_type="text/csv"),
                Part(url="http://10.0.0.7/x", media_type="video/mp4", filename="film"),
                Part(),
            ]
        )
        await updater.complete(updater.new_agent_message(parts("done")))

    async with agent(work) as (url, _):
        (said,) = await one(url, "x")
    assert said.text.splitlines() == [
        "a",
        "b",
        '{"big": 1.152921504606847e+18, "n": 1, "text": "ü", "x": 0.5}',
        "[file 'r.pdf' (application/pdf, 4 bytes) that cannot be shown]",
        "größe",
        "[file 'film' (video/mp4) at http://10.0.0.7/x]",
        "[an empty part]",
        "done",
    ]
    assert said.image is not None
    assert [(image.size, image.getpixel((0, 0))) for image in said.image] == [((8, 8), (255, 0, 0))]


async def test_a_streamed_text_is_one_text() -> None:
    async def work(context: RequestContext, updater: TaskUpdater) -> None:
        for index, piece in enumerate(["To ", "Rome", "!"]):
            await updater.add_artifact(parts(piece), artifact_id="a", append=index > 0)
        await updater.complete(updater.new_agent_message(parts("To Rome!")))

    async with agent(work) as (url, _):
        (said,) = await one(url, "x")
    assert said.text == "To Rome!", "the same text in the artifact and in the status is shown once"


async def test_a_message_is_an_answer_without_a_task() -> None:
    def answer(asked: Said) -> Said:
        heard = asked["params"]["message"]
        its = {"messageId": "m", "role": "ROLE_AGENT", "contextId": "its own", "parts": [{"text": str(heard)}]}
        return {"result": {"message": its}}

    async with scripted(answer, streaming=False) as url:
        first, second = await one(url, "x", "y")
    assert "contextId" not in first.text
    assert "'contextId': 'its own'" in second.text
    assert "taskId" not in second.text


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda updater: updater.failed(), "the agent failed and did not say why"),
        (lambda updater: updater.failed(updater.new_agent_message(parts("no money"))), "no money"),
        (lambda updater: updater.reject(), "the agent rejects the message and does not say why"),
        (lambda updater: updater.cancel(), "the agent cancelled the task"),
        (
            lambda updater: updater.requires_auth(updater.new_agent_message(parts("log in"))),
            "the agent wants a login, which it cannot get here: log in",
        ),
    ],
)
async def test_a_task_that_ends_otherwise_is_an_error(end: Any, text: str) -> None:
    async def work(context: RequestContext, updater: TaskUpdater) -> None:
        await end(updater)

    async with agent(work) as (url, worker):
        with pytest.raises(ValueError, match=f"^{text}$"):
            await one(url, "x")
        assert len(worker.cancelled) == ("login" in text), "a task that waits for a login is cancelled"


async def test_an_image_that_cannot_be_read_is_an_error() -> None:
    async def work(context: RequestContext, updater: TaskUpdater) -> None:
        await updater.add_artifact([Part(raw=b"no image", media_type="image/png")])
        await updater.complete()

    async with agent(work) as (url, _):
        with pytest.raises(RuntimeError, match="an image that cannot be read"):
            await one(url, "x")


# Agents that do not come to an end.


async def in_session(
    tools: list[A2aTool], *turns: str, timeout_s: float = 60, most: int | None = None
) -> list[CallResult]:
    session = ToolSession("r1", {tool.name: tool for tool in tools}, {}, Gates(Gate, timeout_s), 100, most)
    async with session:
        return [(await session.execute([message(text)]))[0] for text in turns]


@pytest.mark.parametrize("streaming", [True, False])
async def test_an_agent_that_never_finishes_is_cancelled_at_the_deadline(streaming: bool) -> None:
    async with agent(hang, streaming) as (url, worker):
        (late,) = await in_session(await load(url), "x", timeout_s=2)
        assert late.status is CallStatus.TIMEOUT
        assert worker.cancelled == worker.tasks


async def test_a_conversation_that_is_cancelled_cancels_its_task() -> None:
    async with agent(hang) as (url, worker):
        running = asyncio.create_task(in_session(await load(url), "x"))
        await until(lambda: worker.tasks)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert worker.cancelled == worker.tasks


async def test_an_agent_that_hangs_in_its_end_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_multiturn.tools.services.a2a_client._END_S", 0.2)

    def answer(asked: Said) -> Any:
        if asked["method"] == "CancelTask":
            return silent()
        return {"result": {"task": task("INPUT_REQUIRED")}}

    async def silent() -> AsyncIterator[Said]:
        await asyncio.sleep(3600)
        yield {}

    async with scripted(answer, streaming=False) as url:
        (said,) = await one(url, "x")
    assert said.text == "the agent needs more, and does not say what; send it more"


async def test_an_agent_that_asks_back_for_ever_ends_with_the_calls() -> None:
    async with agent(ask_back) as (url, worker):
        *asked, last = await in_session(await load(url), "a", "b", "c", "d", most=3)
        assert [each.text for each in asked] == ["a, and then?", "b, and then?", "c, and then?"]
        assert last.status is CallStatus.OVER_LIMIT
        assert len(set(worker.tasks)) == 1
        assert worker.cancelled == worker.tasks[:1]


# Agents that flood.


@contextlib.asynccontextmanager
async def flooding(kind: str, before: bytes, floods_card: bool = False) -> AsyncIterator[tuple[str, list[int]]]:
    """Serve a gigabyte; yield the address, and the megabytes that went out."""
    sent: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET") and not floods_card:
                body = json.dumps(MessageToDict(card(url, kind == "text/event-stream"))).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + body)
            else:
                writer.write(
                    b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: %s\r\n\r\n" % kind.encode() + before
                )
                for _ in range(1024):
                    writer.write(b"x" * 1024 * 1024)
                    await writer.drain()
                    sent.append(1)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield url, sent


@pytest.mark.parametrize(
    ("kind", "before"), [("text/event-stream", b"data: "), ("application/json", b'{"result": {"task": "')]
)
async def test_a_file_of_a_gigabyte_is_not_read(kind: str, before: bytes) -> None:
    async with flooding(kind, before) as (url, sent):
        with pytest.raises(ValueError, match="the agent's answer has more than 16777216 bytes; ask for less"):
            await one(url, "x")
    assert 16 <= len(sent) < 100


async def test_a_stream_without_end_is_cut_and_its_task_cancelled() -> None:
    cancelled: list[str] = []

    async def events() -> AsyncIterator[Said]:
        yield {"task": task("WORKING")}
        while True:
            yield status("WORKING", "." * 1_000_000)
            await asyncio.sleep(0)

    def answer(asked: Said) -> Any:
        if asked["method"] == "CancelTask":
            cancelled.append(asked["params"]["id"])
            return {"result": task("CANCELED")}
        return events()

    async with scripted(answer) as url:
        with pytest.raises(ValueError, match="more than 16777216 bytes"):
            await one(url, "x")
    assert cancelled == ["t1"]


async def test_a_card_of_a_gigabyte_is_not_read() -> None:
    async with flooding("application/json", b'{"name": "', floods_card=True) as (url, sent):
        with pytest.raises(ConfigError, match="more than 16777216 bytes"):
            await load(url)
    assert 16 <= len(sent) < 100


async def test_a_compressed_answer_is_refused() -> None:
    def answer(asked: Said) -> Response:
        return Response(b"bomb", headers={"content-encoding": "gzip"}, media_type="application/json")

    async with scripted(answer, streaming=False) as url:
        with pytest.raises(ServiceFailedError, match="compressed"):
            await one(url, "x")


# Agents that are away, and die.


async def test_an_agent_that_ends_in_the_middle_is_an_outage() -> None:
    async with agent(hang) as (url, worker):
        (tool,) = await load(url)
        await tool.create("r1")
        running = asyncio.create_task(tool.execute("r1", {"message": "x"}))
        await until(lambda: worker.tasks)
    with pytest.raises(UnavailableError, match="cannot be reached"):
        await running
    await tool.release("r1")


async def test_conversations_that_cannot_be_ended_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    def answer(said: Said) -> Any:
        is_end = "end" in said["params"]["message"]["parts"][0]["text"]
        return Response(status_code=503) if is_end else {"result": {"task": task("COMPLETED")}}

    async with scripted(answer, streaming=False) as url:
        (tool,) = await load(url)
        for instance_id in ("r1", "r2"):
            await tool.create(instance_id)
            await tool.execute(instance_id, {"message": "x"})
            await tool.agent.leave(instance_id, tool.name, ends=True)
    (line,) = [each for each in caplog.messages if "a conversation could not be ended" in each]
    assert line.endswith("the agent keeps it until it ends it by itself (said once)")


async def test_an_agent_whose_stream_breaks_off_is_read_on() -> None:
    asked: list[str] = []

    async def events() -> AsyncIterator[Said]:
        yield {"task": task("WORKING")}
        raise ConnectionResetError

    def answer(said: Said) -> Any:
        asked.append(said["method"])
        if said["method"] != "GetTask":
            return events()
        done = [{"artifactId": "a", "parts": [{"text": "there"}]}]
        return {"result": task("COMPLETED", artifacts=done) if len(asked) > 2 else task("WORKING")}

    async with scripted(answer) as url:
        assert [each.text for each in await one(url, "x")] == ["there"]
    assert asked == ["SendStreamingMessage", "GetTask", "GetTask"]


async def test_an_agent_that_breaks_off_before_it_has_a_task_has_failed_at_one_message() -> None:
    async def events() -> AsyncIterator[Said]:
        raise ConnectionResetError
        yield {}

    async with scripted(lambda said: events()) as url:
        with pytest.raises(ServiceFailedError, match=r"^the agent broke off$"):
            await one(url, "x")


async def test_an_agent_that_lost_its_task_begins_anew() -> None:
    def answer(said: Said) -> Said:
        if said["method"] == "SendMessage" and said["params"]["message"].get("taskId"):
            return {"error": {"code": -32001, "message": "Task not found"}}
        return {"result": {"task": task("INPUT_REQUIRED")}}

    async with scripted(answer, streaming=False) as url:
        (tool,) = await load(url)
        await tool.create("r1")
        await tool.execute("r1", {"message": "x"})
        with pytest.raises(ServiceFailedError, match="does not know its task any more; send the whole message again"):
            await tool.execute("r1", {"message": "y"})
        assert "needs more" in (await tool.execute("r1", {"message": "x and y"})).text
        await tool.release("r1")


async def test_a_task_that_waits_outlives_an_outage() -> None:
    heard: list[Said] = []

    def answer(said: Said) -> Any:
        heard.append(said)
        return Response(status_code=503) if len(heard) == 2 else {"result": {"task": task("INPUT_REQUIRED")}}

    async with scripted(answer, streaming=False) as url:
        (tool,) = await load(url)
        await tool.create("r1")
        await tool.execute("r1", {"message": "x"})
        with pytest.raises(UnavailableError):
            await tool.execute("r1", {"message": "y"})
        await tool.execute("r1", {"message": "y"})
        assert [each["params"].get("message", {}).get("taskId") for each in heard] == [None, "t1", "t1"]
        await tool.release("r1")
    assert [each["method"] for each in heard[3:]] == ["CancelTask"]


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (503, UnavailableError, r"^the agent failed \(HTTP 503\)$"),
        (401, UnavailableError, r"does not take the key \(HTTP 401\); correct a2a.headers"),
        (404, UnavailableError, r"is not at this address \(HTTP 404\); correct a2a.url"),
        (302, UnavailableError, r"is not at this address \(HTTP 302\)"),
        (500, ServiceFailedError, r"^the agent failed \(HTTP 500\)$"),
        (400, ValueError, r"^the agent refused the message \(HTTP 400\)$"),
    ],
)
@pytest.mark.parametrize("streaming", [True, False])
async def test_statuses(code: int, error: type[Exception], text: str, streaming: bool) -> None:
    headers = {"retry-after": "7", "location": "http://127.0.0.1:9/"}
    async with scripted(lambda said: Response(status_code=code, headers=headers), streaming=streaming) as url:
        with pytest.raises(error, match=text) as raised:
            await one(url, "x")
    assert getattr(raised.value, "next_try_s", None) == (7.0 if error is UnavailableError else None)


@pytest.mark.parametrize(
    ("said", "error", "text"),
    [
        ({"error": {"code": -32603, "message": "boom"}}, ServiceFailedError, "^the agent failed: boom$"),
        ({"error": {"code": -32602, "message": "too long"}}, ValueError, "^the agent refuses the message: too long$"),
        ({"error": {"code": -5, "message": "quota"}}, ValueError, "refuses the message: .*quota"),
        ({"error": 5}, ServiceFailedError, "cannot be read"),
        ({}, ServiceFailedError, "cannot be read"),
        ({"result": 5}, ServiceFailedError, "cannot be read"),
        ({"result": {}}, ServiceFailedError, "cannot be read|without a result"),
        ({"result": {"task": {}}}, ServiceFailedError, "without a result"),
        ({"result": {"task": {"id": 7}}}, ServiceFailedError, "cannot be read"),
    ],
)
@pytest.mark.parametrize("streaming", [True, False])
async def test_answers_that_are_none(said: Said, error: type[Exception], text: str, streaming: bool) -> None:
    async with scripted(lambda asked: said, streaming=streaming) as url:
        with pytest.raises(error, match=text):
            await one(url, "x")


async def test_an_answer_that_is_no_json() -> None:
    async with scripted(lambda said: PlainTextResponse("hello"), streaming=False) as url:
        with pytest.raises(ServiceFailedError, match="cannot be read"):
            await one(url, "x")


# Cards.


def at(path: str, answer: Response) -> Starlette:
    async def its(request: Request) -> Response:
        return answer

    return Starlette(routes=[Route(path, its)])


NOT_A_CARD = [
    (PlainTextResponse("<html>"), "Expecting value"),
    (JSONResponse([1]), "must be a JSON object"),
    (JSONResponse({"name": 5}), "name"),
    (Response(status_code=401), r"HTTP 401; correct tools\.yaml: tools\[0\]\.a2a\.headers"),
    (Response(status_code=500), "HTTP 500"),
    (Response(status_code=302, headers={"location": "http://127.0.0.1:9/"}), "HTTP 302"),
]


@pytest.mark.parametrize(("answer", "why"), NOT_A_CARD)
async def test_what_is_no_card_is_refused_at_load(answer: Response, why: str) -> None:
    async with serving(at("/.well-known/agent-card.json", answer)) as url:
        with pytest.raises(ConfigError, match=why) as raised:
            await load(url)
        assert str(raised.value).startswith(f"{WHERE}: the agent at '{url}' has no card that can be read at ")


async def test_an_agent_without_a_card_is_refused_at_load() -> None:
    async with serving(Starlette()) as url:
        with pytest.raises(ConfigError) as raised:
            await load(f"{url}/x")
    assert str(raised.value) == (
        f"{WHERE}: the agent at '{url}/x' has no card that can be read at /x/.well-known/agent-card.json or "
        f"/x/.well-known/agent.json (HTTP 404; correct {WHERE}.url); start the agent, or give the address of its card"
    )
    with pytest.raises(ConfigError, match=r"ConnectError"):
        await load(url)


async def test_a_card_that_does_not_come_is_not_waited_for() -> None:
    async def its(request: Request) -> Response:
        await asyncio.sleep(1)
        return Response()

    async with serving(Starlette(routes=[Route("/{path:path}", its)])) as url:
        with pytest.raises(ConfigError, match=r"no answer within 0\.1 s"):
            await load(url, start_timeout_s=0.1)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"include": ["flights"]}, r"include: 'flights' fits none of the 1 skills of agent 'http://.*'trips'"),
        ({"exclude": ["*"]}, "'exclude' leaves none of the skills"),
        ({"headers": {"x": "${NOT_SET_HERE}"}}, "headers.x: the environment variable 'NOT_SET_HERE' is not set"),
        ({"headers": {"x": "ü"}}, "headers.x: it holds something that no header can hold"),
        ({"url": "agent:9"}, "is no address"),
        ({"port": 5}, "port"),
    ],
)
async def test_wrong_settings(settings: Said, text: str) -> None:
    async with agent(echo, skills=[("trips", "Plans trips.")]) as (url, _):
        with pytest.raises(ConfigError, match=text):
            await load(**{"url": url, **settings})


async def test_an_entry_that_is_no_mapping() -> None:
    with pytest.raises(ConfigError, match=r"tools\[0\]\.a2a: expected a mapping with 'url', got 'x'"):
        a2a_tools("x", WHERE)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"supported_interfaces": []}, "speaks nothing; expected JSONRPC"),
        ({"supported_interfaces": [AgentInterface(url="x", protocol_binding="GRPC")]}, "speaks GRPC; expected JSONRPC"),
        (
            {"supported_interfaces": [AgentInterface(url="http://localhost:9/", protocol_binding="JSONRPC")]},
            "leads to 'http://localhost:9/', another host, where no headers are sent; name .* under 'address'",
        ),
        (
            {"capabilities": AgentCapabilities(extensions=[AgentExtension(uri="urn:pay", required=True)])},
            "demands the extension 'urn:pay'",
        ),
    ],
)
async def test_cards_that_cannot_be_used(fields: Said, text: str) -> None:
    async with agent(echo, **fields) as (url, _):
        with pytest.raises(ConfigError, match=text):
            await load(url)


async def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.partition(".")[0] == "a2a" or "services.a2a_" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "verl_multiturn.tools.a2a_tools")
    monkeypatch.setitem(sys.modules, "a2a", None)
    from verl_multiturn.tools.loading.registry import build_tools

    with pytest.raises(
        ConfigError, match=r"needs the package a2a-sdk, .*; install it: pip install 'a2a-sdk\[http-server\]"
    ):
        build_tools({"a2a": {"url": "http://127.0.0.1:9"}}, "tools[0]")


@pytest.mark.parametrize("streaming", [True, False])
async def test_an_agent_of_the_older_protocol(streaming: bool) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/rpc"
    old = [AgentInterface(url=url, protocol_binding="JSONRPC", protocol_version="0.3")]
    async with agent(ask_back, streaming, listening=listening, supported_interfaces=old) as (address, worker):
        said = await one(address, "ü", "x")
        assert [each.text for each in said] == ["ü, and then?", "x, and then?"]
        assert len(set(worker.tasks)) == 1
        assert worker.cancelled == worker.tasks[:1]


# Reports of others.


async def test_the_address_in_a_card_that_is_wrong_can_be_set() -> None:
    """agent-framework#2307: a card of an agent behind a gateway names an address of its own network."""
    wrong = [AgentInterface(url="http://localhost:9/", protocol_binding="JSONRPC", protocol_version="1.0")]
    async with agent(echo, supported_interfaces=wrong) as (url, _):
        assert [each.text for each in await one(url, "x", address=f"{url}/rpc")] == ["you said x"]


@pytest.mark.parametrize("path", ["/.well-known/agent.json", "/v2/a2a/7/card.json"])
async def test_a_card_may_be_elsewhere(path: str) -> None:
    """a2a-inspector#86: agents of older versions; archestra#6992: cards of many agents of one host."""
    async with scripted(lambda said: {"result": {"task": task("COMPLETED", history=HISTORY)}}, streaming=False) as url:
        old = {
            "name": "Old agent", "description": "", "url": f"{url}/rpc", "version": "1", "capabilities": {},
            "skills": [], "defaultInputModes": [], "defaultOutputModes": [], "protocolVersion": "1.0",
        }  # fmt: skip
        async with serving(at(path, JSONResponse(old))) as cards:
            where = cards if path.startswith("/.well") else cards + path
            (said,) = await one(where, "x", address=f"{url}/rpc")
    assert said.text == "the last"


HISTORY = [
    {"messageId": "1", "role": "ROLE_AGENT", "parts": [{"text": "the first"}]},
    {"messageId": "2", "role": "ROLE_AGENT", "parts": [{"text": "the last"}]},
    {"messageId": "3", "role": "ROLE_USER", "parts": [{"text": "of the user"}]},
]


async def test_a_task_may_follow_its_own_updates_and_name_no_context() -> None:
    """a2a-python#501: updates, then the task as a whole; a2a-dotnet#347: updates with an empty context."""
    heard: list[Said] = []

    async def events() -> AsyncIterator[Said]:
        yield status("WORKING", contextId="")
        yield status("WORKING", "almost", contextId="")
        done = [{"artifactId": "a", "parts": [{"text": "done"}]}]
        yield {"task": task("COMPLETED", artifacts=done)}

    def answer(said: Said) -> Any:
        heard.append(said["params"]["message"])
        return events()

    async with scripted(answer) as url:
        assert [each.text for each in await one(url, "x", "y")] == ["done", "done"]
    assert [each.get("contextId") for each in heard] == [None, "c1"]


async def test_a_stream_that_stays_open_behind_a_question_is_left() -> None:
    """a2a-java#990: interrupted states keep the stream open; also a connection that is used again must be free."""

    async def events() -> AsyncIterator[Said]:
        yield {"task": task("WORKING")}
        yield status("INPUT_REQUIRED", "where to?")
        await asyncio.sleep(3600)

    async with scripted(
        lambda said: {"result": task("CANCELED")} if said["method"] == "CancelTask" else events()
    ) as url:
        async with asyncio.timeout(60):
            assert [each.text for each in await one(url, "x", "y")] == ["where to?", "where to?"]


async def test_64_conversations_at_once_are_not_mixed() -> None:
    async def work(context: RequestContext, updater: TaskUpdater) -> None:
        seen.setdefault(context.context_id or "", []).append(text_of(context))
        await updater.requires_input(updater.new_agent_message(parts(" ".join(seen[context.context_id or ""]))))

    seen: dict[str, list[str]] = {}
    async with agent(work) as (url, worker):
        (tool,) = await load(url)

        async def play(name: str) -> str:
            await tool.create(name)
            answers = [(await tool.execute(name, {"message": f"{name}{turn}"})).text for turn in range(3)]
            await tool.release(name)
            return answers[-1]

        said = await asyncio.gather(*(play(f"c{index}-") for index in range(64)))
        assert said == [" ".join(f"c{index}-{turn}" for turn in range(3)) for index in range(64)]
        assert len(worker.cancelled) == len(set(worker.cancelled)) == 64

"""Tools that call a service, with services that hang, drip, fail, lie, flood, break off and die."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse

from tests.conftest import free_port
from tests.serving import conversation, serving
from verl_multiturn.calls.outages.causes import cause_of
from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.tools.browse_service import BrowseServiceTool
from verl_multiturn.tools.code_service import CodeServiceTool
from verl_multiturn.tools.loading.call_limits import attach_limits
from verl_multiturn.tools.retrieval import RetrievalTool
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.results import CallStatus
from verl_multiturn.tools.running.session import ToolSession
from verl_multiturn.tools.services.http_client import HttpTool, ServiceFailedError, UnavailableError

GOOD = {
    "/retrieve": {"result": [[{"document": {"id": "1", "contents": "fine"}, "score": 1.0}]]},
    "/browse": {"title": "A", "text": "fine", "parts": 1},
    "/run_code": {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "fine"}},
    # One result for both routers.
    "/execute_batch": [{"execution": {"logs": {"stdout": ["fine"]}}, "text": "fine", "exception_str": None}],
}
TOOLS: dict[str, tuple[type[Any], dict[str, Any], dict[str, Any]]] = {
    "retrieval": (RetrievalTool, {}, {"query": "a"}),
    "browse": (BrowseServiceTool, {}, {"page": "a"}),
    "sandbox_fusion": (
        CodeServiceTool,
        {"service": "sandbox_fusion", "compile_timeout_s": 0.1, "run_timeout_s": 0.1},
        {"code": "a"},
    ),
    "e2b": (CodeServiceTool, {"service": "e2b", "run_timeout_s": 1, "request_timeout_s": 1}, {"code": "a"}),
    "morph": (CodeServiceTool, {"service": "morph", "run_timeout_s": 1}, {"code": "a"}),
}


class Service:
    """A service whose next answers have the fault `fault`."""

    def __init__(self) -> None:
        self.fault = ""
        self.asked = threading.Event()
        self.app = FastAPI()
        self.app.post("/{path:path}")(self._answer)

    async def _answer(self, path: str, request: Request) -> Any:
        good = json.dumps(GOOD[f"/{path}"]).encode()
        self.asked.set()
        match self.fault:
            case "hangs":
                await asyncio.Event().wait()
            case "drips":
                return StreamingResponse(self._drip(), media_type="application/json")
            case "floods":
                return StreamingResponse(self._flood(), media_type="application/json")
            case "floods compressed":
                bomb = gzip.compress(b" " * 100_000_000)
                return Response(bomb, headers={"content-encoding": "gzip"}, media_type="application/json")
            case "breaks off":
                return StreamingResponse(self._break_off(good), headers={"content-length": str(len(good))})
            case "redirects":
                return RedirectResponse(str(request.url))
            case status if status.isdecimal():
                text = "" if status == "204" else "<html>trouble</html>"  # a server resets a 204 with a body
                return Response(text, status_code=int(status))
            case "says nothing":
                return Response(b"")
            case "says half":
                return Response(good[: len(good) // 2])
            case "says HTML":
                return Response(b"<html>fine</html>")
            case "says no text":
                return Response(b'{"result": "\xff\xfe"}')
            case "says other JSON":
                return Response(b'{"result": 3, "status": [], "execution": "x"}')
            case "says deep JSON":
                return Response(b"[" * 1_000_000)
            case "says no results":
                return Response(b'{"result": [], "status": "Success"}' if path != "execute_batch" else b"[]")
        return Response(good)

    async def _drip(self) -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    async def _flood(self) -> AsyncIterator[bytes]:
        while True:  # a client that reads everything never ends
            yield b" " * 1_000_000
            await asyncio.sleep(0)

    async def _break_off(self, good: bytes) -> AsyncIterator[bytes]:
        yield good[:10]
        raise ConnectionResetError


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Service, str]]:
    service = Service()
    with serving(service.app) as url:
        yield service, url


@pytest.fixture
def service(running: tuple[Service, str]) -> Service:
    running[0].fault = ""
    running[0].asked.clear()
    return running[0]


def tool_of(name: str, url: str, **config: Any) -> HttpTool:
    tool_class, settings, _ = TOOLS[name]
    tool: HttpTool = tool_class({"url": url, **settings, **config})
    return tool


FAULTS = {
    "hangs": "did not answer within",
    "drips": "did not answer within",
    "breaks off": "broke off",
    "500": r"failed \(HTTP 500\)",
    "502": r"failed \(HTTP 502\)",
    "503": r"failed \(HTTP 503\)",
    "504": r"failed \(HTTP 504\)",
    "429": r"failed \(HTTP 429\)",
    "401": r"does not take the key \(HTTP 401\); correct config\.url",
    "402": r"does not take the key \(HTTP 402\); correct config\.url",
    "403": r"does not take the key \(HTTP 403\); correct config\.url",
    "407": r"is behind a proxy that refuses \(HTTP 407\); correct the password in HTTP_PROXY",
    "405": r"is not at this address \(HTTP 405\); correct config\.url",
    "421": r"is not at this address \(HTTP 421\); correct config\.url",
    "501": r"is not at this address \(HTTP 501\); correct config\.url",
    "redirects": r"is not at this address \(HTTP 307\); correct config\.url",
    "304": r"is not at this address \(HTTP 304\); correct config\.url",
    "204": "cannot be read",
    "floods compressed": "cannot be read",
    "says nothing": "cannot be read",
    "says half": "cannot be read",
    "says HTML": "cannot be read",
    "says no text": "cannot be read",
    "says other JSON": "cannot be read",
    "says deep JSON": "cannot be read",
    "says no results": "cannot be read",
}
LATE = {"hangs", "drips"}
OUTAGES = {
    *(
        "hangs",
        "drips",
        "429",
        "502",
        "503",
        "504",
        "401",
        "402",
        "403",
        "407",
        "405",
        "421",
        "501",
        "redirects",
        "304",
    ),
}
"""Faults that no single request can be the reason of, but for its time (`LATE` and 504)."""
REFUSALS = {
    "floods": "has more than 2000000 bytes",
    "400": r"refused the request \(HTTP 400\)",
    "413": r"refused the request \(HTTP 413\)",
    "422": r"refused the request \(HTTP 422\)",
    "451": r"refused the request \(HTTP 451\)",
}


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("fault", [*FAULTS, *REFUSALS])
async def test_every_fault_is_one_short_error_and_the_next_call_works(
    running: tuple[Service, str], service: Service, name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_multiturn.tools.services.http_client.MAX_CONNECTIONS", 1)
    tool = tool_of(name, running[1], timeout_s=4.1 if fault in LATE else 30.0)
    arguments = TOOLS[name][2]
    async with conversation(tool) as call:
        await call(**arguments)
        service.fault = fault
        with pytest.raises((UnavailableError, ServiceFailedError, ValueError)) as caught:
            await call(**arguments)
        assert caught.match(FAULTS.get(fault) or REFUSALS[fault])
        assert isinstance(caught.value, ValueError) == (fault in REFUSALS), "whether a retry may help"
        garbage = {fault for fault, says in FAULTS.items() if says == "cannot be read"}
        out = OUTAGES if isinstance(tool, CodeServiceTool) else OUTAGES | garbage
        assert (cause_of(caught.value, "outage") == "outage") == (fault in out)
        assert (cause_of(caught.value, "model") == "outage") == (fault in out - LATE - {"504"})
        assert len(str(caught.value)) < 100
        assert running[1] not in str(caught.value), "the model has no business with addresses"
        service.fault = ""
        assert "fine" in (await call(**arguments))[0].text, "the one connection was given back"
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("status", ["404", "410"])
@pytest.mark.parametrize("name", TOOLS)
async def test_nothing_there_is_the_address_unless_the_model_has_named_the_thing(
    running: tuple[Service, str], service: Service, name: str, status: str
) -> None:
    async with conversation(tool_of(name, running[1])) as call:
        service.fault = status
        with pytest.raises((UnavailableError, ValueError)) as caught:
            await call(**TOOLS[name][2])
    if name == "browse":
        assert (str(caught.value), cause_of(caught.value, "model")) == (
            f"the browse server refused the request (HTTP {status})",
            "model",
        )
    else:
        assert caught.match(rf"is not at this address \(HTTP {status}\); correct config\.url")
        assert cause_of(caught.value, "model") == "outage"


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("fault", ["hangs", "drips"])
async def test_a_cancelled_call_gives_its_connection_back(
    running: tuple[Service, str], service: Service, name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_multiturn.tools.services.http_client.MAX_CONNECTIONS", 1)
    arguments = TOOLS[name][2]
    async with conversation(tool_of(name, running[1])) as call:
        service.fault = fault
        working, waiting = (asyncio.create_task(call(**arguments)) for _ in range(2))
        await asyncio.to_thread(service.asked.wait)
        for task in (waiting, working):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        service.fault = ""
        assert "fine" in (await call(**arguments))[0].text


@pytest.mark.parametrize("name", TOOLS)
async def test_nobody_listens(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    async with conversation(tool_of(name, url)) as call:
        with pytest.raises(UnavailableError, match="cannot be reached"):
            await call(**TOOLS[name][2])


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0\xff" * 50,
        b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nx" + b"y" * 200_000,
    ],
    ids=["nothing", "no HTTP", "less than promised", "endless header"],
)
async def test_no_http_at_all(answer: bytes) -> None:
    async def answer_so(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer_so, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with conversation(tool_of("retrieval", url)) as call:
            with pytest.raises(ServiceFailedError, match="broke off"):
                await call(query="a")


SERVER = """
import sys, uvicorn
from tests.faults.test_remote_tools import Service
uvicorn.run(Service().app, host="127.0.0.1", port=int(sys.argv[1]), log_level="info", ws="none")
"""


async def test_an_answer_that_breaks_off_is_an_outage_where_nobody_listens_any_more() -> None:
    async def answer_so(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        server.close()
        writer.close()

    server = await asyncio.start_server(answer_so, "127.0.0.1", 0)
    async with conversation(tool_of("retrieval", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")) as call:
        with pytest.raises(UnavailableError, match="broke off"):
            await call(query="a")


@contextlib.contextmanager
def own_process(port: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run the service as a process of its own, and yield the process and its port."""
    command = [sys.executable, "-c", SERVER, str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            line = next(line for line in iter(process.stderr.readline, "") if "running on" in line)
            yield process, int(line.partition("127.0.0.1:")[2].split()[0])
        finally:
            process.kill()


@pytest.mark.parametrize("name", TOOLS)
def test_a_server_that_dies_between_calls_and_comes_back(name: str) -> None:
    arguments = TOOLS[name][2]

    async def calls(first: subprocess.Popen[str], port: int) -> None:
        descriptors = len(os.listdir("/proc/self/fd"))
        async with conversation(tool_of(name, f"http://127.0.0.1:{port}")) as call:
            assert "fine" in (await call(**arguments))[0].text
            await asyncio.to_thread(stop, first)
            with pytest.raises((UnavailableError, ServiceFailedError), match=r"cannot be reached|broke off"):
                await call(**arguments)
            with pytest.raises(UnavailableError, match="cannot be reached"):
                await call(**arguments)
            with own_process(port):
                assert "fine" in (await call(**arguments))[0].text
        assert len(os.listdir("/proc/self/fd")) <= descriptors

    with own_process(free_port()) as (first, port):
        asyncio.run(calls(first, port))


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


async def test_the_runtime_repeats_what_may_help_and_only_that(
    running: tuple[Service, str], service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_multiturn.tools.running.session.BACKOFF_S", 0.001)
    tool = tool_of("retrieval", running[1])
    attach_limits(tool, {"retries": 5}, "test")
    call = ToolCall(tool.name, '{"query": "a"}', "c1")
    async with ToolSession("r1", {tool.name: tool}, {}, Gates(Gate, 10.0), 8) as session:
        service.fault = "422"
        (result,) = await session.execute([call])
        assert (result.status, result.attempts) == (CallStatus.ERROR, 1)
        assert result.text == "Error: the search server refused the request (HTTP 422)"
        service.fault = "500"
        (result,) = await session.execute([call])
        assert (result.status, result.attempts) == (CallStatus.ERROR, 6)
        assert result.text == "Error: ServiceFailedError: the search server failed (HTTP 500)"
        service.fault = ""
        (result,) = await session.execute([call])
        assert (result.status, result.attempts) == (CallStatus.OK, 1)


async def test_the_connections_live_as_long_as_the_conversations(
    running: tuple[Service, str], service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_multiturn.tools.services.http_client.MAX_CONNECTIONS", 2)
    tool = tool_of("retrieval", running[1])
    async with conversation(tool, "a") as a:
        async with conversation(tool, "b") as b:
            await asyncio.gather(*(call(query="a") for call in (a, b) for _ in range(10)))
            shared = tool._connections.get(tool._open_connections)
        await tool.release("d")  # the `create` was cancelled before it ran
        assert tool._connections.get(tool._open_connections) is shared
        clients = list(shared._idle)
        assert [client.is_closed for client in clients] == [False, False]
    assert [client.is_closed for client in clients] == [True, True]
    async with conversation(tool, "c") as c:
        assert "fine" in (await c(query="a"))[0].text
        assert tool._connections.get(tool._open_connections) is not shared


def test_event_loops_share_no_connections(running: tuple[Service, str], service: Service) -> None:
    tool = tool_of("retrieval", running[1])
    texts: list[str] = []

    async def ask() -> None:
        async with conversation(tool) as call:
            for _ in range(20):
                texts.append((await call(query="a"))[0].text)

    threads = [threading.Thread(target=asyncio.run, args=(ask(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["[1] 1\nfine"] * 60
    assert not tool._connections.everywhere()

"""Clients that leave, drip, flood and pipeline; a server that is closed while requests run."""

import asyncio
import json
import socket
import struct
from typing import Any
from unittest.mock import ANY

import httpx
import pytest
from aiohttp import web

from tests.proxy_clients import HELLO, FakeSession, answer, connect, post, serving, until
from verl_multiturn.proxy.http import bodies, clients
from verl_multiturn.proxy.http import server as server_module
from verl_multiturn.proxy.http.bodies import MOST_BYTES
from verl_multiturn.proxy.http.clients import has_ended, was_reset
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.protocols.requests import RefusedError

STREAMED = {**HELLO, "stream": True}


def reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection so that the other side gets a reset."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Held:
    """A transport on a socket that is never read."""

    def __init__(self, held: socket.socket) -> None:
        self._held = held

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> socket.socket:
        return self._held


@pytest.mark.parametrize(("how", "breaks"), [("reads", False), ("half", False), ("close", True), ("reset", True)])
def test_what_the_system_knows_of_the_other_side(how: str, breaks: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        held, _ = listening.accept()
    transport: Any = Held(held)
    assert (has_ended(transport), was_reset(transport)) == (False, False)
    if how == "half":
        client.shutdown(socket.SHUT_WR)
    elif how == "close":
        client.close()
    elif how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    assert (has_ended(transport), was_reset(transport)) == (how != "reads", how == "reset")
    if how != "reset":
        held.send(b"answer")
    if how == "reads":
        client.recv(100)
        client.close()  # who has read everything breaks nothing
        assert has_ended(transport)
    assert was_reset(transport) == breaks
    client.close()
    held.close()
    assert (has_ended(transport), was_reset(transport), has_ended(None)) == (True, True, True)


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("body", [HELLO, STREAMED])
async def test_a_client_that_leaves_while_it_runs_gets_nothing_and_stops_nothing(how: str, body: Any) -> None:
    session = FakeSession(open_gate=False)
    async with serving(session, ping_s=0.01) as (_, access):
        reader, writer = await connect(access)
        writer.write(post(access, body))
        await until(lambda: session.asked)
        if body is STREAMED:
            await reader.readuntil(b"ping")
        {"close": writer.close, "reset": lambda: reset(writer)}[how]()
        await until(lambda: session.fates)
        assert session.fates == ["undelivered"]  # at once: the next identical request takes over
        writer.close()


@pytest.mark.parametrize("body", [HELLO, STREAMED])
async def test_a_client_that_leaves_in_the_middle_of_a_long_answer_did_not_get_it(body: Any) -> None:
    session = FakeSession("x" * 30_000_000)
    async with serving(session) as (_, access):
        reader, writer = await connect(access)
        writer.write(post(access, body))
        await reader.readexactly(1000)
        assert session.fates == []  # not before the last byte has gone
        writer.close()
        await until(lambda: session.fates)
        assert session.fates == ["undelivered"]


@pytest.mark.parametrize("body", [HELLO, STREAMED])
async def test_a_slow_reader_gets_all_of_it(body: Any) -> None:
    session = FakeSession("x" * 20_000_000)
    async with serving(session) as (_, access):
        reader, writer = await connect(access)
        writer.write(post(access, body))
        head = await reader.readexactly(1000)
        await asyncio.sleep(0.1)
        assert session.fates == []
        rest = 0
        while rest + len(head) < 20_000_000:
            rest += len(await reader.read(1_000_000))
        await until(lambda: session.fates)
        assert session.fates == ["delivered"]
        writer.close()


async def test_a_client_that_closes_as_soon_as_it_has_read_did_get_it() -> None:
    session = FakeSession()
    async with serving(session) as (_, access):
        for _ in range(50):
            reader, writer = await connect(access)
            writer.write(post(access, HELLO, "/v1/chat/completions", "connection: close"))
            assert (await answer(reader))[0] == 200
            writer.close()
        await until(lambda: len(session.fates) == 50)
    assert session.fates == ["delivered"] * 50


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat", "headers", "half the body"])
async def test_a_client_that_leaves_before_its_request_is_whole_asks_nothing(sent: Any) -> None:
    session = FakeSession()
    async with serving(session) as (server, access):
        whole = post(access, HELLO)
        written = {"headers": whole[: whole.index(b"\r\n\r\n") + 4], "half the body": whole[:-20]}.get(sent, sent)
        _, writer = await connect(access)
        writer.write(written)
        await until(lambda: server._http.connections)
        writer.close()
        await until(lambda: not server._http.connections)
    assert (session.asked, session.failed) == ([], "")


async def test_dripping_bodies_end_and_disturb_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 2.0)
    session = FakeSession()
    async with serving(session) as (_, access):
        reader, writer = await connect(access)
        whole = post(access, HELLO)
        writer.write(whole[:-30])

        async def drip() -> None:
            for byte in whole[-30:]:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.1)

        dripping = asyncio.create_task(drip())
        beside, other = await connect(access)
        other.write(post(access, HELLO))
        assert (await answer(beside))[0] == 200
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"]) == (408, "close")
        dripping.cancel()
        writer.close()
        other.close()
    assert len(session.asked) == 1


async def test_dripping_headers_and_silent_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "UNAUTHENTICATED_S", 2.0)
    async with serving(FakeSession()) as (_, access):
        known, keeper = await connect(access)
        keeper.write(post(access, HELLO))
        assert (await answer(known))[0] == 200
        for start in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nx-a: ", b"HEAD / HTTP/1.1\r\nhost: h\r\n\r\n"):
            reader, writer = await connect(access)
            writer.write(start)
            async with asyncio.timeout(60):
                await reader.read()
            writer.close()
        keeper.write(post(access, HELLO))  # who has shown a key may wait as long as he likes
        assert (await answer(known))[0] == 200
        keeper.close()


async def test_too_many_unauthenticated_connections_push_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MOST_UNAUTHENTICATED", 3)
    async with serving(FakeSession()) as (_, access):
        opened = [await connect(access) for _ in range(5)]
        async with asyncio.timeout(60):
            assert [await reader.read() for reader, _ in opened[:2]] == [b"", b""]
        for reader, writer in opened[2:]:
            writer.write(post(access, HELLO))
            assert (await answer(reader))[0] == 200
        for _, writer in opened:
            writer.close()


async def test_too_many_connections_of_a_session_push_out_its_idle_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_MOST_CONNECTIONS", 3)
    session = FakeSession()
    async with serving(session) as (server, access):
        opened = [await connect(access) for _ in range(5)]
        for reader, writer in opened:
            writer.write(post(access, HELLO))
            assert (await answer(reader))[0] == 200
        await until(lambda: len(server._http.connections) == 3)
        for reader, writer in opened[2:]:
            writer.write(post(access, HELLO))
            assert (await answer(reader))[0] == 200
        for _, writer in opened:
            writer.close()


async def test_pipelined_requests_are_answered_in_order() -> None:
    session = FakeSession(open_gate=False)
    async with serving(session) as (_, access):
        reader, writer = await connect(access)
        texts = [str(number) for number in range(40)]
        writer.write(b"".join(post(access, {**HELLO, "model": text}) for text in texts))
        await until(lambda: session.asked)
        session.gate.set()
        assert [json.loads((await answer(reader))[2])["model"] for _ in texts] == texts
        writer.close()
        await until(lambda: len(session.fates) == 40)
    assert session.fates == ["delivered"] * 40


async def test_one_connection_serves_many_requests_and_sessions() -> None:
    first, second = FakeSession("first"), FakeSession("second")
    async with serving(first) as (server, one):
        two = server.open(second)
        reader, writer = await connect(one)
        for access, said in ((one, b"first"), (two, b"second"), (one, b"first")):
            writer.write(post(access, HELLO))
            assert said in (await answer(reader))[2]
        writer.close()


async def test_a_hundred_at_once() -> None:
    session = FakeSession(open_gate=False)
    async with serving(session) as (_, access), httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as client:
        headers = {"x-api-key": access.api_key}
        url = f"{access.base_url}/chat/completions"
        asking = [
            asyncio.create_task(client.post(url, json={**HELLO, "stream": number % 2 == 0}, headers=headers))
            for number in range(100)
        ]
        await until(lambda: len(session.asked) == 100)
        session.gate.set()
        assert {(await each).status_code for each in asking} == {200}
        await until(lambda: len(session.fates) == 100)
    assert set(session.fates) == {"delivered"}


async def test_large_bodies_of_one_session_wait_for_each_other() -> None:
    session = FakeSession(open_gate=False)
    async with serving(session) as (server, access):
        other = FakeSession()
        beside = server.open(other)
        body = json.dumps(HELLO).encode().ljust(MOST_BYTES)
        headers = {"x-api-key": access.api_key}
        async with httpx.AsyncClient(timeout=60) as client:
            url = f"{access.base_url}/chat/completions"
            asking = [asyncio.create_task(client.post(url, content=body, headers=headers)) for _ in range(6)]
            await until(lambda: len(session.asked) == 4)
            small = await client.post(url, json=HELLO, headers={"x-api-key": beside.api_key})
            assert small.status_code == 200  # another session waits for nothing
            await asyncio.sleep(0.1)
            assert len(session.asked) == 4
            session.gate.set()
            assert {(await each).status_code for each in asking} == {200}


async def test_100_continue() -> None:
    async with serving(FakeSession()) as (_, access):
        reader, writer = await connect(access)
        whole = post(access, HELLO, "/v1/chat/completions", "expect: 100-continue")
        split = whole.index(b"\r\n\r\n") + 4
        writer.write(whole[:split])
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(whole[split:])
        assert (await answer(reader))[0] == 200
        writer.close()


@pytest.mark.parametrize("body", [HELLO, STREAMED])
async def test_the_end_of_a_session_ends_its_requests_and_no_others(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_IDLE_S", 0.05)  # then its connection is closed, and read to its end
    session, other = FakeSession(open_gate=False), FakeSession(open_gate=False)
    async with serving(session, ping_s=0.01) as (server, access):
        beside = server.open(other)
        running = [await connect(one) for one in (access, beside)]
        for (_, writer), one in zip(running, (access, beside), strict=True):
            writer.write(post(one, body))
        await until(lambda: session.asked and other.asked)
        session.raises = RefusedError(400, "session_over", "the session is over")
        session.gate.set()  # as `AgentSession.end` does: generations under way end with this
        await server.close_session(access)
        assert b"session_over" in await running[0][0].read()
        other.gate.set()
        await until(lambda: other.fates == ["delivered"])
        for _, writer in running:
            writer.close()


async def test_a_connection_that_sessions_share_outlives_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_IDLE_S", 0.0)
    async with serving(FakeSession()) as (server, access):
        beside = server.open(FakeSession())
        opened = [await connect(access) for _ in range(2)]
        for _ in range(2):
            for (reader, writer), last in zip(opened, (beside, access), strict=True):
                for one in (access, beside, last):
                    writer.write(post(one, HELLO))
                    assert (await answer(reader))[0] == 200
        await server.close_session(access)
        assert await opened[1][0].read() == b""  # idle, and of no other session
        opened[0][1].write(post(beside, HELLO))
        assert (await answer(opened[0][0]))[0] == 200
        for _, writer in opened:
            writer.close()


async def test_a_connection_outlives_its_session_while_a_route_beside_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_IDLE_S", 0.0)
    looks, gate, reached = 0, asyncio.Event(), asyncio.Event()
    close_idle = server_module._OpenSession._close_idle

    def look(opened: Any) -> None:
        nonlocal looks
        looks += 1
        close_idle(opened)

    async def slow() -> web.Response:
        reached.set()
        await gate.wait()
        return web.Response(text="counted")

    monkeypatch.setattr(server_module._OpenSession, "_close_idle", look)
    beside = lambda request: slow() if request.path == "/beside" else None  # noqa: E731
    async with serving(FakeSession(), beside=beside) as (server, access):
        reader, writer = await connect(access)
        writer.write(post(access, HELLO))
        assert (await answer(reader))[0] == 200
        writer.write(post(access, HELLO, "/beside"))
        await reached.wait()
        await server.close_session(access)
        await until(lambda: looks >= 2)
        gate.set()
        assert await answer(reader) == (200, ANY, b"counted")
        assert await reader.read() == b""  # idle now
        writer.close()


async def test_a_stuck_request_is_ended_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_ENDING_S", 0.05)
    session = FakeSession(open_gate=False)
    async with serving(session) as (server, access):
        reader, writer = await connect(access)
        writer.write(post(access, HELLO))
        await until(lambda: session.asked)
        await server.close_session(access)
        assert session.fates == ["undelivered"]
        assert await reader.read() == b""
        writer.close()


async def test_a_reader_who_stands_still_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_ENDING_S", 0.05)
    session = FakeSession("x" * 30_000_000)
    async with serving(session) as (server, access):
        reader, writer = await connect(access)
        writer.write(post(access, STREAMED))
        await reader.readexactly(1000)
        await server.close_session(access)
        assert session.fates == ["undelivered"]
        await until(lambda: not server._http.connections)
        writer.close()


@pytest.mark.parametrize("within", ["close", "cancelled worker"])
async def test_closing_while_twenty_requests_run_leaves_nothing(within: str) -> None:
    session = FakeSession(open_gate=False)
    before = asyncio.all_tasks()
    opened: list[asyncio.StreamWriter] = []

    async def worker() -> None:
        async with ProxyServer(ping_s=0.01) as server:
            access = server.open(session)
            for number in range(20):
                _, writer = await connect(access)
                opened.append(writer)
                writer.write(post(access, STREAMED if number % 2 else HELLO))
            _, silent = await connect(access)
            opened.append(silent)
            await until(lambda: len(session.asked) == 20)
            ports.append(int(access.anthropic_base_url.rpartition(":")[2]))
            if within == "cancelled worker":
                await asyncio.Event().wait()

    ports: list[int] = []
    working = asyncio.create_task(worker())
    await until(lambda: ports)
    if within == "cancelled worker":
        working.cancel()
    await asyncio.wait({working})
    assert working.cancelled() == (within == "cancelled worker")
    assert session.fates == ["undelivered"] * 20
    for writer in opened:
        writer.close()
    await until(lambda: asyncio.all_tasks() <= before)
    with socket.create_server(("127.0.0.1", ports[0])):
        pass  # the port is free

"""Clients that close their sending side after the request, as HTTP allows: they get their answers."""

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from tests.proxy_clients import HELLO, FakeSession, answer, connect, post, serving, until

STREAMED = {**HELLO, "stream": True}
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


async def final(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read an answer after interim ones; return its status and body."""
    while True:
        status, _, body = await answer(reader)
        if status != 100:
            return status, body


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("body", [HELLO, STREAMED])
@pytest.mark.parametrize("when", ["with the request", "while it runs"])
def test_a_half_closed_client_gets_its_answer(
    new_loop: Callable[[], asyncio.AbstractEventLoop], body: Any, when: str
) -> None:
    async def play() -> None:
        session = FakeSession(open_gate=False)
        async with serving(session, ping_s=0.01) as (server, access):
            reader, writer = await connect(access)
            writer.write(post(access, body))
            if when == "while it runs":
                await until(lambda: session.asked)
                if body is STREAMED:
                    await reader.readuntil(b"ping\n\n\r\n")
            writer.write_eof()
            await until(lambda: session.asked)
            await asyncio.sleep(0.05)  # enough to notice; if it is not, the test proves less, but passes
            assert session.fates == []
            session.gate.set()
            got = await reader.read()
            assert b"one" in got
            assert got.endswith(b"0\r\n\r\n" if body is STREAMED else b"}")
            assert session.fates == ["delivered"]
            writer.close()
            await until(lambda: not server._http.connections)  # it is closed when the answer is written

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(play())


@pytest.mark.parametrize("count", [1, 3])
async def test_requests_that_came_together_are_all_answered(count: int) -> None:
    session = FakeSession()
    async with serving(session) as (server, access):
        reader, writer = await connect(access)
        writer.write(b"".join(post(access, {**HELLO, "model": str(number)}) for number in range(count)))
        writer.write_eof()
        for number in range(count):
            status, body = await final(reader)
            assert (status, json.loads(body)["model"]) == (200, str(number))
        assert await reader.read() == b""
        await until(lambda: not server._http.connections)
        writer.close()
    assert session.fates == ["delivered"] * count


async def test_other_answers_and_an_older_http() -> None:
    session = FakeSession()
    async with serving(session) as (server, access):
        for path, body in (("/v1/messages/count_tokens", HELLO), ("/v1/chat/completions", b"{"), ("/nowhere", HELLO)):
            reader, writer = await connect(access)
            writer.write(post(access, body, path))
            writer.write_eof()
            assert (await final(reader))[0] == {"/v1/chat/completions": 400, "/nowhere": 404}.get(path, 200)
            writer.close()
        reader, writer = await connect(access)
        writer.write(post(access, HELLO).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        writer.write_eof()
        assert (await reader.read(100)).startswith(b"HTTP/1.0 200 OK")  # and nothing before: it knows no interim answer
        writer.close()
        await until(lambda: not server._http.connections)


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("body", [HELLO, STREAMED])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_one_that_leaves_later_is_noticed(
    new_loop: Callable[[], asyncio.AbstractEventLoop], body: Any, how: str
) -> None:
    """The last data sent to it is in its socket, unread, so that its system answers with a reset."""

    async def play() -> None:
        session = FakeSession(open_gate=False)
        async with serving(session, ping_s=0.01) as (_, access):
            _, writer = await connect(access)
            held = writer.get_extra_info("socket")
            writer.transport.pause_reading()
            writer.write(post(access, body))
            writer.write_eof()
            await until(lambda: session.asked)
            await until(lambda: readable(held))
            if how == "reset":
                held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            await until(lambda: session.fates)
            assert session.fates == ["undelivered"]

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(play())


def readable(held: Any) -> bytes:
    """Return the data in a socket, without removing it."""
    with socket.socket(fileno=socket.dup(held.fileno())) as other:
        try:
            return other.recv(100, socket.MSG_PEEK)
        except BlockingIOError:
            return b""


@pytest.mark.parametrize("sent", ["half the head", "half the body", "a request and half of the next"])
async def test_what_is_cut_off_is_no_request(sent: str) -> None:
    session = FakeSession()
    async with serving(session) as (server, access):
        whole = post(access, HELLO)
        reader, writer = await connect(access)
        if sent == "a request and half of the next":
            session.gate.clear()
            writer.write(whole)
            await until(lambda: session.asked)
        writer.write(whole[:20] if sent == "half the head" else whole[:-20])
        await until(lambda: server._http.connections)
        writer.write_eof()
        await until(lambda: not server._http.connections)
        assert await reader.read() == b""
        writer.close()
    assert (len(session.asked), session.failed) == (sent.startswith("a request"), "")

"""A user behind an endpoint: a server on loopback that answers, refuses, is full, drips, breaks off or lies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from verl_multiturn.calls.outages.causes import cause_of, next_try_s
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.base import Reply
from verl_multiturn.interactions.errors import EnvironmentFailedError
from verl_multiturn.interactions.llm_user import LlmUser

ANSWERED = [{"role": "user", "content": "A flight to Rome, please."}, {"role": "assistant", "content": "When?"}]
KEY = "sk-secret-4711"


def completion(message: Any) -> bytes:
    return json.dumps({"choices": [{"message": message}]}).encode()


def http(status: int, body: bytes, headers: str = "", length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n{headers}\r\n".encode() + body


def said(text: Any) -> bytes:
    return http(200, completion({"role": "assistant", "content": text}))


class Endpoint:
    """A server that sends these bytes in turn, and repeats the last ones; then it closes the connection.

    `None` never sends anything; a list sends its parts with a pause in between, again and again.
    """

    def __init__(self, replies: Sequence[Any]) -> None:
        self._replies = list(replies)
        self.heads: list[str] = []
        self.bodies: list[Any] = []
        self.open = 0
        self.was_asked, self.is_idle = asyncio.Event(), asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.is_idle.clear()
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self._answer(reader, writer)
        writer.close()
        self.open -= 1
        if not self.open:
            self.is_idle.set()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        length = next(line for line in head.lower().splitlines() if line.startswith("content-length:"))
        self.bodies.append(json.loads(await reader.readexactly(int(length.partition(":")[2]))))
        self.was_asked.set()
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        if isinstance(reply, bytes):
            writer.write(reply)
            await writer.drain()
            return
        gone = asyncio.ensure_future(reader.read())
        while not gone.done():
            for part in reply or []:
                writer.write(part)
                await writer.drain()
            await asyncio.wait({gone}, timeout=0.02)


@contextlib.asynccontextmanager
async def user(*replies: Any, **config: Any) -> AsyncIterator[tuple[LlmUser, Endpoint]]:
    endpoint = Endpoint(replies)
    server = await asyncio.start_server(endpoint.answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    simulated = LlmUser({"base_url": url, "model": "ann", "persona": "You are Ann.", "timeout_s": 5.0, **config})
    try:
        await simulated.start("a")
        yield simulated, endpoint
    finally:
        await simulated.close("a")
        server.close()
        if endpoint.open:
            await asyncio.wait_for(endpoint.is_idle.wait(), 60)


async def test_an_endpoint_plays_the_user() -> None:
    replies = (said("<think>When?</think>On Monday, \ud800 please."), said("Thanks. ###STOP###"))
    async with user(*replies, temperature=0.5, max_tokens=9) as (ann, endpoint):
        assert await ann.reply("a", ANSWERED) == Reply(text="On Monday, \ud800 please.")
        assert await ann.reply("a", ANSWERED) == Reply(text="Thanks.", done=True)
    body = endpoint.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("ann", 0.5, 9)
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["messages"][-1]["content"] == "When?"
    assert "authorization" not in endpoint.heads[0].lower()


@pytest.mark.parametrize(
    "first",
    [
        http(429, b"slow down", "retry-after: 0\r\n"),
        http(500, b"oops"),
        http(200, b'{"choices": []}'),
        http(200, b'{"choices": [{"mess'),
        http(200, b"half", length=400),
        http(200, completion({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]})),
        http(200, completion("text")),
        http(200, completion({"content": ["text"]})),
        http(200, b"x" * 1_100_000),
        http(200, b"{}", "content-encoding: gzip\r\n"),
        said(""),
        said("<think>hm"),
        b"",
    ],
    ids=range(13),
)
async def test_it_is_asked_again_and_then_given_up(first: bytes) -> None:
    async with user(first, said("On Monday.")) as (ann, endpoint):
        assert await ann.reply("a", ANSWERED) == Reply(text="On Monday.")
        assert len(endpoint.bodies) == 2
    async with user(first, attempts=2) as (ann, endpoint):
        with pytest.raises(EnvironmentFailedError, match=r"the user's model at http://127\.0\.0\.1:\d+/v1/chat/compl"):
            await ann.reply("a", ANSWERED)
        assert len(endpoint.bodies) == 2


async def test_it_waits_as_long_as_the_endpoint_says() -> None:
    async with user(http(429, b"", "retry-after: 1\r\n"), said("On Monday.")) as (ann, _):
        began = time.monotonic()
        assert await ann.reply("a", ANSWERED) == Reply(text="On Monday.")
        assert time.monotonic() - began >= 1.0
    async with user(http(429, b"", "retry-after: 60\r\n")) as (ann, _):
        with pytest.raises(EnvironmentFailedError, match="asking again in 60 s would be too late"):
            await ann.reply("a", ANSWERED)


@pytest.mark.parametrize("reply", [None, [b"HTTP/1.1 200 X\r\n", b"a: b\r\n"]], ids=["hangs", "drips"])
async def test_one_that_is_late(reply: Any) -> None:
    async with user(reply, timeout_s=0.3) as (ann, endpoint):
        with pytest.raises(EnvironmentFailedError, match=r"did not answer within 0\.3 s") as caught:
            await ann.reply("a", ANSWERED)
        assert [cause_of(caught.value, whose) for whose in ("model", "outage")] == ["model", "outage"]
        assert len(endpoint.bodies) == 1


KEY_OF, URL_OF = "LlmUser: config.api_key_env", "LlmUser: config.base_url"


@pytest.mark.parametrize(
    ("status", "advice", "cause"),
    [
        (400, "", "bug"),
        (413, "", "bug"),
        (422, "", "bug"),
        (401, f"; correct {KEY_OF}", "outage"),
        (402, f"; correct {KEY_OF}", "outage"),
        (403, f"; correct {KEY_OF}", "outage"),
        (407, "; correct the password in HTTP_PROXY", "outage"),
        (404, f"; correct {URL_OF}", "outage"),
        (405, f"; correct {URL_OF}", "outage"),
        (501, f"; correct {URL_OF}", "outage"),
        (308, f"; correct {URL_OF}", "outage"),
    ],
)
async def test_one_that_refuses_is_asked_once(status: int, advice: str, cause: str) -> None:
    async with user(http(status, b"no", "location: http://127.0.0.2:9/\r\n")) as (ann, endpoint):
        with pytest.raises(EnvironmentFailedError) as caught:
            await ann.reply("a", ANSWERED)
        assert len(endpoint.bodies) == 1
    assert str(caught.value).endswith(f"refuses: status {status}: 'no'{advice}")
    assert cause_of(caught.value, "model") == cause


async def test_it_says_when_it_wants_to_be_asked_again() -> None:
    async with user(http(503, b"", "retry-after: 3600\r\n"), attempts=1) as (ann, _):
        with pytest.raises(EnvironmentFailedError) as caught:
            await ann.reply("a", ANSWERED)
    assert next_try_s(caught.value) == 60


async def test_one_that_is_not_there() -> None:
    ann = LlmUser({"base_url": "http://127.0.0.1:9/v1", "model": "ann", "persona": "p", "attempts": 2})
    await ann.start("a")
    with pytest.raises(EnvironmentFailedError, match="ConnectError"):
        await ann.reply("a", ANSWERED)
    await ann.close("a")


async def test_the_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANNS_KEY", f" {KEY}\n")
    bodies = [http(401, f"bad key {KEY}".encode()), http(500, b"x" * 195 + KEY.encode()), http(200, KEY.encode())]
    for body in bodies:
        async with user(body, api_key_env="ANNS_KEY", attempts=1) as (ann, endpoint):
            with pytest.raises(EnvironmentFailedError) as caught:
                await ann.reply("a", ANSWERED)
            assert f"authorization: Bearer {KEY}".lower() in endpoint.heads[0].lower()
            shown = f"{caught.value!r} {caught.value.__cause__!r} {ann!r} {vars(ann)!r} {ann.config!r}"
            assert "sk-secret"[:6] not in shown


async def test_a_key_that_is_written_with_escapes_is_not_shown_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANNS_KEY", "sk/one+two")
    spellings = [r"sk\/one+two", r"\u0073k/one\u002Btwo", r"sk\u002fone+two"]
    for spelling in spellings:
        refusal = f'{{"error": "no such key: {spelling}"}}'.encode()
        async with user(http(401, refusal), api_key_env="ANNS_KEY", attempts=1) as (ann, _):
            with pytest.raises(EnvironmentFailedError) as caught:
                await ann.reply("a", ANSWERED)
            assert "no such key: [key]" in str(caught.value)
        body = completion({"role": "assistant", "content": "I am [x]."}).replace(b"[x]", spelling.encode())
        async with user(http(200, body), api_key_env="ANNS_KEY") as (ann, _):
            assert (await ann.reply("a", ANSWERED)).text == "I am [key]."


async def test_a_cancelled_reply_leaves_nothing_behind() -> None:
    async with user(None) as (ann, endpoint):
        asking = asyncio.ensure_future(ann.reply("a", ANSWERED))
        await endpoint.was_asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(endpoint.is_idle.wait(), 60)  # the connection is closed


async def test_many_users_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_multiturn.interactions.llm_user._CONNECTIONS", 8)
    async with user(said("On Monday.")) as (ann, endpoint):
        names = [f"n{index}" for index in range(64)]
        for name in names:
            await ann.start(name)
        assert {reply.text for reply in await asyncio.gather(*[ann.reply(name, ANSWERED) for name in names])} == {
            "On Monday."
        }
        for name in names:
            await ann.close(name)
        assert len(endpoint.bodies) == 64


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": "m"}, "LlmUser: config.base_url: Field required, got nothing"),
        ({"base_url": "users:8000", "model": "m"}, "expected an address such as"),
        ({"base_url": "http://ann:secret@users/v1", "model": "m"}, "without a user, a password or a query"),
        ({"base_url": "http://users/v1?key=secret", "model": "m"}, "without a user, a password or a query"),
        ({"base_url": "http://users/v1", "model": "m", "api_key_env": "NO_SUCH"}, "'NO_SUCH' is not set here"),
        ({"base_url": "http://users/v1", "model": "m", "api_key_env": "ODD"}, "'ODD' holds something that cannot be"),
        ({"base_url": "http://users/v1", "model": "m", "api_key": "secret"}, "did you mean 'api_key_env'"),
    ],
)
def test_settings(config: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH", raising=False)
    monkeypatch.setenv("ODD", "secret\nkey")
    with pytest.raises(ConfigError, match=message) as caught:
        LlmUser(config)
    assert "secret" not in str(caught.value)

"""The endpoint of a session: keys, paths, answers whole and streamed, errors that end a client's attempts."""

import asyncio
import gzip
import json
import logging
from typing import Any

import httpx
import openai
import orjson
import pytest

from tests.proxy_clients import HELLO, FakeSession, answer, connect, post, serving, until
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.errors import ConfigError
from verl_multiturn.proxy.http.bodies import MOST_BYTES, WeightedSemaphore, inflated
from verl_multiturn.proxy.http.parsing import parse_body
from verl_multiturn.proxy.http.server import ProxyServer, check_host
from verl_multiturn.proxy.protocols.requests import RefusedError

PATHS = ["/v1/chat/completions", "/chat/completions", "/v1/v1/chat/completions", "//v1/chat/completions/"]


async def ask(access: Any, path: str = "/v1/chat/completions", **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=access.anthropic_base_url) as client:
        headers = options.pop("headers", {"authorization": f"Bearer {access.api_key}"})
        return await client.post(path, json=options.pop("json", HELLO), headers=headers, **options)


async def test_openai_client_gets_a_whole_answer() -> None:
    session = FakeSession("forty-two")
    async with (
        serving(session) as (_, access),
        openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client,
    ):
        completion = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
    assert completion.choices[0].message.content == "forty-two"
    assert session.asked[0].messages[0]["content"] == "hello"
    assert session.fates == ["delivered"]


async def test_openai_client_gets_a_stream() -> None:
    session = FakeSession("forty-two")
    async with (
        serving(session) as (_, access),
        openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client,
    ):
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert said == "forty-two"
    assert session.fates == ["delivered"]


@pytest.mark.parametrize("path", PATHS)
async def test_v1_may_be_missing_or_doubled(path: str) -> None:
    async with serving(FakeSession()) as (_, access):
        assert (await ask(access, path)).status_code == 200


@pytest.mark.parametrize("how", ["bearer", "x-api-key", "path", "path beside another key"])
async def test_secret_is_taken_from(how: str) -> None:
    async with serving(FakeSession()) as (_, access):
        secret = access.api_key
        headers = {
            "bearer": {"authorization": f"bearer {secret}"},
            "x-api-key": {"x-api-key": secret},
            "path": {},
            "path beside another key": {"authorization": "Bearer sk-own"},
        }[how]
        path = "/v1/messages?beta=true" if not how.startswith("path") else f"/s/{secret}/v1/messages?beta=true"
        assert (await ask(access, path, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic wrong"}, {"x-api-key": "ÿ"}]
)
async def test_no_session_opens_without_its_secret(headers: dict[str, str]) -> None:
    session = FakeSession()
    async with serving(session) as (_, access):
        encoded = {key: value.encode("latin-1") for key, value in headers.items()}
        for path in ("/v1/chat/completions", "/v1/messages/count_tokens", "/s/wrong/v1/responses"):
            refused = await ask(access, path, headers=encoded)
            assert refused.status_code == 401
            assert "key" in refused.json()["error"]["message"]
        async with httpx.AsyncClient(base_url=access.anthropic_base_url) as client:
            assert (await client.get("/v1/models", headers=encoded)).status_code == 401
    assert not session.asked


async def test_a_secret_reaches_only_its_own_session() -> None:
    first, second = FakeSession("first"), FakeSession("second")
    async with serving(first) as (server, one):
        two = server.open(second)
        assert one.api_key != two.api_key
        assert len(one.api_key) >= 43  # 256 bits
        assert "first" in (await ask(one)).text
        assert "second" in (await ask(two)).text
        beside = await ask(one, f"/s/{two.api_key}/v1/chat/completions")
        assert "second" in beside.text
        wrong = await ask(one, "/s/wrong/v1/chat/completions")
        assert wrong.status_code == 401
    assert (len(first.asked), len(second.asked)) == (1, 2)


async def test_after_the_end_the_secret_is_dead() -> None:
    session = FakeSession()
    async with serving(session) as (server, access):
        assert (await ask(access)).status_code == 200
        await server.close_session(access)
        assert (await ask(access)).status_code == 401
        await server.close_session(access)
    assert len(session.asked) == 1


async def test_a_head_and_a_get_of_the_base_need_no_key() -> None:
    async with serving(FakeSession()) as (_, access), httpx.AsyncClient(base_url=access.anthropic_base_url) as client:
        assert (await client.head("/")).status_code == 200
        assert (await client.get(f"/s/{access.api_key}/v1/")).json() == {"status": "ok"}


async def test_models() -> None:
    async with (
        serving(FakeSession(), model="qwen") as (_, access),
        openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client,
    ):
        assert [model.id async for model in client.models.list()] == ["qwen"]
        assert (await client.models.retrieve("other/name")).id == "other/name"
        with pytest.raises(openai.APIStatusError) as raised:
            await client.models.delete("qwen")
    assert raised.value.status_code == 405


async def test_tokens_are_counted() -> None:
    async with serving(FakeSession()) as (_, access):
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        assert (await ask(access, "/v1/messages/count_tokens", json=body)).json() == {"input_tokens": 17}


@pytest.mark.parametrize("method", ["POST", "GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_an_unknown_path_is_named_before_the_key_is_looked_at(method: str) -> None:
    """Gemini's clients send their key in a header that is not read here."""
    session = FakeSession()
    async with serving(session) as (server, access), httpx.AsyncClient(base_url=access.anthropic_base_url) as client:
        for headers in ({}, {"x-goog-api-key": access.api_key}, {"authorization": "Bearer wrong"}):
            for path in ("/v1beta/models/policy:generateContent", "/nowhere", "/s/wrong/v1/embeddings"):
                lost = await client.request(method, path, headers=headers, content=b"x" * 100)
                assert lost.status_code == 404
                if method != "HEAD":
                    said = lost.json()["error"]["message"]
                    assert said.startswith("nothing is served at this path; use one of ['/v1/chat/completions'")
        wrong = await client.post("/v1/models/policy:generateContent", headers={"x-goog-api-key": access.api_key})
        assert (wrong.status_code, "expected GET for /v1/models/" in wrong.text) == (405, True)
        reader, writer = await connect(access)
        writer.write(b"POST /nowhere HTTP/1.1\r\nhost: h\r\ncontent-length: 9000000000\r\n\r\n")
        status, answered, _ = await answer(reader)
        assert (status, answered["connection"]) == (404, "close")  # the body is not read
        writer.close()
        assert all(not opened.connections for opened in server._open.values())  # none of them shows a key
    assert session.asked == []


async def test_unknown_paths_and_methods() -> None:
    async with serving(FakeSession()) as (_, access), httpx.AsyncClient(base_url=access.anthropic_base_url) as client:
        headers = {"x-api-key": access.api_key}
        lost = await client.post(f"/s/{access.api_key}/v1/embeddings", json={}, headers=headers)
        assert lost.status_code == 404
        assert access.api_key not in lost.text
        assert (await client.get("/v1/chat/completions", headers=headers)).status_code == 405


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff{}", "no JSON"),
        (b"[]", "a JSON list, expected an object"),
        (b"null", "a JSON NoneType, expected an object"),
        (b'{"messages": NaN}', "no JSON"),
        (b'{"messages":' + b"[" * 5000, "no JSON"),
        (b'{"model": "\\ud800x"', "no JSON"),
    ],
)
async def test_bad_json_is_final(body: bytes, words: str) -> None:
    session = FakeSession()
    async with serving(session) as (_, access):
        reader, writer = await connect(access)
        writer.write(post(access, body))
        status, _, content = await answer(reader)
        assert status == 400
        assert words in json.loads(content)["error"]["message"]
        writer.write(post(access, HELLO))  # the connection goes on
        assert (await answer(reader))[0] == 200
        writer.close()
    assert not session.failed


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (r"\ud83d\ude00", "😀"),
        (r"\ud83d", "�"),
        (r"a\ude00\ud83d!", "a��!"),
        (r"\\ud83d", r"\ud83d"),
        (r"\\\ud83d", "\\�"),
        (r"\ud83d\ud83d\ude00\n", "�😀\n"),
        (r"\"\ud83d\"", '"�"'),
    ],
)
def test_halves_of_surrogate_pairs_become_the_replacement_character(text: str, read: str) -> None:
    assert parse_body(f'{{"a": "{text}", "b": "\\uD83D"}}'.encode()) == {"a": read, "b": "�"}


def test_whole_numbers_stay_whole() -> None:
    for number in (2**63, -(2**64) - 1, 10**300):
        assert parse_body(f'{{"a": {number}, "b": "\\ud83d"}}'.encode()) == {"a": number, "b": "�"}
    with pytest.raises(RefusedError, match="number is infinity"):
        parse_body(b'{"a": ' + b"1" * 5000 + b"}")


def test_inflated_bodies_are_bounded() -> None:
    assert inflated(gzip.compress(b'{"a": 1}'), "gzip") == b'{"a": 1}'
    bomb = gzip.compress(b'{"a": "' + b" " * MOST_BYTES + b'"}')
    whole = gzip.compress(b'{"a": 1}')
    cases = [(bomb, 413), (whole[:-3], 400), (b'{"a": 1}', 400), (whole + whole, 400), (whole + b" ", 400)]
    for body, status in cases:
        with pytest.raises(RefusedError) as raised:
            inflated(body, "gzip")
        assert raised.value.status == status


def test_bodies_that_take_long_to_parse_are_refused() -> None:
    assert parse_body(b'{"a": [' + b"[]," * 149_997 + b"0]}")["a"][-1] == 0
    assert parse_body(b'{"a": "' + b"x" * 1_000_000 + b'"}')["a"][0] == "x"
    for large in (b'{"a": [' + b"[]," * 149_998 + b"0]}", b"[" + b'{"a":1},' * 75_000 + b"0]"):
        with pytest.raises(RefusedError, match="more than 150000 brackets, braces and colons"):
            parse_body(large)


async def test_compressed_bodies() -> None:
    async with serving(FakeSession()) as (_, access):
        for encoding, status in (("gzip", 200), ("GZIP", 200), ("zstd", 415), ("br", 415), ("gzip, gzip", 415)):
            headers = {"authorization": f"Bearer {access.api_key}", "content-encoding": encoding}
            async with httpx.AsyncClient(base_url=access.anthropic_base_url) as client:
                content = gzip.compress(orjson.dumps(HELLO))
                got = await client.post("/v1/chat/completions", content=content, headers=headers)
            assert got.status_code == status


@pytest.mark.parametrize(
    ("lines", "status", "code"),
    [
        (["transfer-encoding: chunked"], 200, ""),
        (["transfer-encoding: Chunked"], 200, ""),
        (["transfer-encoding: gzip, chunked"], 400, "unsupported_transfer_encoding"),
        (["transfer-encoding: chunked, chunked"], 400, ""),  # by the parser, as the next
        (["transfer-encoding: gzip", "transfer-encoding: chunked"], 400, ""),
        (["transfer-encoding: chunked", "content-encoding: identity"], 200, ""),
        (["transfer-encoding: chunked", "content-encoding: identity", "content-encoding: gzip"], 415, ""),
        (["transfer-encoding: chunked", "content-encoding: identity", "content-encoding: br"], 415, ""),
    ],
)
async def test_a_body_of_another_coding_is_refused_by_name(lines: list[str], status: int, code: str) -> None:
    session = FakeSession()
    body = orjson.dumps(HELLO)
    async with serving(session) as (_, access):
        reader, writer = await connect(access)
        writer.write(post(access, b"", "/v1/chat/completions", *lines))
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        found, _, text = await answer(reader)
        writer.close()
    assert found == status
    assert len(session.asked) == (status == 200)
    if code:
        error = json.loads(text)["error"]
        assert error["code"] == code
        assert repr(lines[0].partition(": ")[2]) in error["message"]


async def test_the_largest_body_is_read_and_a_larger_one_refused_unread() -> None:
    session = FakeSession()
    async with serving(session) as (_, access):
        largest = json.dumps(HELLO).encode().ljust(MOST_BYTES)
        headers = {"authorization": f"Bearer {access.api_key}"}
        async with httpx.AsyncClient(base_url=access.anthropic_base_url, timeout=30) as client:
            assert (await client.post("/v1/chat/completions", content=largest, headers=headers)).status_code == 200
            refused = await client.post("/v1/chat/completions", content=largest + b" ", headers=headers)
            assert refused.status_code == 413
            assert "8388608 bytes" in refused.json()["error"]["message"]
        reader, writer = await connect(access)
        writer.write(post(access, b"", "/v1/messages", "content-length: 9000000000"))
        assert (await answer(reader))[0] == 413
        writer.close()
        reader, writer = await connect(access)
        writer.write(post(access, b"", "/v1/messages", "transfer-encoding: chunked"))
        piece = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
        for _ in range(9):
            writer.write(piece)
        assert (await answer(reader))[0] == 413
        writer.close()
    assert len(session.asked) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_have_their_status_and_leave_the_session_well(stream: bool) -> None:
    session = FakeSession()
    session.raises = RefusedError(400, "context_length_exceeded", "9 tokens, at most 8; send less")
    async with serving(session) as (_, access):
        refused = await ask(access, json={**HELLO, "stream": stream})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert not session.failed


@pytest.mark.parametrize(("written", "value"), [(str(2**64), 2**64), (r'"\ud800"', "\ud800")])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_with_what_orjson_cannot_write_is_answered(written: str, value: object, stream: bool) -> None:
    session = FakeSession()
    session.calls = [ToolCall("add", f'{{"a": {written}}}', "abcdefgh1")]
    async with serving(session) as (_, access):
        answered = await ask(access, "/v1/messages", json={**HELLO, "stream": stream})
    assert answered.status_code == 200
    assert session.failed == ""
    if not stream:
        assert json.loads(answered.content)["content"][-1]["input"] == {"a": value}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_mistake_of_ours_is_final_and_logged_once(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    session = FakeSession()
    session.raises = KeyError("ours")
    async with serving(session) as (_, access):
        for _ in range(3):
            refused = await ask(access, f"/s/{access.api_key}/v1/chat/completions", json={**HELLO, "stream": stream})
            assert refused.status_code == 400
            assert "KeyError" in refused.json()["error"]["message"]
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert access.api_key not in caplog.text
    assert session.failed == "the proxy failed: KeyError: 'ours'"


async def test_an_error_within_a_stream_is_an_event() -> None:
    session = FakeSession(open_gate=False)
    session.raises = RefusedError(400, "context_length_exceeded", "9 tokens, at most 8; send less")
    async with serving(session, ping_s=0.01) as (_, access):
        reader, writer = await connect(access)
        writer.write(post(access, {**HELLO, "stream": True}))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head
        assert b"text/event-stream" in head
        session.gate.set()
        rest = await reader.readuntil(b"0\r\n\r\n")
        assert b"context_length_exceeded" in rest
        writer.close()


async def test_pings_flow_while_it_runs() -> None:
    session = FakeSession("late", open_gate=False)
    async with serving(session, ping_s=0.01) as (_, access):
        reader, writer = await connect(access)
        writer.write(post(access, {**HELLO, "stream": True}))
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(3):
            assert b"ping" in await reader.readuntil(b"ping\n\n\r\n")
        session.gate.set()
        assert b"late" in await reader.readuntil(b"0\r\n\r\n")
        writer.close()
        await until(lambda: session.fates == ["delivered"])


async def test_no_secret_in_a_representation_or_a_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(FakeSession()) as (server, access):
        assert access.api_key not in repr(access)
        for rubbish in (f"POST /s/{access.api_key}/v1 SMTP\r\n\r\n", f"/s/{access.api_key}\x00\r\n\r\n"):
            reader, writer = await connect(access)
            writer.write(rubbish.encode())
            status, _, content = await answer(reader)
            assert status == 400
            assert access.api_key.encode() not in content
            writer.close()
        assert access.api_key not in repr(vars(server))
    assert access.api_key not in caplog.text


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "0:0::0"])
def test_all_interfaces_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="stands for all interfaces; name the one address"):
        check_host(host)


async def test_hosts() -> None:
    for host in ("localhost", "127.0.0.2"):
        async with ProxyServer(host) as server:
            assert (await ask(server.open(FakeSession()))).status_code == 200
    with pytest.raises(ConfigError, match=r"'203.0.113.1': cannot listen there"):
        await ProxyServer("203.0.113.1").start()
    with pytest.raises(RuntimeError, match="call `start` first"):
        ProxyServer().open(FakeSession())


async def test_bodies_beyond_what_may_be_held_wait_in_order() -> None:
    semaphore, order = WeightedSemaphore(10), []

    async def use(name: str, count: int) -> None:
        await semaphore.acquire(count)
        order.append(name)

    await use("a", 7)
    waiting = [asyncio.create_task(use(name, count)) for name, count in (("b", 4), ("c", 1), ("d", 1))]
    await asyncio.sleep(0)
    assert order == ["a"]  # c would fit, and does not overtake b
    waiting[1].cancel()
    await asyncio.sleep(0)
    semaphore.release(7)
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == ["a", "b", "d"]
    semaphore.release(5)
    await use("all", 10)


async def test_a_body_of_unknown_length_is_held_as_long_as_it_is() -> None:
    session = FakeSession("late", open_gate=False)
    async with serving(session) as (_, access):
        writers = [await connect(access) for _ in range(9)]
        body = orjson.dumps(HELLO)
        for _, writer in writers:  # four of the longest would be all that a session may hold
            writer.write(post(access, b"", "/v1/chat/completions", "transfer-encoding: chunked"))
            writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        await until(lambda: len(session.asked) == 9)
        session.gate.set()
        for reader, writer in writers:
            assert (await answer(reader))[0] == 200
            writer.close()

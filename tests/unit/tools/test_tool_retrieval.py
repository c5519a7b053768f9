"""The retrieval server and its client, against each other and against Search-R1's protocol."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI, Request
from typer.testing import CliRunner

from tests.serving import conversation, serving
from verl_multiturn import ConfigError
from verl_multiturn.cli.main import app
from verl_multiturn.tools.bm25 import Bm25Index
from verl_multiturn.tools.retrieval import RetrievalTool
from verl_multiturn.tools.retrieval_server import build_server

LINES = [
    {"id": "p", "title": "Paris", "contents": "Paris is the capital of France."},
    {"id": "b", "contents": '"Berlin"\nBerlin is the capital of Germany.'},
    {"id": "r", "contents": "Rome is the capital of Italy."},
    {"id": "s", "contents": "lone surrogate: \ud800 capital"},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "c.jsonl").write_text("\n".join(map(json.dumps, LINES)))
    return folder


@pytest.fixture(scope="module")
def url(corpus: Path) -> Iterator[str]:
    index = Bm25Index.open(corpus, corpus.with_name(f"{corpus.name}-index"))
    with serving(build_server(index, default_top_k=2)) as address:
        yield address


def test_the_protocol(url: str) -> None:
    asked = {"queries": ["france", "berlin", "nothing"], "topk": 1, "return_scores": True}
    answer = httpx.post(f"{url}/retrieve", json=asked).json()
    (paris,), (berlin,), nothing = answer["result"]
    assert paris["document"] == {"id": "p", "title": "Paris", "contents": "Paris\nParis is the capital of France."}
    assert paris["score"] > 0
    assert berlin["document"]["contents"] == '"Berlin"\nBerlin is the capital of Germany.'
    assert nothing == []
    bare = httpx.post(f"{url}/retrieve", json={"queries": ["capital"]}).json()
    assert [len(documents) for documents in bare["result"]] == [2], "the server's own top_k"
    assert set(bare["result"][0][0]) == {"id", "title", "contents"}
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "documents": 4}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 422),
        (b"\xff", 422),
        (b"[" * 100_000, 422),
        (b'{"queries": "one"}', 422),
        (b'{"queries": []}', 422),
        (b'{"queries": ["a"], "topk": 0}', 422),
        (b'{"queries": ["a"], "topk": 101}', 422),
        (json.dumps({"queries": ["a" * 10_001]}).encode(), 422),
        (json.dumps({"queries": ["a"] * 1_025}).encode(), 422),
        (b" " * 4_000_001, 413),
        (b'{"queries": ["?", ""], "return_scores": true}', 200),
    ],
)
def test_what_the_server_refuses(url: str, body: bytes, status: int) -> None:
    assert httpx.post(f"{url}/retrieve", content=body).status_code == status
    assert httpx.get(f"{url}/health").status_code == 200


async def test_requests_beyond_the_most_at_once_get_503(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.tools import retrieval_server

    index = Bm25Index.open(corpus, corpus.with_name(f"{corpus.name}-index"))
    searching, answers = threading.Event(), threading.Event()

    def waits(*arguments: Any) -> list[Any]:
        searching.set()
        answers.wait()
        return []

    monkeypatch.setattr(retrieval_server, "_search", waits)
    with serving(build_server(index, at_once=1)) as url:
        async with httpx.AsyncClient() as client:
            first = asyncio.create_task(client.post(f"{url}/retrieve", json={"queries": ["a"]}, timeout=None))
            await asyncio.to_thread(searching.wait)
            assert (await client.post(f"{url}/retrieve", json={"queries": ["b"]})).status_code == 503
            answers.set()
            assert (await first).status_code == 200
            assert (await client.get(f"{url}/health")).status_code == 200


def test_bodies_that_cannot_be_read_are_the_clients_mistake(url: str, caplog: pytest.LogCaptureFixture) -> None:
    refused = httpx.post(f"{url}/retrieve", content=b"no gzip", headers={"Content-Encoding": "gzip"})
    assert refused.status_code == 422
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as leaves:
        leaves.sendall(b"POST /retrieve HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nhalf")
    assert httpx.get(f"{url}/health").status_code == 200
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_texts_that_are_none_become_readable_json(corpus: Path, url: str) -> None:
    answer = httpx.post(f"{url}/retrieve", json={"queries": ["surrogate"]})
    assert orjson.loads(answer.content)["result"][0][0]["contents"] == "lone surrogate: ? capital"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "203.0.113.1", "--port", "0"], "--host 203.0.113.1 --port 0: cannot listen there"),
        (["--corpus", "nowhere"], "nowhere"),
    ],
)
def test_a_server_that_cannot_start(corpus: Path, words: list[str], said: str) -> None:
    index_dir = str(corpus.with_name(f"{corpus.name}-index"))
    done = CliRunner().invoke(app, ["retrieval-server", "--corpus", str(corpus), "--index-dir", index_dir, *words])
    assert done.exit_code == 2
    assert said in done.stderr


def tool_of(url: str, **config: Any) -> RetrievalTool:
    return RetrievalTool({"url": url, "top_k": 1, **config})


async def test_client_and_server(url: str) -> None:
    tool = tool_of(url)
    assert (tool.pure, tool.repeatable, tool.name) == (True, True, "search")
    async with conversation(tool) as call:
        response, reward, metrics = await call(query="capital of France")
        assert response.text == "[1] Paris\nParis is the capital of France."
        assert (reward, metrics) == (0.0, {"hits": 1})
        response, _, metrics = await call(query=["germany", "nothing"])
        assert response.text == (
            "Results for 'germany':\n\n[1] Berlin\nBerlin is the capital of Germany.\n\n"
            "Results for 'nothing':\n\nNo document fits; try other words."
        )
        assert (await call(query="rome"))[0].text == "[1] r\nRome is the capital of Italy."
        assert (await call(query="surrogate"))[2] == {"hits": 1}
        with pytest.raises(ValueError, match="the query is empty"):
            await call(query=" ")
        with pytest.raises(ValueError, match="has no words"):
            await call(query="\ud800")


async def test_many_conversations_share_the_connections(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_multiturn.tools.services.http_client.MAX_CONNECTIONS", 4)
    tool = tool_of(f"{url}/retrieve")  # the address may hold the path

    async def ask(name: str) -> dict[str, Any]:
        async with conversation(tool, name) as call:
            return (await call(query="italy"))[2]

    assert await asyncio.gather(*(ask(f"c{i}") for i in range(100))) == [{"hits": 1}] * 100


async def test_no_more_documents_than_asked_for_and_none_without_fields() -> None:
    server = FastAPI()

    @server.post("/retrieve")
    async def retrieve(request: Request) -> dict[str, Any]:
        queries = (await request.json())["queries"]
        hit = {"document": {"id": 3, "text": "x" * 500, "url": "elsewhere"}}
        return {"result": [[hit] * 9 for query in queries if query != "lost"], "time_ms": 1}

    with serving(server) as url:
        async with conversation(tool_of(url, top_k=2, snippet_characters=20)) as call:
            response, _, metrics = await call(query="a")
            assert response.text == "\n\n".join(f"[{i}] 3\n{'x' * 20}…" for i in (1, 2))
            assert metrics == {"hits": 2}
            with pytest.raises(RuntimeError, match="cannot be read"):
                await call(query=["a", "lost"])


def test_settings_that_cannot_work() -> None:
    for url in ("127.0.0.1:8000", "ftp://host", "http://", "http://a\nb", "nonsense"):
        with pytest.raises(ConfigError, match=r"config.url: .*expected an address such as .*, got"):
            tool_of(url)
    with pytest.raises(ConfigError, match="did you mean 'timeout_s'"):
        tool_of("http://localhost", timeout=3)
    with pytest.raises(ConfigError, match=r"config.url: Field required"):
        RetrievalTool({})


def test_the_server_as_a_command(corpus: Path) -> None:
    command = [sys.executable, "-m", "verl_multiturn.cli", "retrieval-server", "--corpus", str(corpus), "--port", "0"]
    command += ["--index-dir", str(corpus.with_name(f"{corpus.name}-index"))]

    async def ask(address: str) -> dict[str, Any]:
        async with conversation(tool_of(address)) as call:
            return (await call(query="rome"))[2]

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            said = iter(server.stdout.readline, "")
            address = next(found[0] for line in said if (found := re.search(r"http://[\d.:]+", line)))
            assert asyncio.run(ask(address)) == {"hits": 1}
            server.send_signal(signal.SIGINT)
            assert server.wait() == 130
        finally:
            server.kill()

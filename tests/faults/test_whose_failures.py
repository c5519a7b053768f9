"""Whose a failure is, by errors that real clients raise: who wrote the address, or the text that cannot be read.

Each error is one of a real client against a real server of this machine.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
import socket
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.dom import minidom
from xml.etree import ElementTree

import aiohttp
import httpx
import openai
import orjson
import pytest
import requests
import urllib3
import yaml
from pydantic import BaseModel

from tests.faults.answering import Answering, answering
from verl_multiturn import OutageError
from verl_multiturn.calls.outages.authorship import WrittenTexts
from verl_multiturn.calls.outages.causes import Cause, cause_of

PATIENCE_S = 30.0

Client = Callable[[str], Any]

_is_hurried = False


def seconds() -> float:
    """Return the time limit of a client: one that is always over, where lateness is tested."""
    return 0.05 if _is_hurried else PATIENCE_S


class Rows(BaseModel):
    rows: list[str]


@pytest.fixture(scope="module")
def server() -> Iterator[Answering]:
    with answering() as running:
        yield running


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("NO_PROXY", "*")


def by_urllib(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=seconds()) as answer:
        return json.load(answer)


def by_urllib_text(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=seconds()) as answer:
        text = answer.read().decode()
        return json.loads(text)


def by_http_client(url: str) -> Any:
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    with closing(kind(parts.hostname or "", parts.port, timeout=seconds())) as connection:
        connection.request("GET", parts.path)
        with closing(connection.getresponse()) as answer:
            return json.loads(answer.read())


def by_requests(url: str) -> Any:
    with requests.get(url, timeout=seconds()) as answer:
        answer.raise_for_status()
        return answer.json()


def by_requests_text(url: str) -> Any:
    with requests.Session() as session, session.get(url, timeout=seconds()) as answer:
        answer.raise_for_status()
        return json.loads(answer.content.decode("utf-8"))


def by_httpx(url: str) -> Any:
    return httpx.get(url, timeout=seconds(), follow_redirects=True).raise_for_status().json()


def by_httpx_stream(url: str) -> Any:
    with httpx.stream("GET", url, timeout=seconds(), follow_redirects=True) as answer:
        answer.read()
        return answer.raise_for_status().json()


def by_httpx_async(url: str) -> Any:
    async def ask() -> Any:
        async with httpx.AsyncClient(timeout=seconds(), follow_redirects=True) as client:
            answer = await client.get(url)
            return json.loads(answer.raise_for_status().content)

    return asyncio.run(ask())


def by_aiohttp(url: str) -> Any:
    async def ask() -> Any:
        timeout = aiohttp.ClientTimeout(total=seconds())
        async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session, session.get(url) as answer:
            return await answer.json()

    return asyncio.run(ask())


def by_aiohttp_text(url: str) -> Any:
    async def ask() -> Any:
        timeout = aiohttp.ClientTimeout(sock_read=seconds())
        async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session, session.get(url) as answer:
            return json.loads(await answer.text())

    return asyncio.run(ask())


def by_urllib3(url: str) -> Any:
    with urllib3.PoolManager(retries=urllib3.Retry(2, backoff_factor=0)) as pool:
        answer = pool.request("GET", url, timeout=seconds())
        return answer.json()


def by_openai(url: str) -> Any:
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=seconds()) as client:
        return client.models.list().data[0].id


def by_pydantic(url: str) -> Any:
    answer = httpx.get(url, timeout=seconds(), follow_redirects=True).raise_for_status()
    return Rows.model_validate_json(answer.content)


def by_xml(url: str) -> Any:
    with requests.get(url, timeout=seconds()) as answer:
        answer.raise_for_status()
        return ElementTree.fromstring(answer.text)


WAYS = (
    *("refused", "reset", "nothing", "no_http", "no_tls", "short", "chunk", "half_chunk", "elsewhere"),
    *("html", "empty", "half", "no_utf8", "no_gzip", "502", "503", "429", "511"),
)
CLIENTS: dict[Client, tuple[str, ...]] = {
    by_urllib: tuple(way for way in WAYS if way != "no_gzip"),
    by_urllib_text: tuple(way for way in WAYS if way != "no_gzip"),
    by_http_client: tuple(way for way in WAYS if way not in ("elsewhere", "no_gzip", "502", "503", "429", "511")),
    by_requests: tuple(way for way in WAYS if way != "no_utf8"),
    by_requests_text: WAYS,
    by_httpx: WAYS,
    by_httpx_stream: WAYS,
    by_httpx_async: WAYS,
    by_aiohttp: tuple(way for way in WAYS if way != "empty"),
    by_aiohttp_text: WAYS,
    by_urllib3: ("refused", "reset", "nothing", "no_http", "no_tls", "elsewhere", "html", "empty", "half", "no_gzip"),
    by_openai: ("refused", "reset", "nothing", "no_http", "no_tls"),
    by_pydantic: ("refused", "html", "empty", "half", "rows", "502"),
    by_xml: ("refused", "xml", "empty", "half", "502"),
}
CASES = [pytest.param(client, way, id=f"{client.__name__}-{way}") for client, ways in CLIENTS.items() for way in ways]


def raised(client: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - whatever the client raises
        client()
    assert not isinstance(caught.value, pytest.fail.Exception)
    if isinstance(caught.value, urllib.error.HTTPError):
        caught.value.close()
    return caught.value


def whose(error: BaseException, **arguments: Any) -> Cause:
    return cause_of(error, "model", written=WrittenTexts([json.dumps(arguments)]))


@pytest.mark.parametrize(("client", "way"), CASES)
def test_what_fails_belongs_to_who_wrote_the_address(server: Answering, client: Client, way: str) -> None:
    url = server.url(way)
    error = raised(lambda: client(url))
    assert cause_of(error, "model") == "outage", (repr(error), repr(error.__cause__))
    assert whose(error, query="what is the capital of France?", n=5, site="") == "outage"
    assert whose(error, url=url) == "model", "the model wrote it"
    assert whose(error, pages=["http://other.example/", url.upper()]) == "model", "among others"
    assert whose(error, text=f"open {url} please") == "model"
    assert cause_of(error, "model", addresses="model") == "model", "the author says so"
    stated = WrittenTexts([json.dumps({"url": url})])
    assert cause_of(error, "model", written=stated, addresses="service") == "outage", "the author says the contrary"
    assert cause_of(error, "model", [type(error)], stated, "model") == "outage", "the author names it"


@pytest.mark.parametrize(("client", "way"), CASES)
def test_an_address_that_the_model_wrote_for_a_service_is_not_the_service(
    server: Answering, client: Client, way: str
) -> None:
    error = raised(lambda: client(server.url(way)))
    assert whose(error, url="http://elsewhere.example/page") == "outage", "a browser's service, which is away"


@pytest.mark.parametrize(
    "client",
    [
        by_urllib,
        by_http_client,
        by_requests,
        by_httpx,
        by_httpx_async,
        by_aiohttp,
        by_aiohttp_text,
        by_urllib3,
        by_openai,
    ],
)
def test_what_is_late_is_whose_the_limits_say_unless_the_model_wrote_the_address(
    server: Answering, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}._is_hurried", True)
    url = server.url("slow")
    error = raised(lambda: client(url))
    for timeouts in ("model", "outage"):
        assert cause_of(error, timeouts) == timeouts, repr(error)  # type: ignore[arg-type]
        assert cause_of(error, timeouts, written=WrittenTexts([json.dumps({"query": "x"})])) == timeouts  # type: ignore[arg-type]
    assert cause_of(error, "outage", written=WrittenTexts([json.dumps({"url": url})])) == "model"
    assert cause_of(error, "outage", addresses="model") == "model"


@pytest.mark.parametrize("way", ["500", "404", "loop"])
@pytest.mark.parametrize("client", [by_urllib, by_requests, by_httpx, by_httpx_async, by_aiohttp])
def test_a_status_that_is_a_bug_of_an_own_address_is_the_models_of_its_own(
    server: Answering, client: Client, way: str
) -> None:
    url = server.url(way)
    error = raised(lambda: client(url))
    assert (cause_of(error, "model"), whose(error, url=url)) == ("bug", "model"), repr(error)


def _connect(url: str) -> Any:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S) as connection:
        connection.sendall(b"GET /nothing HTTP/1.1\r\n\r\n")
        if not connection.recv(9):
            raise EOFError("it ended")


async def _open(url: str) -> Any:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(b"GET /nothing HTTP/1.1\r\n\r\n")
        return await reader.readexactly(9)
    finally:
        writer.transport.abort()


def test_sockets_and_streams_have_addresses_too(server: Answering) -> None:
    refused = server.url("refused")
    for error in (raised(lambda: _connect(refused)), raised(lambda: asyncio.run(_open(refused)))):
        assert isinstance(error, ConnectionRefusedError)
        assert (whose(error, query="x"), whose(error, url=refused)) == ("outage", "model")
        port = server.closed
        assert whose(error, host="127.0.0.1", port=port) == whose(error, server=f"127.0.0.1:{port}") == "model"
        assert whose(error, host="10.127.0.0.1", text="1127.0.0.12") == "outage", "another one"
    ended = raised(lambda: asyncio.run(_open(server.url("nothing"))))
    assert isinstance(ended, asyncio.IncompleteReadError)
    assert whose(ended, query="x") == "outage"
    assert cause_of(raised(lambda: _connect(server.url("nothing"))), "model") == "bug", (
        "who raises EOFError may mean all"
    )


async def test_a_program_that_ends_is_not_a_service(tmp_path: Path) -> None:
    program = await asyncio.create_subprocess_exec(sys.executable, "-c", "print('{')", stdout=-1)
    assert program.stdout is not None
    with pytest.raises(asyncio.IncompleteReadError) as ended:
        await program.stdout.readexactly(9)
    await program.wait()
    assert cause_of(ended.value, "model") == "bug"


def test_what_a_program_or_a_file_says_may_be_the_models(tmp_path: Path) -> None:
    written = tmp_path / "a.json"
    written.write_text("{")

    def by_program() -> Any:
        done = subprocess.run([sys.executable, "-c", "print('{')"], stdout=-1, check=True)
        return json.loads(done.stdout)

    def by_file() -> Any:
        return json.loads(written.read_text())

    def by_open_file() -> Any:
        with open(str(written)) as file:
            return json.load(file)

    for read in (by_program, by_file, by_open_file):
        assert cause_of(raised(read), "model") == "model", read.__name__


def _gunzip(arguments: dict[str, Any]) -> Any:
    return gzip.decompress(base64.b64decode(arguments["data"]))


TEXTS: list[tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]] = [
    (lambda given: json.loads(given["rows"]), {"rows": "[1, 2"}),
    (lambda given: json.loads(given["rows"]), {"rows": ""}),
    (lambda given: json.loads(given["rows"].replace("'", '"')), {"rows": "{'name': 'it's', 'n': 1}"}),
    (lambda given: json.loads(given["text"].partition("```json")[2].strip("`")), {"text": "so: ```json{rows: 17,}```"}),
    (lambda given: json.loads(given["rows"].encode()), {"rows": '{"a": }', "other": 1}),
    (lambda given: orjson.loads(given["rows"]), {"rows": "[1, 2"}),
    (lambda given: requests.compat.json.loads(given["rows"]), {"rows": "nope"}),
    (lambda given: base64.b64decode(given["data"]).decode(), {"data": base64.b64encode(b"\xff\xfe\xfa").decode()}),
    (lambda given: bytes.fromhex(given["data"]).decode(), {"data": "fffefa"}),
    (lambda given: given["text"].encode("latin-1").decode(), {"text": "\xe9t\xe9"}),
    (lambda given: Rows.model_validate(given), {"rows": [1, 2]}),
    (lambda given: Rows.model_validate_json(given["rows"]), {"rows": '{"rows": [1'}),
    (lambda given: Rows.model_validate_json(given["rows"]), {"rows": '{"rows": null}'}),
    (lambda given: Rows.model_validate({"rows": [int(given["n"])]}), {"n": "17"}),
    (lambda given: ElementTree.fromstring(given["xml"]), {"xml": "<a><b></a>"}),
    (lambda given: ElementTree.fromstring(given["xml"]), {"xml": "no xml"}),
    (lambda given: minidom.parseString(given["xml"]), {"xml": "<a><b></a>"}),
    (lambda given: yaml.safe_load(given["yaml"]), {"yaml": "a: [1, 2"}),
    (_gunzip, {"data": base64.b64encode(b"no gzip at all").decode()}),
    (lambda given: re.compile(given["pattern"]), {"pattern": "("}),
]


@pytest.mark.parametrize(("read", "arguments"), TEXTS)
def test_what_cannot_be_read_belongs_to_who_wrote_it(read: Client, arguments: dict[str, Any]) -> None:
    error = raised(lambda: read(arguments))  # type: ignore[arg-type]
    cause = whose(error, **arguments)
    assert cause == ("bug" if isinstance(error, re.error) else "model"), repr(error)
    assert cause_of(error, "model", written=WrittenTexts(row=[arguments])) == cause, "the row's"
    if not isinstance(error, re.error):
        assert whose(error, query="what is the capital of France?") == "outage", "the service's"


def test_a_database_that_is_locked_is_none_of_the_models(tmp_path: Path) -> None:
    def locked(sql: str) -> Any:
        one, two = (sqlite3.connect(tmp_path / "a.db", timeout=0) for _ in range(2))
        with closing(one), closing(two):
            one.execute("BEGIN EXCLUSIVE")
            return two.execute(sql)

    error = raised(lambda: locked("SELECT * FROM sqlite_master"))
    assert "locked" in str(error)
    assert whose(error, sql="SELECT * FROM sqlite_master") == "outage"
    assert cause_of(error, "model", addresses="model") == "outage", "no address is opened"
    with closing(sqlite3.connect(":memory:")) as database:
        for sql in ("SELECT * FROM nothing", "SELEC 1", "SELECT a FROM (SELECT 1 AS b)", "SELECT nothing(1)"):
            error = raised(lambda sql=sql: database.execute(sql))  # type: ignore[misc]
            assert whose(error, sql=sql) == "model", repr(error)
            assert whose(error, key="x") == "bug", "the author's own"


async def test_groups_and_what_an_error_was_raised_from(server: Answering) -> None:
    url = server.url("refused")

    async def group() -> None:
        async with httpx.AsyncClient() as client, asyncio.TaskGroup() as tasks:
            tasks.create_task(client.get(url))

    def wrapped() -> None:
        try:
            by_requests(url)
        except requests.RequestException as error:
            raise RuntimeError("the search failed") from error

    def within() -> None:
        try:
            by_requests(url)
        except requests.RequestException:
            raise KeyError("rows")  # noqa: B904 - that is the case

    def hidden() -> None:
        try:
            by_requests(url)
        except requests.RequestException:
            raise KeyError("rows") from None

    def own() -> None:
        try:
            by_requests(url)
        except requests.RequestException as error:
            raise ValueError("the page is not there") from error

    def on_purpose() -> None:
        try:
            by_requests(url)
        except requests.RequestException as error:
            raise OutageError("the browser is away") from error

    with pytest.raises(BaseExceptionGroup) as grouped:
        await group()
    found = [grouped.value, *map(raised, (wrapped, within, hidden, own, on_purpose))]
    assert [whose(each, query="x") for each in found] == ["outage", "outage", "outage", "bug", "model", "outage"]
    assert [whose(each, url=url) for each in found] == ["model", "model", "model", "bug", "model", "outage"]
    assert cause_of(found[-1], "model", addresses="model") == "outage"


def test_a_word_that_is_the_services_name_is_no_address() -> None:
    request = httpx.Request("GET", "http://search:8000/q")
    error = httpx.ConnectError("refused", request=request)
    assert whose(error, query="search for the capital of France") == "outage"
    assert whose(error, path="/q") == whose(error, q="8000") == "outage"
    for page in ("http://search/", "http://me@search:8000/", "search:8000", "search", "HTTP://SEARCH"):
        assert whose(error, url=page) == "model", page
    six = httpx.ConnectError("refused", request=httpx.Request("GET", "http://[::1]:9/"))
    assert (whose(six, url="http://[::1]:9/"), whose(six, host="::1"), whose(six, text="a::1b")) == (
        *("model", "model"),
        "outage",
    )


def test_a_proxy_that_fails_is_none_of_the_models(server: Answering) -> None:
    def through(proxy: str, target: str) -> BaseException:
        with requests.Session() as session:
            session.trust_env = False
            return raised(lambda: session.get(target, proxies={"https": proxy}, timeout=PATIENCE_S))

    page = "https://page.example/"
    away, tunnel = through(server.url("refused"), page), through(server.url("x"), page)
    assert "ProxyError" in repr(away)
    assert whose(away, url=page) == cause_of(away, "model", addresses="model") == "outage"
    assert isinstance(tunnel, requests.RequestException)
    for status, cause in (("407 Proxy Authentication Required", "outage"), ("502 Bad Gateway", "model")):
        error = httpx.ProxyError(status, request=httpx.Request("GET", page))
        assert (whose(error, url=page), cause_of(error, "model")) == (cause, "outage")

"""Proxy variables of the network × every client of ours, with a real forward proxy and real services on loopback."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import httpx2
import pytest
from aiohttp import web

from tests.conftest import ROOT
from tests.servers.forward_proxy import forwarding
from tests.servers.starting import HttpServer
from tests.support.http_clients import CLIENTS, endpoint, service
from tests.support.served import served
from verl_multiturn import ConfigError
from verl_multiturn.clients.chat_endpoint import EndpointError
from verl_multiturn.clients.http_connections import open_client, open_session, past_proxy, route_to
from verl_multiturn.errors import EngineError, OutageError

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
DEAD = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


# Which way.

NAMED = {"HTTP_PROXY": "http://web:1", "HTTPS_PROXY": "http://tls:2", "ALL_PROXY": "http://all:3"}


@pytest.mark.parametrize(
    ("variables", "address", "proxy"),
    [
        ({}, "http://search.corp:8000", None),
        (NAMED, "http://search.corp:8000", "http://web:1"),
        (NAMED, "ws://search.corp:8000", "http://web:1"),
        (NAMED, "https://search.corp", "http://tls:2"),
        (NAMED, "wss://search.corp", "http://tls:2"),
        ({"ALL_PROXY": "all:3"}, "https://search.corp", "http://all:3"),
        ({"all_proxy": "all:3"}, "http://search.corp", "http://all:3"),
        ({"HTTPS_PROXY": "tls:2"}, "http://search.corp", None),
        ({"HTTP_PROXY": "web:1", "http_proxy": "mine:4"}, "http://search.corp", "http://mine:4"),
        ({"HTTP_PROXY": "web:1", "http_proxy": ""}, "http://search.corp", None),
        ({"HTTP_PROXY": " ", "ALL_PROXY": "all:3"}, "http://search.corp", "http://all:3"),
        ({"HTTP_PROXY": "https://user:p%40ss@web/"}, "http://search.corp", "https://user:p%40ss@web/"),
        ({"HTTP_PROXY": "http://[fd00::1]:1"}, "http://search.corp", "http://[fd00::1]:1"),
        # Hosts for which a dead or an unusable proxy does not matter.
        *(
            ({"ALL_PROXY": unusable}, f"http://{host}:8000", None)
            for unusable in ("socks://127.0.0.1:9", "socks5://127.0.0.1:9", "http://", "ftp://x", "http://a:b:c")
            for host in ("127.0.0.1", "localhost")
        ),
        *(
            (NAMED, f"http://{host}:8000", None)
            for host in (
                "127.0.0.1", "127.8.9.10", "127.1", "0x7f.1", "2130706433", "localhost", "LocalHost", "localhost.",
                "a.localhost", "[::1]", "[::ffff:127.0.0.1]", "[0:0:0:0:0:0:0:1]", "0.0.0.0", "[::]",
            )
        ),
        *(
            (NAMED, f"http://{host}:8000", "http://web:1")
            for host in ("128.0.0.1", "10.0.0.7", "notlocalhost", "localhost.corp", "[::2]", "127.0.0.1.corp", "127")
        ),
    ],
)  # fmt: skip
def test_the_way(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], address: str, proxy: str | None) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (route_to(address).proxy or "").rstrip("/") == (proxy or "").rstrip("/")


@pytest.mark.parametrize(
    ("no_proxy", "passed", "taken"),
    [
        ("*", ["http://search.corp", "https://10.0.0.7:1"], []),
        ("other, *", ["http://search.corp"], []),
        ("search.corp", ["http://search.corp:8000", "http://a.search.corp", "http://SEARCH.CORP."], ["http://research.corp"]),
        (".corp", ["http://search.corp", "http://a.search.corp"], ["http://corp.example", "http://mycorp"]),
        ("*.corp", ["http://search.corp", "http://corp"], ["http://corp.example", "http://mycorp"]),
        ("192.168.*", ["http://192.168.3.4"], ["http://192.169.3.4"]),
        ("a.x b.x\tc.x;d.x", ["http://a.x", "http://b.x", "http://c.x", "http://d.x"], ["http://e.x"]),
        ("search.corp:8000", ["http://search.corp:8000", "http://a.search.corp:8000"], ["http://search.corp:8001"]),
        ("search.corp:80", ["http://search.corp"], ["https://search.corp"]),
        ("10.0.0.7", ["http://10.0.0.7:1", "http://[::ffff:10.0.0.7]"], ["http://10.0.0.70", "http://110.0.0.7"]),
        ("10.0.0.7:8000", ["http://10.0.0.7:8000"], ["http://10.0.0.7"]),
        ("10.0.0.0/8", ["http://10.255.0.1:8000"], ["http://11.0.0.1", "http://10.corp", "http://[fd00::1]"]),
        ("10.1.2.3/16", ["http://10.1.9.9"], ["http://10.2.0.1"]),
        ("fd00::/8", ["http://[fd12::1]:8000"], ["http://[fe80::1]", "http://10.0.0.1"]),
        ("fd00::1", ["http://[fd00:0::1]"], ["http://[fd00::2]"]),
        ("[fd00::1]:8000", ["http://[fd00::1]:8000"], ["http://[fd00::1]:8001"]),
        ("[fd00::1]", ["http://[fd00::1]:8001"], []),
        ("bücher.example", ["http://xn--bcher-kva.example"], []),
        ("https://search.corp", ["https://search.corp"], ["http://search.corp"]),
        ("10.0.0.0/99,x:y:z,:,/,.,[", [], ["http://10.0.0.1", "http://x"]),
        ("", [], ["http://search.corp"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("spelling", ["NO_PROXY", "no_proxy"])
def test_what_no_proxy_names(
    monkeypatch: pytest.MonkeyPatch, spelling: str, no_proxy: str, passed: list[str], taken: list[str]
) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://all:3")
    monkeypatch.setenv(spelling, no_proxy)
    assert [address for address in passed if route_to(address).proxy] == []
    assert [address for address in taken if not route_to(address).proxy] == []


def test_both_spellings_of_no_proxy_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://all:3")
    monkeypatch.setenv("NO_PROXY", "a.corp")
    monkeypatch.setenv("no_proxy", "b.corp")
    assert [route_to(f"http://{host}").proxy is None for host in ("a.corp", "b.corp", "c.corp")] == [True, True, False]


@pytest.mark.parametrize(
    ("value", "shown", "why"),
    [
        ("socks://desktop:1", "socks://desktop:1", "'socks' is no kind of proxy that can be used, expected 'http'"),
        ("socks4://desktop:1", "socks4://desktop:1", "'socks4' is no kind of proxy that can be used, expected 'http'"),
        ("ftp://u:secret@x", "ftp://…@x", "'ftp' is no kind of proxy that can be used, expected 'http'"),
        ("socks5://u:secret@x:1", "socks5://…@x:1", "SOCKS needs the package 'socksio', which is not installed; ins"),
        ("socks5h://x:1", "socks5h://x:1", "SOCKS needs the package 'socksio', which is not installed; install it,"),
        ("http://u:se#cret@x:1", "http://…@x:1", "it is no address; correct it (http://USER:PASSWORD@HOST:PORT, wit"),
        ("http://u:12/secret@x:1", "http://…@x:1", "it is no address; correct it (http://USER:PASSWORD@HOST:PORT,"),
        ("u:12?secret@x:1", "…@x:1", "it is no address; correct it (http://USER:PASSWORD@HOST:PORT, with %XX for spe"),
        ("http://x:99999", "http://x:99999", "it is no address; correct it"),
        ("http://x:y", "http://x:y", "it is no address; correct it"),
        ("http://", "http://", "it is no address; correct it"),
        ("://", "://", "it is no address; correct it"),
        ("no thing", "no thing", "it is no address; correct it"),
        ('"http://x:1"', '"http://x:1"', "it is no address; correct it"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_refused_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, value: str, shown: str, why: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        route_to("http://search.corp:8000", "tools[0].config.url")
    text = str(caught.value)
    assert text.startswith(
        f"tools[0].config.url: the environment variable ALL_PROXY={shown!r} names the proxy for search.corp, and {why}"
    )
    assert text.endswith(", or add search.corp to NO_PROXY")
    assert "secret" not in text


def test_a_client_without_socks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "socks5://x:1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert route_to("http://search.corp").proxy == "socks5://x:1"
    with pytest.raises(
        ConfigError, match=r"all_proxy='socks5://x:1' .* this client speaks no SOCKS; name an HTTP proxy"
    ):
        route_to("http://search.corp", takes_socks=False)


def test_the_password_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://user:secret@proxy.corp:3128")
    route = route_to("http://10.0.0.7:8000")
    assert route.words == (
        " through the proxy http://proxy.corp:3128 (HTTP_PROXY); 10.0.0.7 is a private address: add it to NO_PROXY"
    )
    assert "secret" not in f"{route!r}{route}"
    assert [
        route_to(f"http://{host}").is_private for host in ("192.168.0.1", "[fd00::1]", "search", "a.svc", "b.local")
    ] == ([True] * 5)
    assert route_to("http://search.example").words == " through the proxy http://proxy.corp:3128 (HTTP_PROXY)"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "127.0.0.1"),
        ({"NO_PROXY": "a.corp"}, "a.corp,127.0.0.1"),
        ({"no_proxy": "a.corp"}, "a.corp,127.0.0.1"),
        ({"NO_PROXY": "a.corp", "no_proxy": "b.corp, 127.0.0.1"}, "b.corp,127.0.0.1,a.corp"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_an_environment_names_a_host_beside_all_that_it_named(given: dict[str, str], expected: str) -> None:
    assert past_proxy({"A": "1", **given}, "127.0.0.1") == {"A": "1", "NO_PROXY": expected, "no_proxy": expected}


# Every client.


@pytest.fixture(scope="module")
def workshop() -> Iterator[HttpServer]:
    server = HttpServer()
    yield server
    server.stop()


@pytest.mark.parametrize("name", CLIENTS)
async def test_a_service_elsewhere_is_reached_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch, workshop: HttpServer, name: str
) -> None:
    ask, answer = CLIENTS[name]
    async with service(name, workshop) as port, forwarding("user:p@ss") as proxy:
        for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            with monkeypatch.context() as patch:
                patch.setenv(variable, f"user:p%40ss@{proxy.address}")
                proxy.asked.clear()
                assert await ask(f"http://service.example:{port}") == answer
                assert {each.split()[1] for each in proxy.asked} == {"service.example"}


@pytest.mark.parametrize("name", CLIENTS)
async def test_this_machine_and_what_no_proxy_names_are_reached_past_it(
    monkeypatch: pytest.MonkeyPatch, workshop: HttpServer, name: str
) -> None:
    ask, answer = CLIENTS[name]
    async with service(name, workshop) as port, forwarding() as proxy:
        for value in (proxy.address, DEAD, "socks://127.0.0.1:9", "socks5://127.0.0.1:9"):
            for variable in ("HTTP_PROXY", "ALL_PROXY"):
                with monkeypatch.context() as patch:
                    patch.setenv(variable, value)
                    assert await ask(f"http://127.0.0.1:{port}") == answer
        assert proxy.asked == []


@pytest.mark.parametrize("name", CLIENTS)
async def test_a_proxy_that_cannot_be_used_is_refused_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks://u:secret@desktop:1080")
    with pytest.raises(ConfigError, match=r"ALL_PROXY='socks://…@desktop:1080' names the proxy for service\.example"):
        await CLIENTS[name][0]("http://service.example:8000")


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("fault", ["dead", "403", "407", "502"])
async def test_what_stands_in_the_way_is_named(
    monkeypatch: pytest.MonkeyPatch, workshop: HttpServer, name: str, fault: str
) -> None:
    async with forwarding(status=None if fault == "dead" else int(fault)) as proxy:
        address = "127.0.0.1:9" if fault == "dead" else proxy.address
        monkeypatch.setenv("HTTP_PROXY", f"http://user:secret@{address}")
        with pytest.raises((OutageError, EngineError, ConfigError)) as caught:
            await CLIENTS[name][0]("http://10.0.0.7:8000")
    text = str(caught.value)
    assert f"through the proxy http://{address} (HTTP_PROXY); 10.0.0.7 is a private address: add it to NO_PROXY" in text
    assert "secret" not in text
    assert fault == "dead" or fault in text


# Redirects.


@pytest.mark.parametrize("name", [name for name in CLIENTS if name not in ("mcp", "a2a")])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(name: str, status: int) -> None:
    reached: list[str] = []

    async def other(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.json_response({})

    async def leads(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": there + request.path})

    paths = ("retrieve", "v1__chat__completions", "generate", "ws")
    async with served(**dict.fromkeys(paths, other)) as there, served(**dict.fromkeys(paths, leads)) as here:
        with pytest.raises((OutageError, EngineError), match=str(status)):
            await CLIENTS[name][0](here)
    assert reached == []


# One place.


def test_every_client_is_opened_in_one_place() -> None:
    opens = re.compile(
        r"\b(?:httpx2?\.(?:Async)?Client\(|httpx2?\.(?:get|post|request|stream)\(|aiohttp\.ClientSession\(|aiohttp\.request\("
        r"|urlopen\(|(?<!\.)requests\.(?:get|post|Session)\(|websockets\.connect\(|create_mcp_http_client\()"
    )
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "verl_multiturn").rglob("*.py")
        if opens.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"verl_multiturn/clients/http_connections.py"}


async def test_clients_read_no_variables_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks://127.0.0.1:9")
    route = route_to("http://127.0.0.1:8000")
    for client_class in (httpx.AsyncClient, httpx2.AsyncClient):
        client: Any = open_client(client_class, route)
        assert (client.trust_env, client.follow_redirects) == (False, False)
        await client.aclose()
    async with open_session(route) as session:
        assert isinstance(session, aiohttp.ClientSession)
        assert not session.trust_env


async def test_an_endpoint_that_is_unreachable_is_an_outage_through_a_dead_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", DEAD)
    with pytest.raises(EndpointError, match=r"through the proxy http://127\.0\.0\.1:9 \(HTTP_PROXY\)"):
        await asyncio.wait_for(endpoint("http://judge.example:8000"), 60)

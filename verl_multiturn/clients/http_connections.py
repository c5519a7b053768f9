"""Every client of HTTP that this package opens, and its way to a service: straight, or through the network's proxy.

    http://127.0.0.1:8000        straight: it is this machine
    http://search.corp:8000      straight where NO_PROXY names it, else through HTTP_PROXY or ALL_PROXY
    https://api.example/v1       through HTTPS_PROXY or ALL_PROXY

The clients read no variables of the network themselves: httpx would build the transports of all of them, so that one
that cannot be used would break a client that needs none, and aiohttp would know none.

Invariants:
- never more than `most` requests of `Connections` are under way; further ones wait;
- a proxy that cannot be used is refused where the client's address is checked, before any request to it;
- the user and the password of a proxy are in no message;
- no redirect leads a request to another host.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import ipaddress
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from verl_multiturn.calls.outages.causes import status_kind
from verl_multiturn.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

Client = TypeVar("Client")
_Host = ipaddress.IPv4Address | ipaddress.IPv6Address | str

_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}
_VARIABLES = {"http": "HTTP_PROXY", "ws": "HTTP_PROXY", "https": "HTTPS_PROXY", "wss": "HTTPS_PROXY"}
_NO_PROXY = ("no_proxy", "NO_PROXY")
_SOCKS = ("socks5", "socks5h")
_PRIVATE = (".local", ".internal", ".intranet", ".lan", ".corp", ".home", ".localdomain", ".svc", ".arpa")
"""Ends of names that no name server of the internet knows."""


@dataclass(frozen=True)
class Route:
    """The way to one address."""

    host: str = ""
    """Host of the address."""
    proxy: str | None = field(default=None, repr=False)
    """Address of the proxy, with its user and password; None: the way is straight."""
    variable: str = ""
    """The environment variable that names the proxy."""
    shown: str = ""
    """Address of the proxy for messages."""
    is_private: bool = False
    """Whether the host is one of a private network, as far as its name shows."""

    @property
    def words(self) -> str:
        """Return " through the proxy …" for messages, with the remedy; "" where the way is straight."""
        if self.proxy is None:
            return ""
        advice = f"; {self.host} is a private address: add it to NO_PROXY" if self.is_private else ""
        return f" through the proxy {self.shown} ({self.variable}){advice}"


def route_to(address: str, where: str = "", takes_socks: bool = True) -> Route:
    """Return the way to an address, as set in the environment variables now.

    `HTTP_PROXY` or `HTTPS_PROXY` names the proxy, else `ALL_PROXY`; of two spellings the one in lower case counts. This
    machine, and the hosts in `NO_PROXY`, are reached straight.

    Args:
        address: The address.
        where: The setting that has it, for errors.
        takes_socks: Whether the client can speak to a SOCKS proxy.

    Raises:
        ConfigError: The proxy that the address needs cannot be used.
    """
    url = httpx.URL(address)
    host = _host(url.host)
    name, value = next(
        ((name, value) for name, value in map(_variable, (_VARIABLES.get(url.scheme, ""), "ALL_PROXY")) if value),
        ("", ""),
    )
    if not value or _is_this_machine(host) or _is_left_out(host, url.port or _PORTS.get(url.scheme), url.scheme):
        return Route(url.host)
    proxy, problem = _proxy(value, takes_socks)
    if problem:
        shown = re.sub(r"(?s)\A(.*?://)?.*@", r"\1…@", value)
        raise ConfigError(
            f"{where + ': ' if where else ''}the environment variable {name}={shown!r} names the proxy for {url.host}, "
            f"and {problem}, or add {url.host} to NO_PROXY"
        )
    port = f":{proxy.port}" if proxy.port else ""
    shown = f"{proxy.scheme}://{f'[{proxy.host}]' if ':' in proxy.host else proxy.host}{port}"
    return Route(url.host, str(proxy), name, shown, _is_private(host))


def open_client(client: Callable[..., Client], route: Route, **options: Any) -> Client:
    """Open a client of httpx, or of httpx2.

    Args:
        client: Its class.
        route: The way that its requests take.
        options: Its other options.
    """
    return client(proxy=route.proxy, trust_env=False, follow_redirects=False, **options)


def open_session(route: Route, **options: Any) -> aiohttp.ClientSession:
    """Open a session of aiohttp. A redirect is an error of it.

    Args:
        route: The way that its requests take; `route_to(…, takes_socks=False)`.
        options: Its other options.
    """
    import aiohttp

    async def refuse(session: object, context: object, ended: aiohttp.TraceRequestRedirectParams) -> None:
        answer = ended.response
        answer.close()
        raise aiohttp.ClientResponseError(
            answer.request_info, (), status=answer.status, message="it leads elsewhere, where nothing is sent"
        )

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse)
    return aiohttp.ClientSession(proxy=route.proxy, trust_env=False, trace_configs=[trace], **options)


def remedy(status: int, route: Route, address: str, key: str) -> str:
    """Return the correction where a service of a configured address answers with a status; "" where there is none.

    Args:
        status: The status.
        route: The way to the service.
        address: The setting that has the address.
        key: The setting that has the key.
    """
    settings = {
        "key": key,
        "address": address,
        "network": f"the password in {route.variable or 'HTTP_PROXY'}",
    }
    found = settings.get(status_kind(status))
    return f"; correct {found}" if found else ""


def say_status(status: int, route: Route, address: str, key: str) -> str:
    """Return the meaning of a service's status that is an outage, as "is not at this address (HTTP 404); correct …".

    Args:
        status: The status.
        route: The way to the service.
        address: The setting that has the address.
        key: The setting that has the key.
    """
    says = {
        "key": "does not take the key",
        "address": "is not at this address",
        "network": "is behind a proxy that refuses",
    }
    said = says.get(status_kind(status), "failed")
    return f"{said} (HTTP {status}){route.words}{remedy(status, route, address, key)}"


class Connections:
    """Pool of HTTP clients with one connection each. The client that was used last is used first.

    Why not httpx's own pool: for each request it looks at every connection and every waiting request. With 64
    connections that takes 6 ms of the event loop for each request; with this class it takes 1 ms.

    Args:
        most: Largest number of connections.
        tls: The certificates that are trusted.
        route: The way that all requests take.
        client: Class of the clients.
    """

    def __init__(
        self,
        most: int,
        tls: ssl.SSLContext,
        route: Route,
        client: Callable[..., httpx.AsyncClient] = httpx.AsyncClient,
    ) -> None:
        self._client = client
        self._slots = asyncio.Semaphore(most)
        self._tls = tls
        self._route = route
        self._idle: list[httpx.AsyncClient] = []
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[httpx.AsyncClient]:
        """Wait for a client, and yield it for use by the caller alone."""
        async with self._slots:
            client = self._idle.pop() if self._idle else self._open()
            try:
                yield client
            finally:
                self._idle.append(client)
                if self._is_closed:
                    await self.close()

    async def close(self) -> None:
        """Close the clients that are not in use; the others are closed when they are given back."""
        self._is_closed = True
        while self._idle:
            await self._idle.pop().aclose()

    def _open(self) -> httpx.AsyncClient:
        return open_client(
            self._client,
            self._route,
            headers={"accept": "application/json", "accept-encoding": "identity", "content-type": "application/json"},
            limits=httpx.Limits(max_connections=1, keepalive_expiry=30.0),
            timeout=None,  # the caller holds the one deadline
            verify=self._tls,
        )


def trusted(address: str) -> ssl.SSLContext:
    """Return the certificates to trust for an address; for plain HTTP, which needs none, a context without any."""
    if scheme_of(address) == "https":
        return httpx.create_ssl_context()
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def scheme_of(address: str) -> str:
    """Return the scheme of an address in lower case, as `HTTPS://HOST` has `https`; "" where a text has none."""
    scheme, colon, _ = address.partition(":")
    return scheme.lower() if colon else ""


def is_http(address: str) -> bool:
    """Return whether a text is an address of HTTP, and not the name of something else."""
    return scheme_of(address) in ("http", "https") and address.partition(":")[2].startswith("//")


def past_proxy(environment: Mapping[str, str], host: str) -> dict[str, str]:
    """Return an environment in which `NO_PROXY`, in both spellings, names a host beside all that it names already.

    Args:
        environment: The environment.
        host: The host.
    """
    named = [part.strip() for name in _NO_PROXY for part in environment.get(name, "").split(",")]
    # "*" counts only where it is alone.
    value = "*" if "*" in named else ",".join(dict.fromkeys(part for part in (*named, host) if part))
    return {**environment, **dict.fromkeys(_NO_PROXY, value)}


def _variable(name: str) -> tuple[str, str]:
    """Return the spelling of a variable that counts, and its value; "" where it is not set."""
    spelling = name.lower() if name.lower() in os.environ else name
    return spelling, os.environ.get(spelling, "").strip()


def _proxy(value: str, takes_socks: bool) -> tuple[httpx.URL, str]:
    """Return the address of a proxy, and why it cannot be used, with the remedy; "" where it can be."""
    text = value if "://" in value else f"http://{value}"
    form = "correct it (http://USER:PASSWORD@HOST:PORT, with %XX for special characters of the password)"
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return httpx.URL(), f"it is no address; {form}"
    rest = f"{url.path}{url.query.decode(errors='replace')}{url.fragment}"
    if re.fullmatch(r"[^\s%\"'<>\\^`{|}]+", url.host) is None or not 0 < (url.port or 1) < 65536 or "@" in rest:
        return url, f"it is no address; {form}"
    if url.scheme in _SOCKS and not takes_socks:
        return url, "this client speaks no SOCKS; name an HTTP proxy"
    if url.scheme in _SOCKS and importlib.util.find_spec("socksio") is None:
        return url, "SOCKS needs the package 'socksio', which is not installed; install it, name an HTTP proxy"
    if url.scheme not in ("http", "https", *_SOCKS):
        expected = "'http', 'https', 'socks5' or 'socks5h'" if takes_socks else "'http' or 'https'"
        return url, f"{url.scheme!r} is no kind of proxy that can be used, expected {expected}; correct it"
    return url, ""


def _host(text: str) -> _Host:
    """Return a host as an address where it is one, also in the older forms (127.1), else as a name in lower case."""
    text = text.strip("[]").rstrip(".").lower()
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(text)
        return getattr(found, "ipv4_mapped", None) or found
    if re.fullmatch(r"[0-9a-fx.]+", text) and text[0].isdigit():
        with contextlib.suppress(OSError):
            return ipaddress.IPv4Address(socket.inet_aton(text))
    with contextlib.suppress(UnicodeError):
        return text.encode("idna").decode()
    return text


def _is_this_machine(host: _Host) -> bool:
    if isinstance(host, str):
        return host == "localhost" or host.endswith(".localhost")
    return host.is_loopback or host.is_unspecified


def _is_private(host: _Host) -> bool:
    return host.endswith(_PRIVATE) or "." not in host if isinstance(host, str) else host.is_private


def _is_left_out(host: _Host, port: int | None, scheme: str) -> bool:
    """Return whether `NO_PROXY` names a host; the two spellings name the hosts of both."""
    entries = re.split(r"[\s,;]+", ",".join(os.environ.get(name, "") for name in _NO_PROXY))
    return any(_names(entry.lower(), host, port, scheme) for entry in entries if entry)


def _names(entry: str, host: _Host, port: int | None, scheme: str) -> bool:
    """Return whether one entry of `NO_PROXY` names a host.

    Args:
        entry: `*`, a name with or without a dot before it or with `*` in it, an address, or a network; each but a
            network also with a port, and with a scheme.
        host: The host.
        port: Its port.
        scheme: The scheme of the address.
    """
    kind, _, entry = entry.rpartition("://")
    if kind not in ("", "all", scheme):
        return False
    with contextlib.suppress(ValueError):
        network = ipaddress.ip_network(entry.strip("[]"), strict=False)
        return not isinstance(host, str) and host in network
    found = re.fullmatch(r"(\[[^]]*\]|[^:]*)(?::([0-9]+))?/?", entry)
    if found is None or (found[2] and int(found[2]) != port):
        return False
    name = found[1]
    if "*" in name:
        return fnmatchcase(str(host), name) or (name.startswith("*.") and str(host) == name[2:])
    named = _host(name.lstrip("."))
    if isinstance(host, str) and isinstance(named, str):
        return bool(named) and (host == named or host.endswith(f".{named}"))
    return host == named

"""Classify failures: an outage, the model's mistake, or a bug. This is the one place that decides.

In this order:
1. our own limit on calls at once has no other cause (`busy`);
2. **outage**: a class that the entry names under `limits.outage.errors`, an `OutageError`, and a `create` that failed,
   unless with a `ValueError`, which is the row's mistake;
3. an error of lateness (our own deadline, any `TimeoutError`, those of the usual clients of HTTP, and a gateway's
   status 504): an **outage**, unless the limits say `timeouts: model`, since the model's text can cause it;
4. **the model's**: a failure at an address that it chose, an unreadable text that it wrote (`authorship.py` finds
   both), any other `ValueError`, and a host or a kind of address that does not exist. Bad arguments, unknown tools and
   calls over a limit never come so far;
5. **outage**: an error of a connection (Python's own, and those of these clients), no route to a host, an answer that
   cannot be read, a database that is locked, and the statuses 429, 502 and 503, and 407 and 511, by which the network
   refuses all traffic. But not a pipe that broke: the program at its other end may be the model's. An
   error of no client counts as the outage within it, or behind it, if there is one;
6. a **bug**: anything else. It is counted and reported once, and is not evidence about the service.

`status_kind` classifies a status for a client whose address is configured, as that of a tool in the box is. There a
wrong key or address is a mistake of the configuration, and so an outage: 401 to 403, 404, 405, a redirect
and the like. An error of a foreign client does not show who wrote its address: there they are a bug.

An agent reports an outage by an `OutageError`, or with the exit status 75 (`EX_TEMPFAIL`). It reports work that cannot
be scored by an `UnjudgedError`, or with the exit status 69 (`EX_UNAVAILABLE`), and a wrong setting by a `ConfigError`.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import Any, Literal

from verl_multiturn.calls.invocation import BusyError, TimedOutError
from verl_multiturn.calls.outages.authorship import (
    NOTHING,
    WrittenTexts,
    attribute,
    came_from,
    errors_within,
    is_of_socket,
    names_address,
    names_subject,
    names_word,
)
from verl_multiturn.errors import ConfigError, OutageError, UnjudgedError

Cause = Literal["outage", "model", "bug", "busy"]
Timeouts = Literal["model", "outage"]
Addresses = Literal["model", "service"]

AgentCause = Literal["outage", "unjudged", "misconfigured"]

_EXITS: dict[int, AgentCause] = {os.EX_TEMPFAIL: "outage", os.EX_UNAVAILABLE: "unjudged"}
"""Exit statuses by which an agent reports that a service is down, or that its work cannot be scored."""

StatusKind = Literal["answer", "away", "late", "key", "network", "address", "failed", "refused"]
"""`away`: the service, or a gateway before it, cannot answer any request now; `late`: a gateway waited too long.

`key`: it does not accept the client's key; `network`: a proxy refuses all traffic; `address`: it is another service,
or has another address; `failed`: it failed at this request; `refused`: it does not accept the request.
"""
_STATUSES: dict[int, StatusKind] = {
    **dict.fromkeys((429, 502, 503), "away"),
    504: "late",
    **dict.fromkeys((401, 402, 403), "key"),
    **dict.fromkeys((407, 511), "network"),
    # Also: no such form of a request (406, 411, 414, 415, 417), gone (410), another host (421), another protocol (426,
    # 505), no such method (501). None of it depends on the model's text.
    **dict.fromkeys((404, 405, 406, 410, 411, 414, 415, 417, 421, 426, 501, 505), "address"),
}
OUT: tuple[StatusKind, ...] = ("away", "late", "key", "network", "address")
"""Kinds of statuses that are an outage where the address is configured; `late` if the limits have it so."""
_ANYWHERE: tuple[StatusKind, ...] = ("away", "network")
"""Kinds that are an outage whoever wrote the address."""
MOST_WAIT_S = 60.0
"""Most seconds for which a service may put off the next try."""
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
_NO_SUCH_HOST = (socket.EAI_NONAME, socket.EAI_NODATA)
_STATUS = ("status_code", "status", "code")
"""Names that clients give to the status of an answer, in their error or in its `response`."""

_Kind = Literal[
    "outage", "late", "model", "status", "inner", "read", "moved", "proxy", "bug", "store", "grpc", "sqlite", "sqlstate"
]
_CLIENTS: dict[str, _Kind] = {
    "aiohttp.client_exceptions.ClientConnectionError": "outage",
    "aiohttp.client_exceptions.ClientHttpProxyError": "proxy",
    "aiohttp.client_exceptions.ClientPayloadError": "outage",
    "aiohttp.client_exceptions.ClientProxyConnectionError": "proxy",
    "aiohttp.client_exceptions.ClientResponseError": "status",
    "aiohttp.client_exceptions.ConnectionTimeoutError": "outage",
    "aiohttp.client_exceptions.ContentTypeError": "read",
    "aiohttp.client_exceptions.ServerTimeoutError": "late",
    "aiohttp.http_exceptions.HttpProcessingError": "read",
    "botocore.exceptions.ConnectTimeoutError": "outage",
    "botocore.exceptions.HTTPClientError": "outage",
    "botocore.exceptions.ReadTimeoutError": "late",
    "grpc.RpcError": "grpc",
    "gzip.BadGzipFile": "read",
    "http.client.HTTPException": "outage",
    "http.client.ImproperConnectionState": "bug",
    "http.client.InvalidURL": "model",
    "httpx.ConnectTimeout": "outage",
    "httpx.DecodingError": "read",
    "httpx.HTTPStatusError": "status",
    "httpx.InvalidURL": "model",
    "httpx.LocalProtocolError": "model",
    "httpx.ProxyError": "proxy",
    "httpx.TimeoutException": "late",
    "httpx.TooManyRedirects": "moved",
    "httpx.TransportError": "outage",
    "httpx.UnsupportedProtocol": "model",
    "json.decoder.JSONDecodeError": "read",
    "_lzma.LZMAError": "read",
    "lxml.etree.XMLSyntaxError": "read",
    "msgpack.exceptions.UnpackException": "read",
    "openai.APIConnectionError": "outage",
    "openai.APIResponseValidationError": "read",
    "openai.APIStatusError": "status",
    "openai.APITimeoutError": "late",
    "_pickle.UnpicklingError": "read",
    "psycopg.OperationalError": "sqlstate",
    "psycopg2.OperationalError": "sqlstate",
    "pydantic_core._pydantic_core.ValidationError": "read",
    "redis.exceptions.BusyLoadingError": "store",
    "redis.exceptions.ConnectionError": "store",
    "redis.exceptions.TimeoutError": "late",
    "requests.exceptions.ChunkedEncodingError": "outage",
    "requests.exceptions.ConnectionError": "inner",
    "requests.exceptions.ContentDecodingError": "read",
    "requests.exceptions.HTTPError": "status",
    "requests.exceptions.JSONDecodeError": "read",
    "requests.exceptions.ProxyError": "proxy",
    "requests.exceptions.SSLError": "outage",
    "requests.exceptions.Timeout": "late",
    "requests.exceptions.TooManyRedirects": "moved",
    "simplejson.errors.JSONDecodeError": "read",
    "simplejson.scanner.JSONDecodeError": "read",
    "sqlalchemy.exc.DBAPIError": "inner",
    "sqlite3.OperationalError": "sqlite",
    "ssl.SSLError": "read",  # a certificate is an answer, too
    "builtins.UnicodeDecodeError": "read",
    "urllib.error.ContentTooShortError": "outage",
    "urllib.error.HTTPError": "status",
    "urllib.error.URLError": "inner",
    "urllib3.exceptions.ConnectTimeoutError": "outage",
    "urllib3.exceptions.DecodeError": "read",
    "urllib3.exceptions.MaxRetryError": "inner",
    "urllib3.exceptions.NewConnectionError": "outage",
    "urllib3.exceptions.ProtocolError": "outage",
    "urllib3.exceptions.ProxyError": "proxy",
    "urllib3.exceptions.SSLError": "outage",
    "urllib3.exceptions.TimeoutError": "late",
    "websockets.exceptions.ConnectionClosed": "outage",
    "websockets.exceptions.InvalidMessage": "read",
    "xml.etree.ElementTree.ParseError": "read",
    "xml.parsers.expat.ExpatError": "read",
    "yaml.error.YAMLError": "read",
    "zlib.error": "read",
}
"""Errors of the clients and readers that tools use, by name: none of them need be installed here.

`status`: its status decides; `inner`: the error that it wraps decides; `read`: an answer that cannot be read, unless
the model wrote it; `proxy`: of the way to a service; `moved`: redirects without end. The nearest class of an
error decides.
"""
_SQLITE = ("SQLITE_BUSY", "SQLITE_IOERR", "SQLITE_LOCKED", "SQLITE_PROTOCOL")
_GRPC: dict[str, _Kind] = {"UNAVAILABLE": "outage", "RESOURCE_EXHAUSTED": "outage", "DEADLINE_EXCEEDED": "late"}
_CUT_OFF = ("bz2", "_compression", "compression._common._streams", "ftplib", "gzip", "lzma")
"""Modules whose `EOFError` means that an answer broke off. Elsewhere a program may have ended, perhaps the model's.
"""


def cause_of(
    error: BaseException,
    timeouts: Timeouts,
    named: Sequence[type[BaseException]] = (),
    written: WrittenTexts = NOTHING,
    addresses: Addresses | None = None,
) -> Cause:
    """Return whose a failure is; `busy` where nothing was called.

    Args:
        error: The error of a method of an author's object, or the reason that it could not run.
        timeouts: The cause of a late call.
        named: Classes of errors that are outages, beside those that always are.
        written: Texts of others than the service and the author.
        addresses: Who chooses the addresses that are opened; None: an address in the model's texts is the model's.
    """
    if isinstance(error, BusyError):
        return "busy"
    if isinstance(error, tuple(named)):
        return "outage"
    kind = _kind_of(error, written)
    is_late = kind == "late" or (kind is None and isinstance(error, TimedOutError | TimeoutError))
    if isinstance(error, OutageError):
        return timeouts if is_late else "outage"
    has_address = kind not in (None, "bug", "store") or is_late
    if kind == "read":
        cause: Cause = "model" if names_subject(error, (*written.model, *written.row)) else "outage"
    else:
        cause = timeouts if is_late else _cause(error, kind, timeouts, named, written, addresses)
    if cause == "bug" and kind is None:
        is_out, has_address = _within(error, named, written)
        cause = "outage" if is_out else "bug"
    if cause == "model" or addresses == "service" or not has_address:
        return cause
    # Our own deadline has no address.
    is_models = addresses == "model" or (not isinstance(error, TimedOutError) and names_address(error, written.model))
    return "model" if is_models and not _is_proxys(error) else cause


def _cause(
    error: BaseException,
    kind: _Kind | None,
    timeouts: Timeouts,
    named: Sequence[type[BaseException]],
    written: WrittenTexts,
    addresses: Addresses | None,
) -> Cause:
    """Return the cause of a failure that is neither late nor unreadable, without regard to its address."""
    if kind == "model" or isinstance(error, ValueError) or any(map(_is_no_such_host, _chain(error))):
        return "model"
    if kind == "inner":
        inner = _inner(error)
        return "outage" if inner is None else cause_of(inner, timeouts, named, written, addresses)
    if kind == "status":
        status = _status(error)
        found = "failed" if status is None else status_kind(status)
        return timeouts if found == "late" else "outage" if found in _ANYWHERE else "bug"
    if kind in ("outage", "proxy", "store"):
        return "outage"
    return "bug"


def _within(error: BaseException, named: Sequence[type[BaseException]], written: WrittenTexts) -> tuple[bool, bool]:
    """Return whether an error of no client has an outage within it, and whether an address may be the reason."""
    if type(error).__module__.startswith("verl_multiturn."):  # ours are classified by their class
        return False, False
    within = list(errors_within(error))[1:]
    found = [each for each in within if cause_of(each, "model", named, written, "service") == "outage"]
    return bool(found), bool(found) and not any(
        isinstance(each, (OutageError, *named)) or _kind_of(each, written) == "store" for each in found
    )


def _kind_of(error: BaseException, written: WrittenTexts) -> _Kind | None:
    """Return the kind of an error of a client, a connection or a reader; None for other errors."""
    kind = _kind_of_client(error)
    if kind == "status" and error.__cause__ is not None and _kind_of_client(error.__cause__) == "read":
        return "read"  # aiohttp's, which makes up a status
    if kind == "sqlite":
        if str(getattr(error, "sqlite_errorname", "")).startswith(_SQLITE):
            return "store"
        return "model" if names_word(error, written.model) else None
    if kind == "sqlstate":
        state = str(getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or "08")
        return "late" if state == "57014" else "store" if state.startswith(("08", "57P")) else None
    if kind == "grpc":
        code = getattr(error, "code", None)
        return _GRPC.get(getattr(code() if callable(code) else None, "name", ""))
    if kind is None and isinstance(error, OSError) and not isinstance(error, TimeoutError):
        return "outage" if _is_connections(error) else None
    if kind is None and isinstance(error, EOFError):
        return "outage" if came_from(error, _CUT_OFF) or is_of_socket(error) else None
    return kind


def _is_proxys(error: BaseException) -> bool:
    """Return whether a proxy on the way to an address fails: it cannot be reached, or wants a password."""
    for each in errors_within(error):
        if _kind_of_client(each) == "proxy":
            status = re.search(r"(?:\A|failed: )([1-5][0-9]{2})\b", str(attribute(each, "status") or each))
            return status is None or status_kind(int(status[1])) == "network"
    return False


def status_kind(status: int) -> StatusKind:
    """Return the kind of a status of HTTP, for a client whose address is configured.

    Args:
        status: The status. 400, 408, 409, 413, 422, 425, 451 and unknown ones below 500 are `refused`.
    """
    if 200 <= status < 300:
        return "answer"
    if (found := _STATUSES.get(status)) is not None:
        return found
    return "address" if status < 400 else "refused" if status < 500 else "failed"


def retry_after_s(value: object) -> float | None:
    """Return the seconds until the next try that a `Retry-After` asks for, from 0 to `MOST_WAIT_S`.

    Args:
        value: The header's text: seconds, also with a fraction, or a date. None: there is no header.

    Returns:
        The seconds; None if it names none: the client then waits as long as it waits without a header.
    """
    if not isinstance(value, str):
        return None
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", text := value.strip()):
        return min(float(text), MOST_WAIT_S)
    try:
        at = parsedate_to_datetime(text)
        seconds = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError, IndexError):
        return None
    return max(0.0, min(seconds, MOST_WAIT_S))


def next_try_s(error: BaseException) -> float | None:
    """Return the seconds after which a failed service accepts a retry; None if unknown.

    Args:
        error: An `OutageError` that has them, or an error of a client that has the answer's headers.
    """
    for each in _chain(error):
        if isinstance(each, OutageError) and each.next_try_s is not None:
            return each.next_try_s
        for holder in (each, attribute(each, "response")):
            headers = attribute(holder, "headers")
            if (
                isinstance(headers, Mapping | Message)
                and (found := retry_after_s(headers.get("retry-after"))) is not None
            ):
                return found
    return None


def agents_cause(error: BaseException | int) -> AgentCause | None:
    """Return the cause beyond the model that an agent's error or exit status reports; None without one.

    An error of a connection is not an outage: the connection may be that to our own endpoint.

    Args:
        error: Its error, or its exit status.
    """
    if isinstance(error, OutageError):
        return "outage"
    if isinstance(error, UnjudgedError):
        return "unjudged"
    if isinstance(error, ConfigError):
        return "misconfigured"
    code = error.code if isinstance(error, SystemExit) else error
    return _EXITS.get(code) if isinstance(code, int) else None


def _kind_of_client(error: BaseException) -> _Kind | None:
    for each in type(error).__mro__:
        # httpx and openai name their errors as if they were in the package itself; httpx2 is httpx, for MCP.
        name = f"{each.__module__}.{each.__qualname__}".replace("httpx2.", "httpx.", 1)
        if (kind := _CLIENTS.get(name)) is not None:
            return kind
    return None


def _inner(error: BaseException) -> BaseException | None:
    """Return the error that an error of a client wraps, or was raised from; None: there is none."""
    within = (attribute(error, "reason"), attribute(error, "os_error"), *error.args[:1], error.__cause__)
    return next((each for each in within if isinstance(each, BaseException) and each is not error), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = _inner(found)


def _is_no_such_host(error: BaseException) -> bool:
    return isinstance(error, socket.gaierror) and error.errno in _NO_SUCH_HOST


def _status(error: Any) -> int | None:
    found = (attribute(each, name) for each in (error, attribute(error, "response")) for name in _STATUS)
    return next((each for each in found if isinstance(each, int)), None)


def _is_connections(error: OSError) -> bool:
    if isinstance(error, ConnectionError):
        # asyncio reports "Connection lost", too, after a write to a program that has ended.
        return not isinstance(error, BrokenPipeError) and error.args != ("Connection lost",)
    return isinstance(error, socket.gaierror) or error.errno in _NO_ROUTE

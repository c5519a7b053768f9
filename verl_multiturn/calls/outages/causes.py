"""Whose a failure is: an outage, the model's, or a bug. This is the one place that says so.

In this order:
1. our own limit on calls at once says nothing of anybody (`busy`);
2. **outage**: a class that the entry names under `limits.outage.errors`, an `OutageError`, and a `create` that failed,
   unless with a `ValueError`, which is the row's mistake;
3. what came too late (our own deadline, any `TimeoutError`, those of the usual clients of HTTP, and a gateway's status
   504): an **outage**, unless the limits say `timeouts: model`, since the model can cause it by what it writes;
4. **the model's**: a `ValueError`, and a host or a kind of address that does not exist. Bad arguments, unknown tools
   and calls over a limit never come so far;
5. **outage**: an error of a connection (Python's own, and those of these clients), no route to a host, and the statuses
   429, 502 and 503. But not a pipe that broke: the program at its other end may be the model's;
6. a **bug**: anything else. It is counted and told once, and says neither that the service is there nor that it is not.

An agent says it by raising an `OutageError`, or with the exit status 75 (`EX_TEMPFAIL`). That its work cannot be judged
it says by an `UnjudgedError`, or with the exit status 69 (`EX_UNAVAILABLE`), and that a setting is wrong by a
`ConfigError`.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from verl_multiturn.calls.invocation import BusyError, TimedOutError
from verl_multiturn.errors import ConfigError, OutageError, UnjudgedError

Cause = Literal["outage", "model", "bug", "busy"]
Timeouts = Literal["model", "outage"]

AgentCause = Literal["outage", "unjudged", "misconfigured"]

_EXITS: dict[int, AgentCause] = {os.EX_TEMPFAIL: "outage", os.EX_UNAVAILABLE: "unjudged"}
"""Exit statuses by which an agent says that what it needs is not there, or that what was left cannot be judged."""
OUTAGE_STATUSES = (429, 502, 503)
"""Statuses of HTTP by which a service, or a gateway before it, says that it cannot answer now, whatever was asked."""
LATE_STATUS = 504
"""Status by which a gateway says that the service was late."""
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
_NO_SUCH_HOST = (socket.EAI_NONAME, socket.EAI_NODATA)
_STATUS = ("status_code", "status", "code")
"""Names that clients give to the status of an answer, in their error or in its `response`."""

_Kind = Literal["outage", "late", "model", "status", "inner"]
_CLIENTS: dict[str, _Kind] = {
    "aiohttp.client_exceptions.ClientConnectionError": "outage",
    "aiohttp.client_exceptions.ClientPayloadError": "outage",
    "aiohttp.client_exceptions.ClientResponseError": "status",
    "aiohttp.client_exceptions.ConnectionTimeoutError": "outage",
    "aiohttp.client_exceptions.ServerTimeoutError": "late",
    "httpx.ConnectTimeout": "outage",
    "httpx.HTTPStatusError": "status",
    "httpx.InvalidURL": "model",
    "httpx.LocalProtocolError": "model",
    "httpx.TimeoutException": "late",
    "httpx.TransportError": "outage",
    "httpx.UnsupportedProtocol": "model",
    "openai.APIConnectionError": "outage",
    "openai.APIStatusError": "status",
    "openai.APITimeoutError": "late",
    "requests.exceptions.ConnectionError": "inner",
    "requests.exceptions.HTTPError": "status",
    "requests.exceptions.Timeout": "late",
    "urllib.error.HTTPError": "status",
    "urllib.error.URLError": "inner",
    "urllib3.exceptions.ConnectTimeoutError": "outage",
    "urllib3.exceptions.MaxRetryError": "inner",
    "urllib3.exceptions.NewConnectionError": "outage",
    "urllib3.exceptions.ProtocolError": "outage",
    "urllib3.exceptions.ProxyError": "outage",
    "urllib3.exceptions.SSLError": "outage",
    "urllib3.exceptions.TimeoutError": "late",
}
"""Errors of the clients of HTTP that tools use, by name: none of them need be installed here.

`status`: its status says it; `inner`: the error that it wraps says it. An error is what its nearest class is.
"""


def cause_of(error: BaseException, timeouts: Timeouts, named: Sequence[type[BaseException]] = ()) -> Cause:
    """Return whose a failure is; `busy` where nothing was called.

    Args:
        error: What a method of an author's object raised, or what stood in its way.
        timeouts: Whose it is that a call came too late.
        named: Classes of errors that are outages, beside those that always are.
    """
    if isinstance(error, BusyError):
        return "busy"
    if isinstance(error, tuple(named)):
        return "outage"
    kind = _kind_of_client(error)
    if kind == "late" or (kind is None and isinstance(error, TimedOutError | TimeoutError)):
        return timeouts
    if isinstance(error, OutageError):
        return "outage"
    if kind == "model" or isinstance(error, ValueError) or any(map(_is_no_such_host, _chain(error))):
        return "model"
    if kind == "inner":
        inner = _inner(error)
        return "outage" if inner is None else cause_of(inner, timeouts, named)
    if kind == "status":
        status = _status(error)
        return timeouts if status == LATE_STATUS else "outage" if status in OUTAGE_STATUSES else "bug"
    if kind == "outage" or (isinstance(error, OSError) and _is_connections(error)):
        return "outage"
    return "bug"


def agents_cause(error: BaseException | int) -> AgentCause | None:
    """Return what an agent's error or exit status says of others than the model; None if nothing.

    An error of a connection is no outage: the connection may be that to our own endpoint.

    Args:
        error: What it raised, or its exit status.
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
        # httpx and openai name their errors as if they stood in the package itself; httpx2 is httpx, for MCP.
        name = f"{each.__module__}.{each.__qualname__}".replace("httpx2.", "httpx.", 1)
        if (kind := _CLIENTS.get(name)) is not None:
            return kind
    return None


def _inner(error: BaseException) -> BaseException | None:
    """Return the error that an error of a client wraps, or was raised from; None: there is none."""
    within = (getattr(error, "reason", None), getattr(error, "os_error", None), *error.args[:1], error.__cause__)
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
    found = (getattr(each, name, None) for each in (error, getattr(error, "response", None)) for name in _STATUS)
    return next((each for each in found if isinstance(each, int)), None)


def _is_connections(error: OSError) -> bool:
    if isinstance(error, ConnectionError):
        # asyncio says "Connection lost", too, where a program's input is written to after its end.
        return not isinstance(error, BrokenPipeError) and error.args != ("Connection lost",)
    return isinstance(error, socket.gaierror) or error.errno in _NO_ROUTE

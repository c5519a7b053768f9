"""Whose a failure is: an outage, the model's, or a bug. This is the one place that says so.

In this order:
1. **outage**: an `OutageError`; an error of a connection (Python's own, and those of the usual clients of HTTP); a
   class that the entry names under `limits.outage.errors`; a `create` that failed;
2. what came too late (our own deadline, no free slot, any `TimeoutError`): an **outage**, unless the limits say
   `timeouts: model`, since the model can cause it by what it writes;
3. **the model's**: a `ValueError`. Bad arguments, unknown tools and calls over a limit never come so far;
4. a **bug**: anything else. It is counted and told once, and never opens a breaker.

An agent says it by raising an `OutageError`, or with the exit status 75 (`EX_TEMPFAIL`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from verl_multiturn.calls.invocation import BusyError, TimedOutError
from verl_multiturn.errors import OutageError

Cause = Literal["outage", "model", "bug"]
Timeouts = Literal["model", "outage"]

EXIT_OUTAGE = os.EX_TEMPFAIL
"""Exit status by which an agent's command says that what it needs is not there."""
_CLIENTS = frozenset(
    {
        "aiohttp.client_exceptions.ClientConnectionError",
        "httpx.TransportError",
        "openai.APIConnectionError",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
        "urllib3.exceptions.HTTPError",
    }
)
"""Errors of connections in the clients of HTTP that tools use, by name: none of them need be installed here."""


def cause_of(error: BaseException, timeouts: Timeouts, named: Sequence[type[BaseException]] = ()) -> Cause:
    """Return whose a failure is.

    Args:
        error: What a method of an author's object raised, or what stood in its way.
        timeouts: Whose it is that a call came too late.
        named: Classes of errors that are outages, beside those that always are.
    """
    if isinstance(error, tuple(named)):
        return "outage"
    if isinstance(error, TimedOutError | BusyError | TimeoutError) or _is_named(error, "httpx.TimeoutException"):
        return timeouts
    if isinstance(error, OutageError | ConnectionError) or _is_named(error, *_CLIENTS):
        return "outage"
    return "model" if isinstance(error, ValueError) else "bug"


def is_agents_outage(error: BaseException) -> bool:
    """Tell whether an agent's error says that what it needs is not there.

    An error of a connection does not: the connection may be that to our own endpoint.
    """
    return isinstance(error, OutageError) or (isinstance(error, SystemExit) and error.code == EXIT_OUTAGE)


def _is_named(error: BaseException, *names: str) -> bool:
    return any(_name(each) in names for each in type(error).__mro__)


def _name(made: type) -> str:
    # httpx and openai name their errors as if they stood in the package itself.
    return f"{made.__module__}.{made.__qualname__}"

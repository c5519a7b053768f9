"""Base of the tools that call an HTTP service: connections, requests and errors.

Invariants:
- a request ends within `timeout_s`, however slowly the answer comes, and holds no connection afterwards;
- never more than `MAX_RESPONSE_BYTES` of an answer are kept, and a compressed answer is refused;
- every failure is an `UnavailableError` or a `ServiceFailedError`, where asking again may help, or a `ValueError`; all
  have a short text for the model, and the log has the address and the cause;
- only a failure that cannot depend on the request is an `UnavailableError`, and so an outage: one request may end a
  process of the service, or lead to its status 500. A refused key and an address without a service are outages, whose
  text names the status and the setting;
- no redirect is followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.calls.outages.causes import OUT, retry_after_s, status_kind
from verl_multiturn.calls.per_loop import PerLoop
from verl_multiturn.clients.http_connections import Connections, Route, open_client, route_to, say_status, trusted
from verl_multiturn.config import fixed
from verl_multiturn.errors import MultiTurnError, OutageError
from verl_multiturn.tools.base import BaseTool
from verl_multiturn.tools.schema import ToolSchema

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=BaseModel)
_THERE_S = 5.0
"""Seconds in which a service whose answer broke off must take a connection."""


MAX_CONNECTIONS = 64
"""Largest number of connections at once in one worker process; further requests wait for one."""
MAX_RESPONSE_BYTES = 2_000_000
"""Bytes of one answer; a larger answer is an error."""


class UnavailableError(OutageError):
    """A service could not be reached, was late, or reports that it cannot answer now; a retry may help."""


class LateError(UnavailableError, TimeoutError):
    """A service was late; where it runs the model's code, that may be the reason."""


class ServiceFailedError(MultiTurnError, RuntimeError):
    """A service failed at a request, broke off, or gave no result; the request may be the reason."""


class HttpSettings(BaseModel):
    """Settings of every tool that calls an HTTP service."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    GONE: ClassVar = fixed(max_connections="64 in each worker", max_response_bytes="2,000,000")

    url: str
    """Address of the service, with or without the path to which the tool posts.

    A user and a password in it (`https://USER:PASSWORD@HOST`) are sent to the service, and shown nowhere.
    """

    timeout_s: float = Field(30.0, gt=0, allow_inf_nan=False)
    """Seconds for one request, from waiting for a connection to the last byte.

    `limits.timeout_s`, in contrast, holds for a call with all its retries.
    """

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        parsed = httpx.URL(url) if url.isprintable() else None
        if parsed is None or parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError("expected an address such as 'http://127.0.0.1:8000'")
        return url


class HttpTool(BaseTool):
    """Base of a tool that posts JSON to an HTTP service and reads JSON.

    The connections belong to the worker's event loop. Calls open them. They are closed when the last conversation has
    released the tool.

    Args:
        settings: The settings of the service.
        config: As in `BaseTool`.
        tool_schema: As in `BaseTool`.

    Raises:
        ConfigError: The network's proxy, by which the service is reached, cannot be used.

    Attributes:
        service: Name of the service in messages to the model; a subclass sets it.
        path: Path to which requests are posted; a subclass sets it before it calls this class's `__init__`.
        not_found: Statuses by which the service reports that the model's name is unknown. They are the model's mistake,
            and not an outage.
    """

    repeatable = True
    outage_limits = OutageLimits(timeouts="outage", addresses="service")
    service: ClassVar[str]
    path: str
    not_found: ClassVar[tuple[int, ...]] = ()

    def __init__(self, settings: HttpSettings, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._http = settings
        url = settings.url.rstrip("/")
        self._address = url if url.endswith(self.path) else url + self.path
        self._route = route_to(self._address, "config.url")
        self._connections = PerLoop(Connections.close, counted=True)

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        """Count the conversation, so that connections stay open for it."""
        self._connections.enter(instance_id)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Stop counting the conversation; the last one closes the connections."""
        await self._connections.leave(instance_id)

    async def _ask(self, payload: dict[str, Any], answer: type[Answer]) -> Answer:
        """Post a request and return the service's answer.

        Args:
            payload: The request, which is sent as JSON.
            answer: The pydantic model that reads the answer.

        Raises:
            UnavailableError: The service cannot be reached, is late, cannot answer now, or its answer cannot be read; a
                retry may help.
            ServiceFailedError: It broke off, or its answer to the model's code cannot be read; asking again may help.
            ValueError: The service refuses the request, or its answer is too large.
        """
        timeout_s = self._http.timeout_s
        # JSON with escapes: a model's code may hold lone surrogates, which UTF-8 cannot express.
        content = json.dumps(payload).encode()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._connections.get(self._open_connections).one() as connection,
                connection.stream("POST", self._address, content=content) as response,
            ):
                body = await self._read(response)
        except LateError:
            raise
        except TimeoutError:
            raise LateError(self._say(f"did not answer within {timeout_s:g} s")) from None
        except (httpx.ConnectError, httpx.UnsupportedProtocol) as error:
            raise UnavailableError(self._say(f"cannot be reached{self._route.words}", error)) from error
        except httpx.ProxyError as error:
            raise UnavailableError(self._say(f"cannot be reached{self._route.words}: {error}", error)) from error
        except httpx.HTTPError as error:
            text = self._say("broke off", error)
            raise (ServiceFailedError if await is_there(self._address, self._route, timeout_s) else UnavailableError)(
                text
            ) from error
        try:
            return answer.model_validate_json(body)
        except ValidationError as error:
            raise self._unreadable(error) from error

    async def _read(self, response: httpx.Response) -> bytes:
        status, kind = response.status_code, status_kind(response.status_code)
        if kind == "refused" or status in self.not_found:
            logger.warning("%s refused a request with HTTP %d", self._shown, status)
            raise ValueError(f"the {self.service} refused the request (HTTP {status})")
        if kind in OUT:
            raise self._unavailable(response)
        if kind == "failed":
            raise self._failed(f"failed (HTTP {status})")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise self._unreadable("it is compressed, which was not asked for")
        body, most = bytearray(), MAX_RESPONSE_BYTES
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > most:
                raise ValueError(f"the answer of the {self.service} has more than {most} bytes; ask for less")
        return bytes(body)

    def _unavailable(self, response: httpx.Response) -> UnavailableError:
        """Return the outage that a status means, with the setting that it is about."""
        status = response.status_code
        text = self._say(
            say_status(status, self._route, "config.url", "config.url"), response.headers.get("location", "")
        )
        error = (LateError if status_kind(status) == "late" else UnavailableError)(text)
        error.next_try_s = retry_after_s(response.headers.get("retry-after"))
        return error

    def _failed(self, problem: str, cause: object = "") -> ServiceFailedError:
        return ServiceFailedError(self._say(problem, cause))

    def _unreadable(self, cause: object) -> UnavailableError | ServiceFailedError:
        """Return the error of an answer that cannot be read: an outage, unless the model's code may be the reason."""
        text = self._say("gave an answer that cannot be read", cause)
        return (ServiceFailedError if self.outage_limits.timeouts == "model" else UnavailableError)(text)

    def _say(self, problem: str, cause: object = "") -> str:
        """Log a problem with its cause, and return the text for the model."""
        logger.warning("%s %s%s", self._shown, problem, f": {cause!r:.500}" if cause else "")
        return f"the {self.service} {problem}"

    def _open_connections(self) -> Connections:
        return Connections(MAX_CONNECTIONS, self._tls, self._route)

    @cached_property
    def _shown(self) -> str:
        return str(httpx.URL(self._address).copy_with(userinfo=b""))

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return trusted(self._address)  # once for each tool: loading certificates takes a dozen milliseconds


async def is_there(address: str, route: Route, timeout_s: float = _THERE_S) -> bool:
    """Return whether a service still takes connections: then it was one request alone that broke off.

    Args:
        address: Its address.
        route: The way to it.
        timeout_s: Most seconds to wait; never more than five.
    """
    limit_s = min(_THERE_S, timeout_s)
    if route.proxy is not None:  # which always takes connections
        try:
            async with asyncio.timeout(limit_s), open_client(httpx.AsyncClient, route) as client:
                return status_kind((await client.head(address)).status_code) not in ("away", "late")
        except (httpx.HTTPError, TimeoutError):
            return False
    url = httpx.URL(address)
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(url.host, url.port or (443 if url.scheme == "https" else 80))
    except OSError:  # a TimeoutError is one, too
        return False
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True

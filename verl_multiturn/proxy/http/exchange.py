"""`Exchange`: one request for completions, and its answer over HTTP, whole or as a stream of events.

The server makes one for each request of an agent whose body it has read. It gets completions from the session, lets
the protocol write them, and reports to the session whether the client got them: a completion is trained only when it
was *delivered*.

Invariants:
- a completion is delivered when the operating system has taken the whole of its answer, and the connection was open
  before and after that. An error is never a delivery;
- a client that has gone is noticed while the generation runs. That stops no generation: the session keeps the
  completion for the next identical request, such as a retry;
- a client that has closed only its sending side is still there, and gets its answer.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import orjson
from aiohttp import HttpVersion11, web

from verl_multiturn.proxy.http.clients import ClientConnection, has_ended, was_reset
from verl_multiturn.proxy.protocols import Protocol
from verl_multiturn.proxy.protocols.requests import ChatRequest, RefusedError

if TYPE_CHECKING:
    from verl_multiturn.proxy.sessions.session import AgentSession

STATUS_S = 1.0
"""Seconds that a stream waits for its generation before it begins: an error until then has its own HTTP status."""
_IN_THREAD_TOKENS = 2048
"""Answers with the log-probabilities of more tokens are written in a thread."""
_BATCH_BYTES = 64 * 1024
_LOOK_S = 1.0
"""Seconds between two looks at a client that sends nothing more: the event loop does not report when it has gone."""
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class Exchange:
    """A request for completions and its answer.

    Args:
        request: The HTTP request, whose body was read.
        protocol: Writes the answer.
        asked: The body's content.
        session: Completes it.
        failed: Makes an error of an exception that is a mistake of ours.
        ping_s: Seconds between the pings of a stream whose generation is under way.
        threads: Where long answers are written.
    """

    def __init__(
        self,
        request: web.BaseRequest,
        protocol: Protocol,
        asked: ChatRequest,
        session: AgentSession,
        failed: Callable[[Exception], RefusedError],
        ping_s: float,
        threads: Executor,
    ) -> None:
        self._request = request
        self._protocol = protocol
        self._asked = asked
        self._failed = failed
        self._ping_s = ping_s
        self._threads = threads
        self._created = int(time.time())
        self._begun: web.StreamResponse | None = None
        self._has_asked_client = False
        self._delivery = session.begin(asked)
        self._ready = asyncio.create_task(self._delivery.ready())
        self._ready.add_done_callback(_seen)

    async def run(self) -> web.StreamResponse:
        """Write the answer.

        Raises:
            RefusedError: There is none, and nothing was written.
            ConnectionError: The client has gone.
        """
        arrived = False
        try:
            response, end, is_answer = await (self._streamed() if self._asked.stream else self._whole())
            # At once: a client that has read the last event may close before it has read the end of the body.
            await response.write_eof(end)
            await self._request.writer.drain()
            arrived = is_answer and not was_reset(self._request.transport)
            return response
        finally:
            self._ready.cancel()
            if arrived:
                self._delivery.delivered()
            else:
                self._delivery.undelivered()

    async def _whole(self) -> tuple[web.StreamResponse, bytes, bool]:
        await self._wait(None)
        self._ready.result()
        tokens = sum(len(completion.token_logprobs) for completion in self._delivery.completions)
        if tokens <= _IN_THREAD_TOKENS:
            body = self._body()
        else:
            body = await asyncio.get_running_loop().run_in_executor(self._threads, self._body)
        response = web.Response(body=body, content_type="application/json")
        await self._begin(response)
        return response, b"", True

    def _body(self) -> bytes:
        answer = self._protocol.answer(self._asked, self._delivery.completions, self._created)
        try:
            return orjson.dumps(answer)
        except TypeError:  # a call holds a number of more than 64 bits, or half a surrogate pair
            return json.dumps(answer).encode()

    async def _streamed(self) -> tuple[web.StreamResponse, bytes, bool]:
        """Write a stream but for its end; return that, and whether this is an answer: an error in a stream is none."""
        response = web.StreamResponse(headers=_EVENTS)
        if await self._wait(min(self._ping_s, STATUS_S)):
            self._ready.result()
        else:
            await self._begin(response)
            await response.write(self._protocol.ping())
            while not await self._wait(self._ping_s):
                await response.write(self._protocol.ping())
        try:
            self._ready.result()
            events = self._protocol.events(self._asked, self._delivery.completions, self._created)
            await self._begin(response)
            end = b""
            for batch in _batches(events):
                if end:
                    await response.write(end)
                end = batch
        except ConnectionError:
            raise
        except Exception as error:  # the status is sent; an error can only be an event
            refused = error if isinstance(error, RefusedError) else self._failed(error)
            return response, self._protocol.error_events(refused), False
        return response, end, True

    async def _begin(self, response: web.StreamResponse) -> None:
        """Write the head of the answer, if it is not written."""
        await self._check_client()
        await response.prepare(self._request)
        self._begun = response

    async def _check_client(self) -> None:
        """Look whether the client has gone.

        Who sends nothing more may have gone, or may wait for the answer. The two differ once something is written: a
        ping of a stream, or an interim answer, which clients skip. The system of one that has gone refuses it.

        Raises:
            ConnectionError: It has gone.
        """
        transport = self._request.transport
        if not self._has_asked_client and transport is not None and has_ended(transport):
            self._has_asked_client = True
            if self._begun is not None:
                await self._begun.write(self._protocol.ping())
            elif self._request.version >= HttpVersion11:
                transport.write(_INTERIM)
        if was_reset(transport):
            raise ConnectionResetError("the client has gone")

    async def _wait(self, seconds: float | None) -> bool:
        """Wait for the completions, and return whether they are there.

        Raises:
            ConnectionError: The client has gone.
        """
        connection = self._request.protocol
        assert isinstance(connection, ClientConnection)
        loop = asyncio.get_running_loop()
        until = math.inf if seconds is None else loop.time() + seconds
        while not (self._ready.done() or connection.lost.done()) and (left := until - loop.time()) > 0:
            awaited = {self._ready, connection.lost}
            if connection.ended.done():
                left = min(left, _LOOK_S)
            else:
                awaited.add(connection.ended)
            await asyncio.wait(awaited, timeout=None if left == math.inf else left, return_when=asyncio.FIRST_COMPLETED)
            if connection.ended.done() and not connection.lost.done():
                await self._check_client()
        if connection.lost.done():
            raise ConnectionResetError("the client has gone")
        return self._ready.done()


def _seen(task: asyncio.Task[None]) -> None:
    """Look at a task's error: nothing else does where the client has gone."""
    if not task.cancelled():
        task.exception()


def _batches(events: Iterable[bytes]) -> Iterator[bytes]:
    """Join events to pieces of about `_BATCH_BYTES`."""
    batch = bytearray()
    for event in events:
        batch += event
        if len(batch) >= _BATCH_BYTES:
            yield bytes(batch)
            batch.clear()
    if batch:
        yield bytes(batch)

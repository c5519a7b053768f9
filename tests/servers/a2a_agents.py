"""Agents of A2A for tests, made with the official SDK's server, each on a port of its own in this event loop."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import uvicorn
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentSkill,
    Part,
    Task,
    TaskState,
    TaskStatus,
)
from google.protobuf.json_format import MessageToDict
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

Work = Callable[[RequestContext, TaskUpdater], Awaitable[None]]
"""The work of an agent for one message: it has a task already, and reports by the updater."""


class Worker(AgentExecutor):
    """An agent that does a work. `cancelled` has the ids of the tasks that a client has cancelled."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.cancelled: list[str] = []
        self.contexts: list[str] = []
        """Context of each message, in order."""
        self.tasks: list[str] = []

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        assert context.task_id is not None
        assert context.context_id is not None
        self.contexts.append(context.context_id)
        self.tasks.append(context.task_id)
        updater = TaskUpdater(event_queue, context.task_id, context.context_id)
        if context.current_task is None:
            status = TaskStatus(state=TaskState.TASK_STATE_SUBMITTED)
            task = Task(id=context.task_id, context_id=context.context_id, status=status)
            await event_queue.enqueue_event(task)
        await self._work(context, updater)

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        assert context.task_id is not None
        assert context.context_id is not None
        self.cancelled.append(context.task_id)
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


def card(url: str, streaming: bool = True, skills: Sequence[tuple[str, str]] = (), **fields: Any) -> AgentCard:
    return AgentCard(
        **{
            "name": "Travel agent",
            "description": "Plans journeys.",
            "version": "1",
            "supported_interfaces": [AgentInterface(url=url, protocol_binding="JSONRPC", protocol_version="1.0")],
            "capabilities": AgentCapabilities(streaming=streaming),
            "default_input_modes": ["text/plain"],
            "default_output_modes": ["text/plain"],
            "skills": [AgentSkill(id=name, name=name, description=text, tags=["t"]) for name, text in skills],
            **fields,
        }
    )


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, listening: socket.socket | None = None) -> AsyncIterator[str]:
    """Serve an application, and yield its address."""
    listening = listening or socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    running = asyncio.create_task(server.serve([listening]))
    while not server.started:  # noqa: ASYNC110 it sets no event
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await running


@contextlib.asynccontextmanager
async def agent(
    work: Work,
    streaming: bool = True,
    skills: Sequence[tuple[str, str]] = (),
    listening: socket.socket | None = None,
    **fields: Any,
) -> AsyncIterator[tuple[str, Worker]]:
    """Serve an agent; yield its address and its worker."""
    listening = listening or socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    its = card(f"{url}/rpc", streaming, skills, **fields)
    worker = Worker(work)
    handler = DefaultRequestHandler(worker, InMemoryTaskStore(), its)
    routes = [*create_agent_card_routes(its), *create_jsonrpc_routes(handler, "/rpc", enable_v0_3_compat=True)]
    async with serving(Starlette(routes=routes), listening) as address:
        try:
            yield address, worker
        finally:
            await handler.aclose()


def text_of(context: RequestContext) -> str:
    return context.get_user_input()


def parts(text: str) -> list[Part]:
    return [Part(text=text)]


Answer = Callable[[dict[str, Any]], Any]


@contextlib.asynccontextmanager
async def scripted(answer: Answer, **fields: Any) -> AsyncIterator[str]:
    """Serve a card, and an answer of one's own to each request of JSON-RPC: a response, or events that are streamed."""
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"

    async def its_card(request: Request) -> Response:
        return JSONResponse(MessageToDict(card(f"{url}/rpc", **fields)))

    async def rpc(request: Request) -> Response:
        said = answer(await request.json())
        if isinstance(said, Response):
            return said
        if isinstance(said, dict):
            return JSONResponse({"jsonrpc": "2.0", "id": 1, **said})
        return StreamingResponse(_events(said), media_type="text/event-stream")

    routes = [Route("/.well-known/agent-card.json", its_card), Route("/rpc", rpc, methods=["POST"])]
    async with serving(Starlette(routes=routes), listening) as address:
        yield address


async def _events(said: Any) -> AsyncIterator[bytes]:
    async for each in said:
        yield each if isinstance(each, bytes) else b"data: %s\n\n" % json.dumps({"id": 1, "result": each}).encode()

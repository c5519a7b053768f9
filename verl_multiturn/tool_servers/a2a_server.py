"""A server of A2A for our tools, by the official SDK: an agent whose skills are tools, and whose messages are calls.

The text of a message is a call, and its context is a session of tools (`ToolHost`); the card has the tools' schemas by
our extension (`tools/services/a2a_extension.py`). Each call is a task: its answer is an artifact, its error the message
of a failed task.

Invariants:
- an argument is read from JSON text alone: a `data` part turns 1 into 1.0, and is refused by name;
- a task that is cancelled ends its call; a client that goes away ends none;
- a session ends once: by `{"end": true}`, by a signal, or when it was not used for too long;
- no client lists the contexts of others;
- no more than `_MOST_TASKS` tasks are kept for clients that ask for them later.
"""

from __future__ import annotations

import json
import re
import socket
from collections import OrderedDict
from typing import Any

import uvicorn
from a2a.helpers.proto_helpers import get_message_text
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.context import ServerCallContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.request_handlers.response_helpers import agent_card_to_dict
from a2a.server.routes import create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentExtension,
    AgentInterface,
    AgentSkill,
    ListTasksRequest,
    ListTasksResponse,
    Part,
    Task,
    TaskState,
    TaskStatus,
)
from a2a.utils.constants import AGENT_CARD_WELL_KNOWN_PATH
from a2a.utils.errors import InvalidParamsError
from mcp.server.streamable_http_manager import RequestBodyLimitMiddleware
from mcp.server.transport_security import DEFAULT_MAX_REQUEST_BODY_SIZE, TransportSecurityMiddleware
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verl_multiturn import __version__
from verl_multiturn.tool_servers.serving import Uvicorn, answer_of, security_of, until_signal
from verl_multiturn.tool_servers.sessions import ToolHost
from verl_multiturn.tools.services.a2a_extension import KEY, URI, call_text, read_call, schemas_text

PATH = "/a2a"
_MOST_TASKS = 1024
_SEPARATORS = re.compile("[\x85\u2028\u2029]")
"""Characters at which Python ends a line, and which JSON may hold as they are."""


def agent_card(host: ToolHost, name: str, url: str) -> AgentCard:
    """Return the card of the tools of a host: a skill for each, and their schemas by our extension.

    Args:
        host: The tools.
        name: Name of the agent.
        url: The address to which messages go.
    """
    extension = AgentExtension(
        uri=URI,
        description="Tools with their schemas, as JSON text. A message is the call of one, as JSON text, too.",
        params={KEY: schemas_text(host.schemas)},
    )
    return AgentCard(
        name=name,
        description=f"Tools: {', '.join(host.tools)}. A message is one call, as JSON text; a context is a session.",
        version=__version__,
        supported_interfaces=[AgentInterface(url=url, protocol_binding="JSONRPC", protocol_version="1.0")],
        capabilities=AgentCapabilities(streaming=True, extensions=[extension]),
        default_input_modes=["text/plain", "application/json"],
        default_output_modes=["text/plain", "image/png"],
        skills=[_skill(schema["function"]) for schema in host.schemas],
    )


def _skill(function: dict[str, Any]) -> AgentSkill:
    name, parameters = function["name"], function.get("parameters", {})
    described = function.get("description") or name
    known = json.dumps(parameters.get("properties", {}), ensure_ascii=False)
    return AgentSkill(
        id=name,
        name=name,
        description=_sendable(f"{described}\nArguments: {known}"),
        tags=["tool"],
        examples=[call_text(name, {})],
    )


def build_app(host: ToolHost, name: str, address: str) -> tuple[ASGIApp, DefaultRequestHandler]:
    """Return the application that serves a host's tools, and the SDK's handler, which is to be closed at the end.

    Args:
        host: The tools and their sessions.
        name: Name of the agent.
        address: The address to listen on, by which headers are checked.
    """
    handler = DefaultRequestHandler(_Executor(host), _Tasks(), agent_card(host, name, PATH))

    async def its_card(request: Request) -> JSONResponse:
        # By the name under which the client reached us: an address to listen on may be none to connect to.
        return JSONResponse(agent_card_to_dict(agent_card(host, name, str(request.base_url).rstrip("/") + PATH)))

    routes = [
        Route(AGENT_CARD_WELL_KNOWN_PATH, its_card),
        *create_jsonrpc_routes(handler, PATH, enable_v0_3_compat=True),
    ]
    app = _Checked(Starlette(routes=routes), TransportSecurityMiddleware(security_of(address)))
    return RequestBodyLimitMiddleware(app, DEFAULT_MAX_REQUEST_BODY_SIZE), handler


async def serve_a2a(host: ToolHost, name: str, listening: socket.socket, address: str) -> int:
    """Serve clients until a signal comes, and return the exit status.

    Args:
        host: The tools; closed at the end.
        name: Name of the agent.
        listening: The socket.
        address: The address by which it was named.
    """
    app, handler = build_app(host, name, address)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1
    )

    async def serve() -> None:
        try:
            await Uvicorn(config).serve([listening])
        finally:
            await handler.aclose()

    return await until_signal(serve(), host)


class _Checked:
    """An application whose requests must name this server, and come from no page of another site.

    Args:
        app: The application.
        security: The checks.
    """

    def __init__(self, app: ASGIApp, security: TransportSecurityMiddleware) -> None:
        self._app = app
        self._security = security

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        request = Request(scope, receive)
        refusal = await self._security.validate_request(request, is_post=request.method == "POST")
        await (refusal or self._app)(scope, receive, _escaping(send))


def _escaping(send: Send) -> Send:
    """Return a `send` that escapes separators in events, since the SDK's client takes them for ends of lines."""
    is_stream = False

    async def escape(message: Message) -> None:
        nonlocal is_stream
        if message["type"] == "http.response.start":
            is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
        elif is_stream and not message.get("body", b"").isascii():
            text = message["body"].decode()  # each event is one body
            message["body"] = _SEPARATORS.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()
        await send(message)

    return escape


class _Executor(AgentExecutor):
    """An agent that runs the call in each message.

    Args:
        host: The tools and their sessions.
    """

    def __init__(self, host: ToolHost) -> None:
        self._host = host

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Run the call of a message as a task."""
        assert context.task_id is not None
        assert context.context_id is not None
        status = TaskStatus(state=TaskState.TASK_STATE_WORKING)
        await event_queue.enqueue_event(Task(id=context.task_id, context_id=context.context_id, status=status))
        task = TaskUpdater(event_queue, context.task_id, context.context_id)
        try:
            call = _call_of(context)
        except ValueError as error:
            await task.reject(task.new_agent_message([Part(text=_sendable(str(error)))]))
            return
        if call is None:
            rewards = await self._host.end(context.context_id)
            await task.add_artifact([Part(text="the session has ended")], metadata=_shown({"rewards": rewards}))
            await task.complete()
            return
        result = await self._host.call(context.context_id, *call)
        text, pictures, failed = await answer_of(result)
        parts = [Part(raw=each, media_type="image/png") for each in pictures]
        if text or not parts:
            parts.insert(0, Part(text=_sendable(text)))
        shown = {"status": str(result.status), "reward": result.reward, "metrics": result.metrics}
        metadata = _shown(shown if self._host.report is not None else {})
        if failed:
            await task.failed(task.new_agent_message(parts, metadata=metadata))
        else:
            await task.add_artifact(parts, metadata=metadata)
            await task.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Report that a task was cancelled, whose call the SDK has cancelled before."""
        assert context.task_id is not None
        assert context.context_id is not None
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


def _call_of(context: RequestContext) -> tuple[str, str] | None:
    """Return the call in a message; None: its session shall end.

    Raises:
        ValueError: It has none.
    """
    message = context.message
    assert message is not None
    if any(part.WhichOneof("content") != "text" for part in message.parts):
        raise ValueError("a call is JSON text; send it as a text part, since a data part turns 1 into 1.0")
    return read_call(get_message_text(message))


def _sendable(text: str) -> str:
    """Return a text without lone surrogates, which no message can hold."""
    return text.encode("utf-8", "replace").decode()


def _shown(values: dict[str, Any]) -> dict[str, Any] | None:
    return {f"{URI}/{key}": value for key, value in values.items() if value is not None} or None


class _Tasks(InMemoryTaskStore):
    """The latest tasks of all clients."""

    def __init__(self) -> None:
        super().__init__()
        self._order: OrderedDict[str, ServerCallContext] = OrderedDict()

    async def save(self, task: Task, context: ServerCallContext) -> None:
        """Keep a task. The one that was saved the longest ago makes room."""
        await super().save(task, context)
        self._order[task.id] = context
        self._order.move_to_end(task.id)
        if len(self._order) > _MOST_TASKS:
            await super().delete(*self._order.popitem(last=False))

    async def list(self, params: ListTasksRequest, context: ServerCallContext) -> ListTasksResponse:
        """Return the tasks of a context that the client names: who knows a context may use its session.

        Raises:
            InvalidParamsError: It names none.
        """
        if not params.context_id:
            raise InvalidParamsError("name the context whose tasks you want; those of all clients are not listed")
        return await super().list(params, context)

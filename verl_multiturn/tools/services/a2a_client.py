"""A2A agents as the client knows them, and conversations with them.

Invariants:
- each conversation has a context of its own, which the agent names; its tasks are cancelled at the latest with it;
- no answer is kept beyond `MAX_ANSWER_BYTES`, whatever its form; a file that is named by an address is not fetched;
- calls and headers go to the host of the configured address alone, wherever the card points;
- only a failure that cannot depend on the message is an outage: see `tools/services/http_client.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from functools import cached_property, partial
from uuid import uuid4

import httpx
from a2a.client import A2AClientError, Client, ClientConfig, ClientFactory
from a2a.types import (
    AgentCard,
    CancelTaskRequest,
    GetTaskRequest,
    Message,
    Part,
    Role,
    SendMessageConfiguration,
    SendMessageRequest,
)
from a2a.utils.errors import A2AError, InternalError, InvalidAgentResponseError, TaskNotFoundError

from verl_multiturn.calls.per_loop import PerLoop
from verl_multiturn.clients.http_connections import Connections, Route, route_to, trusted
from verl_multiturn.describe import describe
from verl_multiturn.errors import MultiTurnError
from verl_multiturn.tools.base import ToolResponse
from verl_multiturn.tools.services.a2a_answers import Progress
from verl_multiturn.tools.services.a2a_card import BINDING, A2aSettings, message_address
from verl_multiturn.tools.services.a2a_extension import END
from verl_multiturn.tools.services.a2a_http import AgentClient, MessageRefusedError
from verl_multiturn.tools.services.environment_variables import header
from verl_multiturn.tools.services.http_client import (
    MAX_CONNECTIONS,
    ServiceFailedError,
    UnavailableError,
    is_there,
)

logger = logging.getLogger(__name__)

_FIRST_POLL_S = 0.1
_LONGEST_POLL_S = 5.0
_END_S = 3.0
"""Seconds for the end of a conversation; `release` has five."""


class A2aAgent:
    """An agent that the tools of one entry call, with its conversations.

    Args:
        settings: Its settings.
        card: Its card.
        where: The place that errors name.

    Raises:
        ConfigError: There is no way to its address.
    """

    def __init__(self, settings: A2aSettings, card: AgentCard, where: str) -> None:
        self.settings = settings
        self._address = message_address(card, settings, where)
        self._route: Route = route_to(self._address, f"{where}.url")
        self._headers = {name: header(value, f"{where}.headers.{name}") for name, value in settings.headers.items()}
        self._card = AgentCard()
        self._card.CopyFrom(card)
        for interface in self._card.supported_interfaces:
            if interface.protocol_binding == BINDING:
                interface.url = self._address
        self._connections = PerLoop(Connections.close, counted=True)
        self._contexts: dict[str, _AgentContext] = {}
        self._is_end_reported = False

    def enter(self, instance_id: str, tool: str, context_id: str = "") -> None:
        """Begin a conversation, or note that one more tool takes part in it.

        Args:
            instance_id: Its id.
            tool: Name of the tool.
            context_id: Its id at the agent; "": the agent names one.
        """
        self._connections.enter(instance_id)
        self._contexts.setdefault(instance_id, _AgentContext(context_id)).tools.add(tool)

    async def leave(self, instance_id: str, tool: str, ends: bool = False) -> None:
        """Note that a tool has left a conversation. The last one ends it: unfinished tasks are cancelled.

        Args:
            instance_id: Its id.
            tool: Name of the tool.
            ends: Whether the agent takes the message that ends a session.
        """
        context = self._contexts.get(instance_id)
        if context is None:
            return
        context.tools.discard(tool)
        if context.tools:
            return
        del self._contexts[instance_id]
        try:
            async with asyncio.timeout(_END_S):
                if context.waiting:
                    await self._cancel(context.waiting)
                if context.cancelling:
                    await asyncio.wait(context.cancelling)
                if ends and context.is_used:
                    await self._exchange(context, END, "")
        except Exception as error:  # an agent may be away by now
            if not self._is_end_reported:  # a slow agent would otherwise have a line for each conversation
                self._is_end_reported = True
                logger.warning(
                    "agent %s: a conversation could not be ended: %s; the agent keeps it until it ends it by itself "
                    "(said once)",
                    self.settings.label,
                    describe(error),
                )
        finally:
            for each in context.cancelling:
                each.cancel()
            await self._connections.leave(instance_id)

    async def ask(self, instance_id: str, text: str) -> ToolResponse:
        """Send a message, after those before it were answered; a task that asked back goes on with it.

        Args:
            instance_id: Id of the conversation.
            text: The message.

        Raises:
            ValueError: The agent refuses the message, failed, or its answer is too large.
            OutageError: It is not there.
            ServiceFailedError: It broke off, or its answer cannot be read.
        """
        context = self._contexts[instance_id]
        async with context.lock:
            waiting, context.waiting = context.waiting, ""
            return await self._exchange(context, text, waiting)

    async def call(self, instance_id: str, text: str) -> ToolResponse:
        """Send a call of a tool, beside others that may run; raises as `ask` does."""
        return await self._exchange(self._contexts[instance_id], text, "")

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        await self._connections.aclose()

    async def _exchange(self, context: _AgentContext, text: str, task_id: str) -> ToolResponse:
        message = Message(message_id=uuid4().hex, role=Role.ROLE_USER, parts=[Part(text=text)])
        message.context_id, message.task_id = context.context_id, task_id
        progress = Progress()
        progress.task_id = task_id
        context.is_used = True
        try:
            await self._follow(message, progress)
            response = await progress.response()
        except UnavailableError:
            if progress.is_open and progress.is_new:
                context.waiting = task_id  # the agent has not heard the message
            elif progress.is_open:
                self._cancel_later(context, progress.task_id)
            raise
        except BaseException:  # cancelled, too: the agent goes on otherwise
            if progress.is_open:
                self._cancel_later(context, progress.task_id)
            raise
        context.context_id = progress.context_id or context.context_id
        if progress.waits:
            context.waiting = progress.task_id
        return response

    async def _follow(self, message: Message, progress: Progress) -> None:
        """Send a message and read on until its answer is over; a stream that breaks off is followed by questions."""
        # An agent that does not stream answers with a task at once: else a call that is given up could not cancel it.
        at_once = SendMessageConfiguration(return_immediately=True)
        request = SendMessageRequest(message=message, configuration=at_once)
        async with self._client() as client:
            try:
                async with contextlib.aclosing(client.send_message(request)) as events:  # type: ignore[type-var]
                    async for event in events:
                        progress.add(event)
                        if progress.is_over:  # some agents leave the stream open
                            return
            except Exception as error:  # the SDK may raise anything
                if not (progress.is_open and isinstance(error.__cause__, httpx.TransportError)):
                    raise await self._read(error) from error
        wait_s = _FIRST_POLL_S
        while not progress.is_over:
            if not progress.task_id:
                raise ServiceFailedError("the agent ended its answer without a result")
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 1.5, _LONGEST_POLL_S)
            async with self._client() as client:
                try:
                    progress.set(await client.get_task(GetTaskRequest(id=progress.task_id)))
                except Exception as error:  # the SDK may raise anything
                    raise await self._read(error) from error

    def _cancel_later(self, context: _AgentContext, task_id: str) -> None:
        task = asyncio.get_running_loop().create_task(self._cancel(task_id))
        context.cancelling.add(task)
        task.add_done_callback(context.cancelling.discard)

    async def _cancel(self, task_id: str) -> None:
        try:
            async with self._client() as client:
                await client.cancel_task(CancelTaskRequest(id=task_id))
        except Exception as error:  # it may have ended meanwhile, or the agent cannot cancel
            logger.info("agent %s: a task was not cancelled: %s", self.settings.label, describe(error))

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[Client]:
        async with self._connections.get(self._open_connections).one() as http:
            assert isinstance(http, AgentClient)
            try:
                yield ClientFactory(ClientConfig(httpx_client=http)).create(self._card)
            finally:
                await http.finish()

    async def _read(self, error: Exception) -> Exception:
        """Return the error of this package for one of the SDK."""
        cause = error.__cause__
        if isinstance(error, MessageRefusedError | MultiTurnError):
            return error
        if isinstance(cause, httpx.ConnectError | httpx.ProxyError):
            return UnavailableError(self._say(f"cannot be reached{self._route.words}", cause))
        if isinstance(cause, httpx.RequestError):
            there = await is_there(self._address, self._route)
            return (ServiceFailedError if there else UnavailableError)(self._say("broke off", cause))
        if isinstance(error, TaskNotFoundError):
            return ServiceFailedError(self._say("does not know its task any more; send the whole message again", error))
        if isinstance(error, InternalError | InvalidAgentResponseError):
            return ServiceFailedError(self._say(f"failed: {error.message}", error))
        is_said = not isinstance(error, A2AClientError) or error.message.startswith("JSON-RPC Error")
        if isinstance(error, A2AError) and is_said:
            return MessageRefusedError(self._say(f"refuses the message: {error.message}", error))
        return ServiceFailedError(self._say("gave an answer that cannot be read", error))

    def _say(self, problem: str, cause: object) -> str:
        logger.warning("agent %s %s: %.500r", self.settings.label, problem, cause)
        return f"the agent {problem}"

    def _open_connections(self) -> Connections:
        client = partial(AgentClient, self._route, self._headers)
        return Connections(MAX_CONNECTIONS, self._tls, self._route, client)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return trusted(self._address)


class _AgentContext:
    """A conversation with an agent.

    Args:
        context_id: Its id at the agent; "": the agent names one in its first answer.
    """

    def __init__(self, context_id: str) -> None:
        self.context_id = context_id
        self.waiting = ""
        """Id of the task that goes on with the next message; "" for none."""
        self.is_used = False
        self.tools: set[str] = set()
        self.lock = asyncio.Lock()
        self.cancelling: set[asyncio.Task[None]] = set()

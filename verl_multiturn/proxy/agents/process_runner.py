"""`ProcessRunner`: each agent in a process of its own, a function or a command. `keeper.py` is the other side.

Invariants:
- when `run` returns or raises, the agent's process and all that it started have ended (its limits are in
  `keeper.py`), at the latest 9 s after the time was up;
- the agent's environment is that of the worker, with the session's address, and without credentials for the services
  whose place the endpoint takes;
- no process is forked from the worker itself, which has threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from verl_multiturn.calls.outages.causes import agents_cause
from verl_multiturn.calls.tasks import finish
from verl_multiturn.clients.http_connections import past_proxy
from verl_multiturn.errors import AgentContractError, ConfigError
from verl_multiturn.processes.forks import Fork, ForkError, Forks
from verl_multiturn.processes.interpreters import interpreter_environment
from verl_multiturn.processes.lines import read_line
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.agents.end import AgentEnd, AgentResult, EndKind
from verl_multiturn.proxy.agents.folder import make_folder, remove_folder
from verl_multiturn.proxy.agents.keeper import ENDED, NOTED

logger = logging.getLogger(__name__)

KEEPER = "verl_multiturn.proxy.agents.keeper"
"""Program of the forks, as in `processes/forks.py`."""
_GRACE_S = 5.0
"""Seconds for an agent to end by itself after SIGTERM."""
_KILLED_S = 2.0
"""Seconds for the end of processes that were killed."""
_OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
"""Soft limit of an agent, as this process was started with: the server raises that of the worker, and `select` of a
program that inherits it fails on high descriptors."""
_REPLACED = ("OPENAI_API_BASE", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "ANTHROPIC_AUTH_TOKEN")
"""Variables that lead clients to the services themselves."""
_TIME_UP = "the session's time was up before the agent ended"


class ProcessRunner:
    """Runs agents in processes.

    Args:
        agent: The agent's name, `module:function`; None: it is a command.
        command: The command and its arguments.
        where: The setting that errors name.
        python: The Python interpreter that imports and runs the agent; None: this one.
    """

    stuck = 0
    """No process ever remains; threads may."""

    def __init__(self, agent: str | None, command: Sequence[str] | None, where: str, python: str | None = None) -> None:
        self._command = None if command is None else list(command)
        self._where = where
        self._python = python
        self._forks = Forks(KEEPER, {"agent": agent, "where": where}, "agent", python)

    async def run(
        self,
        row: Mapping[str, Any],
        address: SessionAddress,
        time_up: asyncio.Event,
        returned: Callable[[], None] | None = None,
    ) -> AgentEnd:
        """Run the agent for one session, and return how it ended.

        When the call is cancelled, the process is killed at once.

        Args:
            row: The data row, as `agent_row` returns it.
            address: Where the agent finds the model.
            time_up: Set when the session's time is up. The agent has to end, and is later killed.
            returned: Is called as soon as the agent has returned or ended, which may be before its process is gone.

        Raises:
            AgentContractError: The agent returned something that is not a reward.
            ConfigError: The agent cannot be imported, or there is no such command.
        """
        try:
            fork = await self._forks.fork_before(time_up)
        except ForkError as error:
            return AgentEnd("failed", problem=str(error))
        folder = None
        try:
            if self._command is not None:
                try:
                    folder = make_folder()
                except OSError as error:
                    return AgentEnd("failed", problem=f"no folder for the agent: {error}")
            request = {
                "row": row,
                "address": dataclasses.asdict(address),
                "environment": environment_of(address, self._python),
                "open_files": _OPEN_FILES,
                "command": self._command,
                "folder": folder,
            }
            asking = asyncio.ensure_future(_ask(fork, request, returned))
            try:
                return await self._wait(fork, asking, time_up)
            finally:
                asking.cancel()
                await asyncio.wait({asking})
        finally:
            await finish(asyncio.ensure_future(_end(fork, folder)))

    async def aclose(self) -> None:
        """End the zygote, and with it all processes that remain."""
        await self._forks.aclose()

    async def _wait(
        self, fork: Fork, asking: asyncio.Future[dict[str, Any] | None], time_up: asyncio.Event
    ) -> AgentEnd:
        waiting = asyncio.ensure_future(time_up.wait())
        try:
            awaited: set[asyncio.Future[Any]] = {asking, waiting}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if asking.done():
            return self._ending(asking.result())
        with contextlib.suppress(OSError):
            fork.connection.send(b"stop\n")
        await asyncio.wait({asking}, timeout=_GRACE_S)
        _kill(fork)
        await asyncio.wait({asking}, timeout=_KILLED_S)
        answer = asking.result() if asking.done() else None
        return AgentEnd("timed_out", problem=_with_output(_TIME_UP, answer))

    def _ending(self, answer: dict[str, Any] | None) -> AgentEnd:
        if answer is None:
            return AgentEnd("exited", problem="the agent's process, and the one that keeps it, were killed")
        report = answer["report"] or {}
        if problem := report.get("wrong_type"):
            raise AgentContractError(problem)
        if problem := report.get("missing"):
            raise ConfigError(
                f"{self._where}: {(self._command or [''])[0]!r} cannot be started ({problem}); install it, or give its "
                "full path"
            )
        if problem := report.get("failed"):
            return AgentEnd("failed", problem=f"no process for the agent: {problem}")
        said: tuple[EndKind, ...] = ("outage", "unjudged", "misconfigured", "raised")
        for kind in said:
            if problem := report.get(kind):
                return AgentEnd(kind, problem=_with_output(problem, answer))
        if result := report.get("result"):
            return AgentEnd("returned", AgentResult(**result))
        if self._command is not None and answer["status"] == 0:
            return AgentEnd("returned")
        problem = f"the agent ended with {_status(answer['status'])}"
        return AgentEnd(agents_cause(answer["status"]) or "exited", problem=_with_output(problem, answer))


async def _ask(fork: Fork, request: Mapping[str, Any], returned: Callable[[], None] | None) -> dict[str, Any] | None:
    """Return the keeper's answer; None if it has ended without one. Call `returned` when the agent has returned."""
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(fork.connection, json.dumps(request).encode() + b"\n")
        if await loop.sock_recv(fork.connection, len(ENDED)) == ENDED:
            if returned is not None:
                returned()
            with contextlib.suppress(OSError):
                fork.connection.send(NOTED)
        return await read_line(fork.connection)
    except (OSError, EOFError):
        return None


def _kill(fork: Fork) -> None:
    """Have the keeper kill everything."""
    with contextlib.suppress(OSError):
        fork.connection.shutdown(socket.SHUT_WR)


async def _end(fork: Fork, folder: str | None) -> None:
    """End the keeper, and with it all that it keeps, wait for that, and remove the folder if the keeper did not."""
    try:
        _kill(fork)
        if not await fork.ended(_KILLED_S):  # its agent may have stopped it
            fork.kill()
            await fork.ended(_KILLED_S)
    finally:
        fork.close()
    if folder is not None and not await asyncio.to_thread(remove_folder, folder):
        logger.warning("the folder %s of an agent cannot be removed; remove it, its row may hold the answer", folder)


def _with_output(problem: str, answer: Mapping[str, Any] | None) -> str:
    return f"{problem}; it wrote:\n{answer['output']}" if answer and answer["output"] else problem


def _status(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"


def environment_of(address: SessionAddress, python: str | None = None) -> dict[str, str]:
    """Return the environment variables of an agent's process.

    Args:
        address: Where the agent finds the model.
        python: The interpreter that runs the agent; None: this one.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _REPLACED}
    if python is not None:
        environment = interpreter_environment(python, environment)
    # Clients would otherwise look for our address behind a proxy of the network.
    return past_proxy(environment, urlsplit(address.base_url).hostname or "") | {
        "OPENAI_BASE_URL": address.base_url,
        "OPENAI_API_KEY": address.api_key,
        "ANTHROPIC_BASE_URL": address.anthropic_base_url,
        "ANTHROPIC_API_KEY": address.api_key,
    }

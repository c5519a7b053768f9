"""The worker's side of the processes in which environments run; `zygote.py` is the other side.

    processes = EnvProcesses(spec)
    process = await processes.fork()
    first = await process.ask({"do": "reset", "seed": 3, "kwargs": {}})
    await process.close()
    await processes.aclose()

Invariants:
- every await can be cancelled: a request that is cancelled kills its process, since its answer would come too late;
- when `close` returns, the process has ended, and its programs with it; `close` takes at most a few seconds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from verl_multiturn.errors import InteractionContractError
from verl_multiturn.interactions.errors import EnvironmentFailedError, EnvironmentOutageError
from verl_multiturn.processes.forks import Fork, ForkError, Forks
from verl_multiturn.processes.lines import read_line

_POLITE_S = 2.0
"""Seconds that an environment has for its own `close`."""
_GONE_S = 2.0


class EnvProcess:
    """The process of one episode.

    Args:
        fork: The process.

    Attributes:
        process: Its process id.
        is_usable: Whether it answers requests: it is there, and busy with none.
    """

    def __init__(self, fork: Fork) -> None:
        self._fork = fork
        self.process = fork.process
        self.is_usable = True
        self._is_closed = False

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the environment's answer to a request. When cancelled, the process is killed.

        Args:
            request: `do`, which is `close` or one of the program's own (`reset`, `step`), and its arguments.

        Raises:
            EnvironmentFailedError: The environment raised an error, or its process has ended.
            InteractionContractError: The environment returned something of the wrong type.
        """
        doing = f"{request['do']}()"
        if not self.is_usable:
            raise EnvironmentFailedError("the environment's process has ended; nothing more can be played")
        self.is_usable = False
        try:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(self._fork.connection, json.dumps(request).encode() + b"\n")
            answer = await read_line(self._fork.connection)
        except (OSError, EOFError) as error:
            self.kill()
            why = f": {error}" if isinstance(error, EOFError) and str(error) else ""
            raise EnvironmentFailedError(f"the environment's process ended in the middle of {doing}{why}") from None
        except BaseException:  # cancelled: the answer would come too late
            self.kill()
            raise
        self.is_usable = True
        if problem := answer.get("failed"):
            failed = EnvironmentOutageError if answer["is_outage"] else EnvironmentFailedError
            raise failed(f"{doing} of the environment raised {problem}")
        if problem := answer.get("wrong_type"):
            raise InteractionContractError(f"{doing} of the environment: {problem}; correct it, or its config")
        return answer

    def kill(self) -> None:
        """Kill the process, if it is still there."""
        self.is_usable = False
        self._fork.kill()

    async def close(self) -> None:
        """Let the environment close itself, then end its process and wait for its end."""
        if self._is_closed:
            return
        try:
            if self.is_usable:
                async with asyncio.timeout(_POLITE_S):
                    await self.ask({"do": "close"})
        except (EnvironmentFailedError, InteractionContractError, TimeoutError):
            pass  # the conversation is over; the process is ended all the same
        finally:
            try:
                self.kill()
                await self._fork.ended(_GONE_S)
            finally:
                self._is_closed = True
                self._fork.close()


class EnvProcesses:
    """The processes of the episodes of one environment, for one event loop.

    Args:
        spec: The input of the program's `load`: the settings of the environment, as in `episode.load`.
        program: Module of the program that the processes run (`processes/zygote.py`).
        what: Name of the thing that it runs, in errors.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        program: str = "verl_multiturn.interactions.environments.zygote",
        what: str = "environment",
    ) -> None:
        self._forks = Forks(program, spec, what)

    async def fork(self) -> EnvProcess:
        """Return a new process, which has imported the environment and nothing else.

        Raises:
            ConfigError: The environment cannot be imported.
            EnvironmentOutageError: No process can be had.
        """
        try:
            return EnvProcess(await self._forks.fork())
        except ForkError as error:
            raise EnvironmentOutageError(str(error)) from None

    async def aclose(self) -> None:
        """End all processes that remain."""
        await self._forks.aclose()

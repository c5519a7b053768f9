"""`VerifiersRunner`: an episode of verifiers for each session, in one process for each environment (`server.py`).

Invariants:
- a worker has one process for each environment that its rows name, started by the first session and again when it has
  ended. It is forked from one that has imported verifiers, and ends with the worker;
- a session whose process is killed is unjudged, and so invalid: nothing of it is a reward of 0. The next session starts
  another process;
- an episode that does not end after the session's time is cancelled. A process that does not answer to that either is
  killed, with the sessions in it;
- the folder of what the processes leave in a home or among temporary files is removed with the runner, and where the
  worker was killed, by the process from which they were forked. If that was killed, too, the next runner does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from verl_multiturn.calls.tasks import ended_before, finish, keep
from verl_multiturn.clients.http_connections import past_proxy
from verl_multiturn.config import PATH, ProxySettings, VerifiersSettings
from verl_multiturn.describe import show
from verl_multiturn.errors import AgentContractError, ConfigError
from verl_multiturn.harnesses.own_python import check_in
from verl_multiturn.harnesses.owners import is_left, owner
from verl_multiturn.processes.forks import LATE, Fork, ForkError, Forks
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.agents.end import AgentEnd, EndKind, read_result

logger = logging.getLogger(__name__)

_SERVER = "verl_multiturn.harnesses.verifiers.server"
_CHECK = "verl_multiturn.harnesses.verifiers.settings_check"
_WHERE = f"{PATH}.proxy"
_FOLDER = "verl-multiturn-verifiers-"
_GRACE_S = 5.0
"""Seconds for an episode to end after the session's time was up."""
_CLOSED_S = 5.0
"""Seconds for an environment to close."""
_MOST_LINE = 2**26
_KINDS: dict[str, EndKind] = {"failed": "raised", "unjudged": "unjudged", "outage": "outage"}
INSTALL = "run `verl-multiturn install verifiers DIR`, and name DIR/bin/python"
"""Remedy where verifiers' Python is missing."""


class VerifiersRunner:
    """Plays episodes.

    Args:
        settings: The endpoint's settings, with those of the bridge.
        python: verifiers' interpreter.
    """

    stuck = 0
    """No process ever remains."""

    def __init__(self, settings: ProxySettings, python: str) -> None:
        self._settings = settings.verifiers
        self._with_roles = settings.roles is not None
        self._trained = frozenset((settings.roles if settings.train is None else settings.train) or ())
        self._python = python
        self._forks: Forks | None = None
        self._folder: str | None = None
        self._processes: dict[str, asyncio.Future[EnvironmentHandle]] = {}

    @property
    def processes(self) -> dict[str, int]:
        """Process ids of the environments, by their names."""
        done = {name: each for name, each in self._processes.items() if each.done() and not each.exception()}
        return {name: each.result().process for name, each in done.items() if not each.result().has_ended}

    async def run(
        self,
        row: Mapping[str, Any],
        address: SessionAddress,
        time_up: asyncio.Event,
        returned: Callable[[], None] | None = None,
    ) -> AgentEnd:
        """Play an episode for one session, as in `AgentRunner.run`.

        Raises:
            ConfigError: The row names no task or an unknown environment, an environment cannot be imported, or a seat
                is trained that it does not train.
        """
        name, task = task_of(row, self._settings)
        request = {
            "task": task,
            "base_url": f"{address.base_url.removesuffix('/v1').rstrip('/')}/s/{address.api_key}/v1",
            "environment": _past(address.base_url),
        }
        starting = asyncio.ensure_future(self._process(name))
        if not await ended_before(starting, time_up):
            return AgentEnd("failed", problem=f"no process for the environment {name!r}: {LATE}")
        try:
            process = starting.result()
        except ForkError as error:
            return AgentEnd("failed", problem=str(error))
        asking = asyncio.ensure_future(process.ask(play=request))
        waiting = asyncio.ensure_future(time_up.wait())
        try:
            await asyncio.wait({asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                await process.cancel(asking)
                return AgentEnd("timed_out", problem="the session's time was up before the episode ended")
            if returned is not None:
                returned()
            return self._ending(name, asking.result())
        finally:
            waiting.cancel()
            if not asking.done():  # the call itself was cancelled
                await finish(asyncio.ensure_future(process.cancel(asking)))

    async def rows(self, name: str, first: int = 0, count: int | None = None) -> list[dict[str, Any]]:
        """Return tasks of an environment: for each its `name`, `prompt` and `task`, the data for `task_of`.

        Args:
            name: The environment.
            first: Position of the first.
            count: How many; None: all that there are.

        Raises:
            ConfigError: The task set cannot be loaded, or has no end.
        """
        if name not in self._settings.envs:
            raise ConfigError(f"{name!r} is none of the environments {sorted(self._settings.envs)}; name one of them")
        process = await self._process(name)
        answer = await process.ask(tasks=[first, None if count is None else first + count])
        if answer is None or "problem" in answer:
            said = "its process ended" if answer is None else answer["problem"]
            raise ConfigError(f"{_WHERE}.verifiers.envs.{name}: its tasks cannot be loaded: {said}")
        return cast("list[dict[str, Any]]", answer["rows"])

    async def aclose(self) -> None:
        """End all processes, and remove their folder."""
        processes, self._processes = self._processes, {}
        for each in processes.values():
            each.cancel()
            await asyncio.wait({each})
            if not each.cancelled() and each.exception() is None:
                await each.result().aclose()
        if self._forks is not None:
            await self._forks.aclose()
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _ending(self, name: str, answer: Mapping[str, Any] | None) -> AgentEnd:
        if answer is None:
            return AgentEnd("unjudged", problem=f"the process of the environment {name!r} ended; it was killed")
        end = answer["end"]
        if end is None:
            return AgentEnd("unjudged", problem=f"the environment {name!r} was closed")
        if wrong := [seat for seat in end["others"] if seat in self._trained]:
            raise ConfigError(
                f"{_WHERE}.train has the role {wrong[0]!r}, and the environment {name!r} does not train this seat; "
                "leave it out"
            )
        if end["others"] and not self._with_roles:
            raise ConfigError(
                f"{_WHERE}.roles is not set, and the environment {name!r} does not train the seat "
                f"{end['others'][0]!r}, whose completions would be trained with the others; set proxy.roles and train"
            )
        if end["kind"] != "reward":
            return AgentEnd(_KINDS[end["kind"]], problem=end["problem"])
        try:
            result = read_result({"roles": end["seats"]} if self._with_roles else end["reward"])
        except AgentContractError as error:  # a number beyond the largest reward
            raise AgentContractError(f"the environment {name!r}: {error}") from None
        return AgentEnd("returned", result)

    async def _process(self, name: str) -> EnvironmentHandle:
        starting = self._processes.get(name)
        if starting is None or _is_over(starting):
            starting = self._processes[name] = asyncio.ensure_future(self._start(name))
            keep(starting)
        # A session that gives up leaves the process to the next one.
        return await asyncio.shield(starting)

    async def _start(self, name: str) -> EnvironmentHandle:
        if self._forks is None:
            await asyncio.to_thread(_remove_remains)
            self._folder = tempfile.mkdtemp(prefix=f"{_FOLDER}{owner()}")
            spec = {
                "settings": self._settings.model_dump(mode="json"),
                "where": f"{_WHERE}.verifiers",
                "with_roles": self._with_roles,
                "folder": self._folder,
            }
            self._forks = Forks(_SERVER, spec, "agent 'verifiers'", self._python)
        return await EnvironmentHandle.start(await self._forks.fork(), name)


class EnvironmentHandle:
    """The worker's side of an environment's process.

    Args:
        fork: The process.
        reader: Its answers.
        writer: Requests to it.
    """

    def __init__(self, fork: Fork, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._fork, self._reader, self._writer = fork, reader, writer
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[dict[str, Any] | None]] = {}
        self._of: dict[asyncio.Future[Any], int] = {}
        self.has_ended = False
        self._closing: asyncio.Future[None]
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, fork: Fork, name: str) -> EnvironmentHandle:
        """Name the environment to a process that was just forked."""
        try:
            reader, writer = await asyncio.open_connection(sock=fork.connection, limit=_MOST_LINE)
        except BaseException:  # cancelled, too: nobody else ends the process
            fork.close()
            raise
        handle = cls(fork, reader, writer)
        handle._say({"env": name})
        return handle

    @property
    def process(self) -> int:
        """Its process id."""
        return self._fork.process

    async def ask(self, **request: Any) -> dict[str, Any] | None:
        """Send a request, and return its answer; None if the process ended without one."""
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any] | None] = asyncio.get_running_loop().create_future()
        if self.has_ended:
            return None
        self._asked[number] = answer
        task = asyncio.current_task()
        if task is not None:
            self._of[task] = number
        self._say({"n": number, **request})
        try:
            return await answer
        finally:
            self._asked.pop(number, None)
            if task is not None:
                self._of.pop(task, None)

    async def cancel(self, asking: asyncio.Future[Any]) -> None:
        """Cancel an episode that a task asks for, and kill the process if the episode does not end."""
        if (number := self._of.get(asking)) is not None:
            self._say({"n": number, "cancel": True})
        await asyncio.wait({asking}, timeout=_GRACE_S)
        if not asking.done():  # its loop is held up, by an author's code
            logger.warning("the process %d of an environment did not end an episode, and is killed", self.process)
            self._fork.kill()
            await asyncio.wait({asking}, timeout=_GRACE_S)
        asking.cancel()

    async def aclose(self) -> None:
        """End the process."""
        self._reading.cancel()
        await asyncio.wait({self._reading})
        await self._closing

    async def _read(self) -> None:
        try:
            with contextlib.suppress(OSError, ValueError):
                while line := await self._reader.readline():
                    said = json.loads(line)
                    answer = self._asked.pop(said.get("n"), None)
                    if answer is not None and not answer.done():
                        answer.set_result(said)
        finally:
            self.has_ended = True
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_result(None)
            self._closing = asyncio.ensure_future(self._close())
            keep(self._closing)

    async def _close(self) -> None:
        self._writer.close()
        if not await self._fork.ended(_CLOSED_S):
            self._fork.kill()
            await self._fork.ended(_CLOSED_S)
        self._fork.close()

    def _say(self, said: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(said).encode() + b"\n")


def task_of(row: Mapping[str, Any], settings: VerifiersSettings) -> tuple[str, dict[str, Any]]:
    """Return the name of a data row's environment, and the data of its task.

    Args:
        row: The row: its `extra_info.verifiers` has `env`, which may be omitted where the settings have only one, and
            `task`, the data as JSON.
        settings: The bridge's settings.

    Raises:
        ConfigError: It names none.
    """
    named = (row.get("extra_info") or {}).get("verifiers")
    given = named if isinstance(named, Mapping) else {}
    task = given.get("task")
    if isinstance(task, str):
        with contextlib.suppress(ValueError):
            task = json.loads(task)
    if not isinstance(task, dict) or not given.keys() <= {"env", "task"}:
        raise ConfigError(
            f"extra_info.verifiers of a data row is {show(named, 200)}, expected the keys 'env' and 'task', the "
            "data of a task as JSON; prepare the rows anew"
        )
    env = given.get("env")
    if env is None and len(settings.envs) == 1:
        env = next(iter(settings.envs))
    if env not in settings.envs:
        raise ConfigError(
            f"extra_info.verifiers.env of a data row is {show(env, 100)}, which {_WHERE}.verifiers.envs does not have; "
            f"name one of {sorted(settings.envs)}"
        )
    return env, task


def check_verifiers(settings: ProxySettings, python: str) -> None:
    """Check, in verifiers' Python, that the environments can be made and played here, and that their seats have roles.

    Args:
        settings: The endpoint's settings.
        python: verifiers' interpreter.

    Raises:
        ConfigError: Something is missing, unknown, or does not fit.
    """
    if not settings.verifiers.envs:
        raise ConfigError(
            f"{_WHERE}.verifiers.envs: the agent 'verifiers' needs an environment; name one, such as "
            "{shop: {taskset: {id: shop}, agent: {harness: {id: 'null'}, runtime: {type: subprocess}}}}"
        )
    given = settings.verifiers.model_dump(mode="json")
    check_in(python, _CHECK, given, "verifiers", INSTALL, roles=settings.roles, train=settings.train)


def _past(base_url: str) -> dict[str, str]:
    """Return the variables by which clients do not look for the endpoint behind the network's proxy."""
    found = past_proxy(os.environ, urlsplit(base_url).hostname or "")
    return {name: found[name] for name in ("no_proxy", "NO_PROXY")}


def _is_over(starting: asyncio.Future[EnvironmentHandle]) -> bool:
    if not starting.done():
        return False
    return starting.cancelled() or starting.exception() is not None or starting.result().has_ended


def _remove_remains() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        if is_left(path.name):
            shutil.rmtree(path, ignore_errors=True)

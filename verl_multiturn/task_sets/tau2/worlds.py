"""`World`: the data base of one conversation, in a process of its own, and the verdict on its calls.

Tools and user of a conversation find its world by their `instance_id`: `open_world` and `close_world` belong to the
user, `world_of` to the tools.

Invariants:
- no two conversations share a world, and nothing of one remains for the next;
- no call runs on the event loop, and none keeps a world: a process that was killed in the middle of a call, because it
  was late or took all memory, is replaced by one in which all calls before are made again. Such a call has done
  nothing. So a model can neither block a conversation nor make it invalid;
- a verdict is that of τ²'s own evaluators.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.calls.per_loop import PerLoop
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.environments.process import EnvProcess, EnvProcesses
from verl_multiturn.interactions.errors import EnvironmentFailedError, EnvironmentOutageError

_JUDGES = 4
"""Most verdicts at once in one worker: each takes a core, and writes on its own copy of two data bases."""
_ENDED = "Error: the call ended its process"
_ATTEMPTS = 2
"""How often a call is made whose process ends: somebody else may have killed it."""


@dataclass(frozen=True)
class TauScore:
    """τ²'s verdict on a conversation.

    Attributes:
        reward: The reward, by the task's criteria: 0 or 1.
        db: 1.0 if the data base is as it should be.
        communicate: 1.0 if the agent sent all required information.
        actions: Share of the task's own calls that were made; it counts in no task of airline and retail.
    """

    reward: float
    db: float
    communicate: float
    actions: float


class DomainWorlds:
    """The worlds of one domain, for one event loop.

    Args:
        domain: The domain's name.
    """

    def __init__(self, domain: str) -> None:
        self.domain = domain
        self._processes = EnvProcesses(
            {"domain": domain}, "verl_multiturn.task_sets.tau2.world_process", f"{domain} world of τ²"
        )
        self._judging = asyncio.Semaphore(_JUDGES)

    async def fork(self) -> EnvProcess:
        """Return a process with a world in which nothing has been done.

        Raises:
            EnvironmentOutageError: No process can be had.
        """
        return await self._processes.fork()

    async def judge(self, task: str, calls: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> TauScore:
        """Return the verdict on a conversation that its user ended.

        Args:
            task: Id of the task.
            calls: The calls that its world answered, in order.
            texts: The agent's messages, in order.

        Raises:
            EnvironmentFailedError: There is no verdict.
        """
        request = {"do": "judge", "task": task, "calls": list(calls), "texts": list(texts)}
        async with self._judging:
            process = await self.fork()
            try:
                return TauScore(**await process.ask(request))
            finally:
                process.kill()
                await process.close()

    async def aclose(self) -> None:
        """End all processes."""
        await self._processes.aclose()


class World:
    """The world of one conversation.

    Args:
        worlds: Those of its domain.

    Attributes:
        domain: Name of the domain.
        calls: Calls and their answers so far: `name`, `arguments`, `content`, `error`.
        errors: Number of calls that failed.
    """

    def __init__(self, worlds: DomainWorlds) -> None:
        self.domain = worlds.domain
        self.calls: list[dict[str, Any]] = []
        self.errors = 0
        self._worlds = worlds
        self._process: EnvProcess | None = None
        self._calling = asyncio.Lock()

    @property
    def process(self) -> int | None:
        """Return the id of its process; None where it has none."""
        return None if self._process is None or not self._process.is_usable else self._process.process

    async def begin(self) -> None:
        """Fork the process. The first one of a worker waits for the data base to be parsed, which no call should.

        Raises:
            EnvironmentOutageError: No process can be had.
        """
        async with self._calling:
            await self._living()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Make a call; calls at the same time are made one after another.

        Args:
            name: Name of the tool.
            arguments: Its arguments.

        Returns:
            τ²'s answer, and whether it is an error.

        Raises:
            EnvironmentOutageError: No process can be had, or none in which the calls before can be made again.
        """
        request = {"do": "call", "name": name, "arguments": dict(arguments)}
        failed = True
        try:
            async with self._calling:
                for _ in range(_ATTEMPTS):
                    process = await self._living()
                    with contextlib.suppress(EnvironmentFailedError):
                        answer = await process.ask(request)
                        self.calls.append({"name": name, "arguments": dict(arguments), **answer})
                        failed = answer["error"]
                        return answer["content"], failed
            return _ENDED, True
        finally:
            self.errors += failed

    async def judge(self, task: str, texts: Sequence[str]) -> TauScore:
        """Return the verdict on the conversation so far, as `DomainWorlds.judge` does."""
        return await self._worlds.judge(task, self.calls, texts)

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            await self._process.close()

    async def _living(self) -> EnvProcess:
        """Return the process, or one in its place where it has ended, in the same state."""
        if self._process is None or not self._process.is_usable:
            await self.close()
            self._process = await self._worlds.fork()
            try:
                await self._process.ask({"do": "repeat", "calls": self.calls})
            except EnvironmentFailedError as error:  # these calls have been answered before
                raise EnvironmentOutageError(str(error)) from None
        return self._process


_worlds: PerLoop[DomainWorlds] = PerLoop(DomainWorlds.aclose)
_open: dict[str, World] = {}


def worlds_of(domain: str) -> DomainWorlds:
    """Return the worlds of a domain, for the running event loop."""
    return _worlds.get(lambda: DomainWorlds(domain), domain)


async def close_worlds(domain: str) -> None:
    """End all processes of a domain's worlds of the running event loop."""
    await _worlds.close(domain)


async def open_world(instance_id: str, domain: str) -> World:
    """Return a new world for a conversation.

    Raises:
        EnvironmentOutageError: No process can be had.
    """
    world = _open[instance_id] = World(worlds_of(domain))
    await world.begin()
    return world


async def close_world(instance_id: str) -> None:
    """End the world of a conversation, if it has one."""
    if (world := _open.pop(instance_id, None)) is not None:
        await world.close()


def world_of(instance_id: str, domain: str) -> World:
    """Return the world of a conversation.

    Raises:
        ConfigError: It has none, or one of another domain.
    """
    world = _open.get(instance_id)
    if world is None or world.domain != domain:
        got = "no τ² user" if world is None else f"one of {world.domain!r}"
        raise ConfigError(
            f"the tools of τ²'s {domain!r} need a user of that domain, and this conversation has {got}; name TauUser "
            "in interaction_config_path, with the same domain, and in the row's interaction_kwargs"
        )
    return world

"""One environment of verifiers, which plays many sessions at once: a program of `processes/zygote.py`.

    worker ⇄ server ─serves→ the environment: its shared tool sets, its interception
                    ─a task each→ episode ⇄ the session's endpoint

verifiers is imported once, in the zygote, and each environment's server is a fork of it: `EnvServer` and its pool of
verifiers import it again in each process, 9 to 17 s of a processor. Of `EnvServer` the server has the rest: one
`Env.serving()` for all sessions, a task made of its data alone, an episode for each request, and cancellation.

The worker sends lines of JSON. The first is `{"env": NAME}`. Then, with a number `n` of its own each:
- `{"n": 1, "play": {"task": …, "base_url": …, "environment": {…}}}` plays an episode; its answer is
  `{"n": 1, "end": {…}}`, with `end_cause.EpisodeEnd`;
- `{"n": 1, "cancel": true}` ends it. Its answer is the episode's, `{"n": 1, "end": null}`;
- `{"n": 2, "tasks": [0, 16]}` asks for tasks by their positions, without the last; its answer is
  `{"n": 2, "rows": […]}` or `{"n": 2, "problem": …}`.

When the worker closes the socket, all episodes are cancelled and the environment is closed.

Runs in verifiers' Python. It imports the standard library, verifiers, and modules of this package that need no more
than the standard library.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import socket
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.verifiers.end_cause import EpisodeEnd, EpisodeEvents, Fault, SeatTrace, end_of
from verl_multiturn.harnesses.verifiers.imports import config_of, import_verifiers

_MOST_LINE = 2**26
_KEY = "VERL_MULTITURN_NO_KEY"
"""The variable in which verifiers looks for a key. There is none: a session's address has its secret."""


class _Loaded(NamedTuple):
    configs: Mapping[str, Any]
    folder: str


def load(spec: Mapping[str, Any]) -> _Loaded:
    """Import verifiers and the environments, and return their configurations by name.

    Args:
        spec: `settings`, those of the bridge; `where`, their name; `with_roles`; `folder`, for what is left behind.

    Raises:
        ConfigError: A configuration is not accepted.
    """
    import_verifiers(spec["folder"], spec["settings"]["paths"])
    from verl_multiturn.harnesses.verifiers import chat_program, remains
    from verl_multiturn.harnesses.verifiers import tool_processes as _  # noqa: F401  # here, for all forks

    chat_program.install()
    remains.install()
    envs = spec["settings"]["envs"]
    configs = {name: config_of(name, given, spec["where"], spec["with_roles"]) for name, given in envs.items()}
    return _Loaded(configs, spec["folder"])


def leave(loaded: _Loaded) -> None:
    """Remove the folder of what the processes have left; a worker that was killed cannot."""
    shutil.rmtree(loaded.folder, ignore_errors=True)


def serve(served: socket.socket, loaded: _Loaded) -> None:
    """Serve one environment until the worker closes the socket."""
    from verl_multiturn.harnesses.verifiers.tool_processes import Launcher

    Launcher(served).install()  # now, when this process has one thread
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        asyncio.run(_EnvironmentProcess(loaded.configs).run(served))


class _EnvironmentProcess:
    def __init__(self, configs: Mapping[str, Any]) -> None:
        self._configs = configs
        self._episodes: dict[int, asyncio.Task[None]] = {}
        self._env: Any = None
        self._failed: BaseException | None = None

    async def run(self, served: socket.socket) -> None:
        """Read requests and answer them until the worker has gone."""
        served.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=served.dup(), limit=_MOST_LINE)
        self._say({"process": os.getpid()})
        if not (line := await reader.readline()):
            return
        from verifiers.v1.utils.loaders import load_environment

        async with contextlib.AsyncExitStack() as stack:
            try:
                self._env = load_environment(self._configs[json.loads(line)["env"]])
                await stack.enter_async_context(self._env.serving())
            except Exception as error:  # a shared tool set, or an author's `start`: each session is told
                self._failed = error
            while line := await reader.readline():
                self._take(json.loads(line))
            for episode in self._episodes.values():
                episode.cancel()
            if self._episodes:
                await asyncio.wait(self._episodes.values())

    def _take(self, request: Mapping[str, Any]) -> None:
        number = request["n"]
        if "play" in request:
            self._episodes[number] = asyncio.create_task(self._play(number, request["play"]))
        elif "tasks" in request:
            try:
                self._say({"n": number, "rows": self._tasks(*request["tasks"])})
            except Exception as error:  # an author's loader may raise anything
                self._say({"n": number, "problem": f"{type(error).__name__}: {error}"})
        elif (episode := self._episodes.get(number)) is not None:
            episode.cancel()

    async def _play(self, number: int, asked: Mapping[str, Any]) -> None:
        end: dict[str, Any] | None = None
        try:
            end = dataclasses.asdict(await self._end(asked))
        except asyncio.CancelledError:
            pass
        except Exception as error:  # code of an author that verifiers does not guard: a validator, an env's `complete`
            end = dataclasses.asdict(end_of(EpisodeEvents(False, faults=[_fault(error)])))
        finally:
            del self._episodes[number]
            self._say({"n": number, "end": end})

    async def _end(self, asked: Mapping[str, Any]) -> EpisodeEnd:
        """Play an episode, and return how it ends its session."""
        import verifiers.v1 as vf

        if self._failed is not None:
            return end_of(EpisodeEvents(False, faults=[_fault(self._failed)]))
        os.environ.update(asked["environment"])
        env = self._env
        task_type = type(env.taskset).task_type()
        try:
            task = task_type(task_type.data_type().model_validate(asked["task"]), env.config.taskset.task)
        except ValueError as error:
            return EpisodeEnd("unjudged", problem=f"the row's task is none of the task set's any more: {error}")
        client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=_KEY)
        (slot,) = env.slots(task)
        episode = await env.run_slot(slot, vf.ModelContext(model="policy", client=client))
        return end_of(_events(env, episode))

    def _tasks(self, first: int, after: int | None) -> list[dict[str, Any]]:
        """Return the tasks at some positions: their names, prompts and data."""
        if self._failed is not None:
            raise self._failed
        taskset = self._env.taskset
        if after is None and not taskset.bounded:
            raise ValueError("the task set has no end; say how many tasks to take")
        found = []
        for task in itertools.islice(iter(taskset), first, after):
            prompt = task.data.prompt_text or task.data.system_prompt or ""
            data = task.data.model_dump(mode="json")
            found.append({"name": str(task.data.name or task.data.idx), "prompt": prompt, "task": data})
        return found

    def _say(self, said: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(said).encode() + b"\n")


def _events(env: Any, episode: Any) -> EpisodeEvents:
    """Return the events of an episode."""
    return EpisodeEvents(
        complete=bool(env.complete(episode)),
        traces=[
            SeatTrace(
                seat=trace.agent.name,
                trainable=trace.agent.trainable,
                reward=float(trace.reward),
                turns=trace.num_turns,
                stop=trace.stop_condition or "",
                faults=[Fault(error.type, error.message) for error in trace.errors],
            )
            for trace in episode.traces
        ],
        faults=[Fault(error.type, error.message) for error in episode.errors],
        late=episode.is_timeout,
    )


def _fault(error: BaseException) -> Fault:
    if isinstance(error, ConfigError):
        return Fault("ConfigError", str(error))
    return Fault(type(error).__name__, "".join(traceback.format_exception_only(error)).strip())

"""One trial of Harbor for one session: the agent that `proxy.agent: harbor` starts. Runs in Harbor's own Python.

`run(row, session)` is an agent as docs/write/proxy.md has it, forked from a process that has imported Harbor once.

The row is `{"task": …, "trial": name, "settings": …, "folder": …}`, which `runner.py` makes of a data row: the task as
`TrialConfig.task` of Harbor has it, and the settings of `HarborSettings`. Address and key of the model are those of the
session. They reach the harness by its environment alone, where Harbor looks for them, also inside a container.

Events are noted while the trial runs (`_TrialLog`), and `end_cause.py` decides who caused its end.

Imports the standard library, Harbor, and modules of this package that need no more than the standard library.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch a table of prices, for 10 s

# Modules for every trial, some of which Harbor imports late: 7 s of CPU here, and not in each forked process.
import harbor.agents.terminus_2  # as above
import harbor.trial.single_step  # noqa: F401  # as above
import litellm  # noqa: F401  # as above
from harbor.environments.base import BaseEnvironment
from harbor.environments.docker.docker import DockerEnvironment, _sanitize_docker_compose_project_name
from harbor.models.environment_type import EnvironmentType
from harbor.models.trial.config import TrialConfig
from harbor.trial.hooks import TrialEvent
from harbor.trial.trial import Trial

from verl_multiturn.harnesses.ends import AgentFailedError, reward_of
from verl_multiturn.harnesses.harbor.trials.control_run import after_control, control_config
from verl_multiturn.harnesses.harbor.trials.end_cause import WORKSPACE, Lost, Phase, TrialEnd, TrialEvents, end_of
from verl_multiturn.harnesses.harbor.trials.engines import disk_problem, ensure_image, kill_container, lost_container

_CLEANING_S = 6.0
"""Seconds before the session's end in which a trial that is late removes its environments."""
_PHASES: dict[TrialEvent, Phase] = {
    TrialEvent.ENVIRONMENT_START: "environment",
    TrialEvent.AGENT_START: "agent",
    TrialEvent.VERIFICATION_START: "verifier",
}


def run(row: Mapping[str, Any], session: Any) -> float:
    """Run one trial, and return its reward.

    Args:
        row: The row, in the module's form.
        session: Where the model is: `base_url`, `anthropic_base_url`, `api_key`, `deadline`.

    Raises:
        OutageError: The container engine does not answer.
        UnjudgedError: The trial came to no reward, for a cause of ours.
        AgentFailedError: The agent failed.
    """
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    addresses = {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": session.anthropic_base_url,
        "ANTHROPIC_API_KEY": session.api_key,
    }
    return reward_of(asyncio.run(judge(row, addresses, session.deadline)))


async def judge(row: Mapping[str, Any], addresses: Mapping[str, str], deadline: float | None) -> TrialEnd:
    """Run one trial, and where that is needed the control of its verifier; return how the session ends.

    Args:
        row: In the module's form.
        addresses: Environment variables of the harness.
        deadline: When the session's time is up, as `time.monotonic()` counts it.
    """
    config = trial_config(row, addresses)
    folder = config.trials_dir / config.trial_name
    try:
        end = end_of(await _story(config, deadline))
        return await after_control(end, lambda: _story(control_config(config, folder), deadline))
    finally:
        if not row["settings"].get("keep_trials"):
            shutil.rmtree(folder, ignore_errors=True)


def trial_config(row: Mapping[str, Any], addresses: Mapping[str, str]) -> TrialConfig:
    """Return the trial's configuration in Harbor's words."""
    settings = row["settings"]
    harness, environment = str(settings["harness"]), str(settings["environment"])
    by_path = {"import_path": WORKSPACE} if environment == "workspace" else {"import_path": environment}
    return TrialConfig.model_validate(
        {
            "task": row["task"],
            "trial_name": row["trial"],
            "trials_dir": row["folder"],
            "agent": {
                **({"import_path": harness} if ":" in harness else {"name": harness}),
                "model_name": settings["model"],
                "kwargs": settings["harness_kwargs"],
                "env": dict(addresses),
            },
            "environment": {
                **({"type": environment} if environment in set(EnvironmentType) else by_path),
                "kwargs": settings["environment_kwargs"],
            },
        }
    )


async def _story(config: TrialConfig, deadline: float | None) -> TrialEvents:
    """Run a trial, and return its events."""
    watch = _TrialLog()
    left_s = None if deadline is None else max(0.0, deadline - time.monotonic() - _CLEANING_S)
    late, error, result = False, "", None
    try:
        trial = await Trial.create(config)
        watch.follow(trial, deadline)
        try:
            async with asyncio.timeout(left_s) as limit:
                result = await trial.run()
        except TimeoutError:
            if not limit.expired():
                raise
            late, error = True, "the session's time was up"
    except Exception as raised:  # whatever Harbor could not handle
        error = f"{type(raised).__name__}: {raised}"
    finally:
        watch.release()
    if result is not None and (info := result.exception_info) is not None:
        error = f"{info.exception_type}: {info.exception_message}"
    verified = result.verifier_result if result is not None else None
    return TrialEvents(
        phase="over" if result is not None and not error else watch.phase,
        error=error[-2_000:],
        agent_failed=watch.agent_failed,
        not_started=watch.not_started[-2_000:],
        agent_lost=watch.agent_lost,
        verifier_lost=watch.verifier_lost,
        rewards=verified.rewards if verified is not None else None,
        late=late,
    )


class _TrialLog:
    """Notes the events of a trial: its phases, whether environments start, and in which state they are stopped.

    Harbor reports one error and not where it arose. So the methods `start`, `stop` and `stop_service` of the
    environment's class are wrapped, as long as the trial runs; this process has no other trial.
    """

    def __init__(self) -> None:
        self.phase: Phase = "environment"
        self.not_started = ""
        self.agent_failed = False
        self.agent_lost: Lost = ""
        self.verifier_lost: Lost = ""
        self._restore: list[Callable[[], None]] = []

    def follow(self, trial: Trial, deadline: float | None) -> None:
        """Begin to watch a trial that has not started."""
        for event, phase in _PHASES.items():
            trial.add_hook(event, self._noting(phase))
        environment, agent = trial.agent_environment, trial.agent
        kind = type(environment)
        start, stop, stop_service, setup, run = kind.start, kind.stop, kind.stop_service, agent.setup, agent.run
        ended: list[BaseEnvironment] = []

        async def watched_start(self_: BaseEnvironment, *args: Any, **kwargs: Any) -> None:
            try:
                await self._prepare(self_)
                await start(self_, *args, **kwargs)
            except BaseException as error:  # the reason is kept, and it goes on to Harbor
                self.not_started = self.not_started or f"{type(error).__name__}: {error}"
                raise

        async def note_end(self_: BaseEnvironment) -> None:
            if any(each is self_ for each in ended):  # an environment that Harbor itself has ended since is not lost
                return
            lost = "" if self.not_started else await _lost(self_)
            ended.append(self_)
            if self_ is environment:
                self.agent_lost = lost
            else:
                self.verifier_lost = self.verifier_lost or lost

        async def watched_stop_service(self_: BaseEnvironment, *args: Any, **kwargs: Any) -> None:
            await note_end(self_)
            await stop_service(self_, *args, **kwargs)

        async def watched_stop(self_: BaseEnvironment, *args: Any, **kwargs: Any) -> None:
            await note_end(self_)
            if isinstance(self_, DockerEnvironment) and not self_.auto_mounting and not self_.stream_enabled:
                await asyncio.to_thread(kill_container, *_engine_and_project(self_))
            await stop(self_, *args, **kwargs)

        async def watched_setup(*args: Any, **kwargs: Any) -> None:
            self.phase = "setup"
            await setup(*args, **kwargs)

        async def watched_run(*args: Any, **kwargs: Any) -> None:
            left_s = None if deadline is None else deadline - time.monotonic() - _CLEANING_S
            if left_s is not None:  # the verifier's time is kept for it, but never more than half
                left_s = max(left_s - trial.verifier_timeout_sec, left_s / 2)
            self.agent_failed = True
            try:
                await asyncio.wait_for(run(*args, **kwargs), left_s)
            except TimeoutError as error:  # Harbor would have the work there scored
                raise AgentFailedError(f"late: {error}") from error
            except Exception as error:  # any fault of an agent is the agent's
                raise AgentFailedError(f"{type(error).__name__}: {error}") from error
            self.agent_failed = False

        watched = {"start": watched_start, "stop": watched_stop, "stop_service": watched_stop_service}
        self._restore = [partial(setattr, kind, name, getattr(kind, name)) for name in watched]
        for name, method in watched.items():
            setattr(kind, name, method)
        agent.setup, agent.run = watched_setup, watched_run

    def release(self) -> None:
        """Take back the changes of `follow`."""
        while self._restore:
            self._restore.pop()()

    def _noting(self, phase: Phase) -> Callable[[Any], Awaitable[None]]:
        async def note(event: Any) -> None:
            self.phase = phase

        return note

    async def _prepare(self, environment: BaseEnvironment) -> None:
        """Look at the disk, and get the image once for this node, for its first user."""
        if not isinstance(environment, DockerEnvironment):
            return
        engine = type(environment).runtime().engine[0]
        if problem := await asyncio.to_thread(disk_problem, engine):
            raise RuntimeError(problem)
        if image := environment.task_env_config.docker_image:
            await asyncio.to_thread(ensure_image, engine, image)


async def _lost(environment: BaseEnvironment) -> Lost:
    """Return who ended an environment that is about to be stopped."""
    if getattr(environment, "lost", ""):  # our workspace: only a process in it can end it
        return "inside"
    if not isinstance(environment, DockerEnvironment):
        return ""
    return await asyncio.to_thread(lost_container, *_engine_and_project(environment))


def _engine_and_project(environment: DockerEnvironment) -> tuple[str, str]:
    """Return the engine's program, and the name of the project of an environment's containers."""
    engine: str = type(environment).runtime().engine[0]
    return engine, _sanitize_docker_compose_project_name(environment.session_id)

"""`HarborRunner`: a trial of Harbor for each session, in processes of Harbor's own Python (`trial.py`).

Invariants:
- a trial's containers are removed when its session ends, however it ends; those of a worker that was killed are removed
  by the next runner on the machine;
- the folder of the trials is removed with the runner, unless `keep_trials` names one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.config import PATH, HarborSettings
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.harbor.trials.definition import read_definition
from verl_multiturn.harnesses.harbor.trials.engines import ENGINES, sweep
from verl_multiturn.harnesses.own_python import check_in
from verl_multiturn.harnesses.owners import owner
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.agents.end import AgentEnd
from verl_multiturn.proxy.agents.process_runner import ProcessRunner

logger = logging.getLogger(__name__)

TRIAL = "verl_multiturn.harnesses.harbor.trials.trial:run"
"""The agent, in Harbor's Python."""
_CHECK = "verl_multiturn.harnesses.harbor.trials.settings_check"
_WHERE = f"{PATH}.proxy"
_NUMBERS = itertools.count()
"""Numbers of the trials of this process: no two have the same name."""
_KEYS = frozenset({"path", "name", "ref", "git_url", "git_commit_id"})
_SHARED = (
    "a task is judged where its agent worked: %s says no `[verifier] environment_mode = 'separate'`. Of 80 attacks on "
    "one repository, judging in the agent's own sandbox paid 36, and judging changed sources in a fresh one 2; see "
    "docs/write/harbor.md"
)
INSTALL = "run `verl-multiturn install harbor DIR`, and name DIR/bin/python"
"""Remedy where Harbor's Python is missing."""


class HarborRunner:
    """Runs trials.

    Args:
        settings: The bridge's settings.
        python: Harbor's interpreter.
    """

    stuck = 0
    """No process ever remains."""

    def __init__(self, settings: HarborSettings, python: str) -> None:
        self._settings = settings
        self._runner = ProcessRunner(TRIAL, None, f"{_WHERE}.agent", python)
        self._folder: str | None = None
        self._engine = settings.environment if settings.environment in ENGINES else None
        self._swept: asyncio.Future[int] | None = None
        self._has_warned = False

    async def run(
        self,
        row: Mapping[str, Any],
        address: SessionAddress,
        time_up: asyncio.Event,
        returned: Callable[[], None] | None = None,
    ) -> AgentEnd:
        """Run a trial for one session, as in `AgentRunner.run`.

        Raises:
            ConfigError: The row names no task.
        """
        task = task_of(row)
        self._look_at(task)
        if self._engine is not None:  # the remains of killed workers would use up memory and disk
            if self._swept is None:
                self._swept = asyncio.ensure_future(asyncio.to_thread(sweep, self._engine))
            await asyncio.shield(self._swept)
        if self._folder is None:
            self._folder = self._settings.keep_trials or tempfile.mkdtemp(prefix="verl-multiturn-trials-")
        name = f"{owner()}{next(_NUMBERS)}"
        request = {
            "task": task,
            "trial": name,
            "folder": self._folder,
            "settings": self._settings.model_dump(mode="json"),
        }
        ended = False
        try:
            end = await self._runner.run(request, address, time_up, returned)
            ended = end.kind in ("returned", "raised")
            return end
        finally:
            if not ended:  # the process was killed, and could not clean up
                if self._engine is not None:
                    await asyncio.to_thread(sweep, self._engine, name + "_")
                if self._settings.keep_trials is None:
                    await asyncio.to_thread(shutil.rmtree, Path(self._folder) / name, ignore_errors=True)

    async def aclose(self) -> None:
        """End the rest."""
        await self._runner.aclose()
        if self._engine is not None and self._swept is not None:
            await asyncio.to_thread(sweep, self._engine, owner())
        if self._folder is not None and self._settings.keep_trials is None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _look_at(self, task: Mapping[str, Any]) -> None:
        """Refuse a task that needs an image where there is none, and warn once of one scored where its agent worked.

        Raises:
            ConfigError: The environment is a workspace, and the task needs an image.
        """
        folder = Path(str(task.get("path", "")))
        if "git_url" in task or not (folder / "task.toml").is_file():  # Harbor fetches it
            return
        try:
            described = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{str(folder / 'task.toml')!r} cannot be read: {error}; mend it") from None
        if self._settings.environment == "workspace":
            given = described.get("environment", {})
            read_definition(folder / "environment", given.get("docker_image"), workdir=given.get("workdir"))
        verifier = described.get("verifier", {})
        if not self._has_warned and verifier.get("environment_mode") != "separate" and "environment" not in verifier:
            self._has_warned = True
            logger.warning(_SHARED, folder / "task.toml")


def task_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task that a data row names, in Harbor's words.

    Args:
        row: The row: its `extra_info.harbor` is the task's folder, or a mapping as `TrialConfig.task` of Harbor has it.

    Raises:
        ConfigError: It names none.
    """
    named = (row.get("extra_info") or {}).get("harbor")
    task = {"path": named} if isinstance(named, str) else named
    if not isinstance(task, Mapping) or not task.keys() <= _KEYS or not ("path" in task or "name" in task):
        raise ConfigError(
            f"extra_info.harbor of a data row is {show(named, 200)}, expected a task's folder, or a mapping with "
            f"'path' or 'name' and no other keys than {sorted(_KEYS)}; prepare the rows anew"
        )
    if "path" in task and "git_url" not in task:
        folder = Path(task["path"]).expanduser().resolve()
        if not (folder / "task.toml").is_file():
            raise ConfigError(
                f"extra_info.harbor of a data row is {show(named, 200)}, and {str(folder)!r} has no task.toml; give a "
                "folder that every node has"
            )
        return {**task, "path": str(folder)}
    return dict(task)


def check_harbor(settings: HarborSettings, python: str) -> None:
    """Check, in Harbor's Python, that it knows the harness and the environment, and that these work here.

    Args:
        settings: The bridge's settings.
        python: Harbor's interpreter.

    Raises:
        ConfigError: Something is missing, unknown, or does not fit.
    """
    check_in(python, _CHECK, settings.model_dump(mode="json"), "harbor", INSTALL)

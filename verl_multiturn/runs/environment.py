"""The environment of a run's processes, and how they are started: as new ones, or as forks of one."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from verl_multiturn.cpu_processes.forkserver import ADDRESS
from verl_multiturn.runs.bytecode import bytecode_variables
from verl_multiturn.runs.plan import RunPlan
from verl_multiturn.runs.ray_start import joins_cluster
from verl_multiturn.runs.threads import thread_variables

PPO = "verl.trainer.main_ppo"
"""Module of verl's PPO trainer."""


def python() -> str:
    """Return the Python of a run's processes."""
    return os.environ.get("PYTHON") or sys.executable


def is_on_cpu(plan: RunPlan, config: Mapping[str, Any]) -> bool:
    """Return whether a recipe is one for CPUs, by itself or as a smoke run.

    Args:
        plan: The planned run.
        config: Its composed configuration.
    """
    return plan.smoke or bool(config["recipe"]["on_cpu"])


def environment_of(plan: RunPlan, config: Mapping[str, Any]) -> dict[str, str]:
    """Return all environment variables of a recipe's processes.

    Args:
        plan: The planned run.
        config: Its composed configuration.
    """
    # Unbuffered: the log has the lines of both streams in their order, and the last lines of a process that dies.
    environment = {"PYTHONUNBUFFERED": "1", "RAY_DEDUP_LOGS": "0", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    environment.pop(ADDRESS, None)  # of a server that this process was forked from
    environment |= bytecode_variables(environment)
    # A letter that a log or a terminal cannot show ends no process.
    encoding = environment.get("PYTHONIOENCODING", "")
    environment["PYTHONIOENCODING"] = encoding if ":" in encoding else f"{encoding}:backslashreplace"
    # A YAML of a recipe names its own classes: `recipes.NAME.module.Class`.
    listed = [str(plan.root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(listed)
    if is_on_cpu(plan, config):
        environment.setdefault("VERL_PLATFORM", "cpu")
        environment["RAY_ADDRESS"] = "local"  # do not join a Ray cluster that already runs
        environment |= thread_variables(config, environment)
    return environment


def is_forked(config: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Return whether the driver and the workers of a run are forked from one process: on a CPU, with this Python.

    Where the run joins a cluster, or names an executable of its own, its processes are started in that way.

    Args:
        config: The composed configuration.
        environment: The environment variables of the run's processes.
    """
    if config["recipe"]["trainer"] != PPO or environment.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        return False
    ray_init = (config.get("ray_kwargs") or {}).get("ray_init") or {}
    own = (ray_init.get("runtime_env") or {}).get("py_executable")
    return own is None and not joins_cluster(ray_init, environment) and shutil.which(python()) == sys.executable

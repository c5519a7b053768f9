"""One run of a recipe: preparing the rows, verl's trainer in a separate process, the display and the final report."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.config import PATH, check_place, read_settings
from verl_multiturn.cpu_processes.handle import ForkServer
from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.checkpoint_evaluations import has_left, worker_command
from verl_multiturn.runs.compose import compose_run, resolved
from verl_multiturn.runs.data import check_seed
from verl_multiturn.runs.environment import PPO, environment_of, is_forked, is_on_cpu, python
from verl_multiturn.runs.plan import RunPlan
from verl_multiturn.runs.processes import fork_server, interruptible, run_watched
from verl_multiturn.runs.progress import say
from verl_multiturn.runs.ray_start import require_places
from verl_multiturn.runs.rows import prepare_data
from verl_multiturn.runs.run_folder import OwnFiles, RunFolder, require_folder
from verl_multiturn.runs.training import Training, stop_line

_DRY_START = "verl_multiturn.verl_bridge.startup.dry_start"


Check = Callable[[RunPlan, Any, OwnFiles], None]
"""Refuses a planned run by its composed configuration.

The third argument: whether the run has made the files in its own folder.
"""


def run_recipe(plan: RunPlan, *, only_prepare: bool = False, check: Check | None = None) -> int:
    """Prepare the data, train and report, and return the exit status.

    When the training succeeds, or stopped at SIGUSR1, the last printed line is a JSON object. The exit
    status is 130 for a run that was interrupted.

    Args:
        plan: The planned run.
        only_prepare: Whether to stop when the data is prepared.
        check: Called before the rows are made, and again when they are there; None: the start alone checks.

    Raises:
        ConfigError: The configuration cannot work, a folder cannot be used, or another run uses it.
    """
    try:
        with interruptible():
            return _run(plan, only_prepare, check)
    except KeyboardInterrupt:
        say("interrupted; the processes of the run were ended")
        return 130


def _run(plan: RunPlan, only_prepare: bool, check: Check | None) -> int:
    started = time.time()
    composed, config = _composed(plan)
    environment = environment_of(plan, config)
    with fork_server(environment, wanted=not only_prepare and is_forked(config, environment)) as server:
        _check(plan, composed, config, check, "later")
        return _start(plan, composed, config, environment, server, started, only_prepare, check)


def _start(
    plan: RunPlan,
    composed: Any,
    config: dict[str, Any],
    environment: dict[str, str],
    server: ForkServer | None,
    started: float,
    only_prepare: bool,
    check: Check | None,
) -> int:
    """Prepare the data, train and report."""
    command = [*trainer_command(config, only_prepare), *plan.words()]
    folder = RunFolder(Path(config["recipe"]["out"]), _node(config))
    if config["recipe"]["trainer"] == PPO and not only_prepare:
        require_places((config.get("ray_kwargs") or {}).get("ray_init") or {}, environment)
    try:
        with folder.held() as lock:
            if status := prepare_data(plan, config, folder, environment, lock):
                return status
            if only_prepare:
                return 0
            if check is not None:
                check(plan, composed, "there")
            folder.begin(plan.name, plan.smoke, config["trainer"], resumes=_resumes_from_path(config))
            return _train(command, config, folder, environment, started, lock, server)
    except OSError as error:
        raise ConfigError(f"{folder.path}: {error}") from None


def _resumes_from_path(config: Mapping[str, Any]) -> bool:
    """Return whether the trainer resumes from the checkpoint that `trainer.resume_from_path` names."""
    trainer = config["trainer"]
    mode = trainer.get("resume_mode", "auto")
    # verl's SFT trainer takes the path in the mode `auto`, too; the PPO trainer does not.
    is_sft = config["recipe"]["trainer"] != PPO
    return bool(mode == "resume_path" or (is_sft and mode == "auto" and trainer.get("resume_from_path")))


def trainer_command(config: Mapping[str, Any], only_prepare: bool = False) -> list[str]:
    """Return the command that starts a recipe's trainer, without the trainer's own arguments.

    For verl's PPO trainer, Python starts one process. For other trainers (SFT), torchrun starts one process per GPU.
    With several nodes, torchrun takes its place among them from NODE_RANK, MASTER_ADDR and MASTER_PORT (29500 if
    unset).

    Args:
        config: The composed configuration.
        only_prepare: Whether no trainer will be started. NODE_RANK and MASTER_ADDR may then be unset; the command has
            their names in place of their values.

    Raises:
        ConfigError: `trainer.nnodes` of a torchrun trainer is not a number, or there are several nodes and NODE_RANK
            or MASTER_ADDR is not set.
    """
    recipe, trainer = config["recipe"], config["trainer"]
    if recipe["trainer"] == PPO:
        return [python(), "-m", PPO]
    nodes = trainer["nnodes"]
    if not isinstance(nodes, int):
        raise ConfigError(f"trainer.nnodes={nodes}: expected a number")
    where = ["--standalone"]
    if nodes > 1:
        rank, head = os.environ.get("NODE_RANK") or "NODE_RANK", os.environ.get("MASTER_ADDR") or "MASTER_ADDR"
        if (rank == "NODE_RANK" or head == "MASTER_ADDR") and not only_prepare:
            raise ConfigError(
                f"trainer.nnodes={nodes}, but NODE_RANK or MASTER_ADDR is not set; start it on each node with "
                "NODE_RANK (0, 1, …) and MASTER_ADDR (the address of node 0)"
            )
        port = os.environ.get("MASTER_PORT", "29500")
        where = [f"--nnodes={nodes}", f"--node-rank={rank}", f"--master-addr={head}", f"--master-port={port}"]
    torchrun = [python(), "-m", "torch.distributed.run", *where, f"--nproc-per-node={trainer['n_gpus_per_node']}"]
    return [*torchrun, "-m", recipe["trainer"]]


def dry_start(plan: RunPlan, check: Check | None = None) -> tuple[int, str, str]:
    """Start verl's trainer up to where it would begin, without Ray, and return exit status, output and errors.

    Args:
        plan: The planned run.
        check: Called before; None: nothing but the launcher's own checks.

    Raises:
        ConfigError: The configuration cannot work.
    """
    config = run_configuration(plan, check, "maybe")
    if config["recipe"]["trainer"] != PPO:
        raise ConfigError(
            f"--check looks at runs of {PPO}, and this recipe's trainer is {config['recipe']['trainer']}; use --print"
        )
    environment = environment_of(plan, config)
    if not is_on_cpu(plan, config):  # a machine without GPUs may check the run of one with GPUs
        environment.setdefault("VERL_PLATFORM", "nvidia")
    with tempfile.TemporaryDirectory(prefix="verl-multiturn-check-") as folder:
        words = [*plan.words(), f"hydra.run.dir={folder}", "hydra.output_subdir=null"]
        done = subprocess.run(
            [python(), "-m", _DRY_START, *words],
            env=environment,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    return done.returncode, done.stdout, done.stderr


def shown_command(plan: RunPlan, check: Check | None = None) -> str:
    """Return the command that starts the trainer as text for a shell, without starting anything.

    Args:
        plan: The planned run.
        check: Called before; None: nothing but the launcher's own checks.

    Raises:
        ConfigError: The configuration cannot work.
    """
    config = run_configuration(plan, check)
    trainer, words = trainer_command(config, only_prepare=True), plan.words()
    environment = environment_of(plan, config)
    environment["VERL_FILE_LOGGER_PATH"] = str(RunFolder(Path(config["recipe"]["out"])).next_metrics())
    variables = [f"{key}={shlex.quote(value)}" for key, value in environment.items() if os.environ.get(key) != value]
    begun = shlex.join([*trainer, *words[:4]])  # the first four words end with the configuration's name
    return " \\\n    ".join([*variables, begun, *map(shlex.quote, words[4:])])


def run_configuration(plan: RunPlan, check: Check | None = None, own_files: OwnFiles = "later") -> dict[str, Any]:
    """Return the composed configuration of a run, in which our own settings were checked as a worker will read them.

    Args:
        plan: The planned run.
        check: A further check.
        own_files: Whether the run has made the files in its own folder; for the check.

    Raises:
        ConfigError: The configuration cannot work.
    """
    composed, config = _composed(plan)
    _check(plan, composed, config, check, own_files)
    return config


def _composed(plan: RunPlan) -> tuple[Any, dict[str, Any]]:
    """Return the composed configuration of a run as Hydra's, and as plain values whose sections are there."""
    composed = compose_run(plan)
    config = resolved(composed)
    for section in ("recipe", "data", "trainer"):
        if not isinstance(config.get(section), Mapping):
            raise ConfigError(f"the configuration has no section {section!r}; leave it in")
    if not isinstance(on_cpu := config["recipe"].get("on_cpu", False), bool):
        raise ConfigError(f"recipe.on_cpu={on_cpu!r}: expected true or false; write recipe.on_cpu=True or =False")
    return composed, config


def _check(plan: RunPlan, composed: Any, config: dict[str, Any], check: Check | None, own_files: OwnFiles) -> None:
    """Check a composed configuration without importing verl."""
    check_place(config)
    read_settings(_our_settings(config))
    steps, out = config["trainer"].get("total_training_steps"), str(config["recipe"].get("out") or "")
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ConfigError(f"trainer.total_training_steps={steps}: expected a number of steps, or null")
    if (seed := config["recipe"].get("seed")) is not None:
        check_seed(seed, f"recipe.seed={seed!r}")
    if not out.strip():
        raise ConfigError("recipe.out is empty; expected the folder of this run")
    if Path(out) != plan.out:  # `plan_run` has checked its own
        require_folder(Path(out), f"recipe.out={out!r}")
    if config["recipe"]["trainer"] != PPO and _our_settings(config) is not None:
        raise ConfigError(
            f"settings of {PATH} have no effect: the trainer {config['recipe']['trainer']} holds no conversations; "
            "leave them out"
        )
    if check is not None:
        check(plan, composed, own_files)


def _our_settings(config: Mapping[str, Any]) -> Any:
    """Return the section `custom.multiturn` of the rollout; None in a configuration without one, as that of an SFT."""
    custom = config.get("actor_rollout_ref", {}).get("rollout", {}).get("custom")
    return custom.get("multiturn") if isinstance(custom, Mapping) else None  # the start-up check refuses other values


def _node(config: Mapping[str, Any]) -> int:
    """Return the number of this node in a run that is started once on each node; 0 for other runs."""
    rank = os.environ.get("NODE_RANK", "0")
    return int(rank) if config["recipe"]["trainer"] != PPO and rank.isdigit() and config["trainer"]["nnodes"] > 1 else 0


def _train(
    command: list[str],
    config: Mapping[str, Any],
    folder: RunFolder,
    environment: dict[str, str],
    started: float,
    lock: int,
    server: ForkServer | None,
) -> int:
    recipe, out = config["recipe"], folder.path
    metrics = folder.next_metrics()
    environment["VERL_FILE_LOGGER_PATH"] = str(metrics)
    is_ppo = recipe["trainer"] == PPO
    end = Training(command, config, folder, metrics, _records(config), is_ppo).run(environment, started, lock, server)
    if end.status != 0:
        return end.status
    if is_ppo:
        noted = {"started": started, "seconds": end.seconds, "seed": config["data"].get("seed")}
        (out / "start_up.json").write_text(json.dumps(noted) + "\n", encoding="utf-8")
    if end.stopped is not None:
        say(f"stopped as asked; {end.stopped.said}")
        say(stop_line(end.stopped, out))
        return 0
    if is_ppo and not (metrics.is_file() and metrics.stat().st_size):
        # Without verl's file logger there are no metrics to report.
        say(json.dumps({"recipe": out.name, "metrics": None, "out": str(out)}))
        return 0
    if has_left(out) and not end.was_asked:
        say("checkpoints whose evaluation the training did not wait for; Ctrl-C leaves them")
        run_watched(worker_command(out), environment, lock=lock)
    status = run_watched([python(), recipe["report"], str(out)], environment, lock=lock)
    return status if status >= 0 else 1


def _records(config: Mapping[str, Any]) -> Path | None:
    """Return the folder of the conversations' records; None: the run writes none."""
    folder = (_our_settings(config) or {}).get("record_dir")
    return None if folder is None else Path(folder)

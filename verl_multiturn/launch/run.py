"""One run of a recipe: preparing the rows, verl's trainer in a separate process, the display and the final report."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from verl_multiturn.errors import ConfigError
from verl_multiturn.launch.compose import compose_launch, resolved
from verl_multiturn.launch.plan import RunPlan
from verl_multiturn.launch.processes import run_watched
from verl_multiturn.observe.metric_files import metric_files
from verl_multiturn.observe.progress import Display
from verl_multiturn.observe.start_up import StartUp

_PPO = "verl.trainer.main_ppo"
_CHECKPOINT = "latest_checkpointed_iteration.txt"
_TAIL = 40
"""Number of the log's last lines that are shown when a run failed."""


def run_recipe(launch: RunPlan, *, only_prepare: bool = False) -> int:
    """Prepare the data, train and report, and return the exit status.

    When the training succeeds, the last printed line is a JSON object. The exit status is 130 for a run that was
    interrupted.

    Args:
        launch: The planned run.
        only_prepare: Whether to stop when the data is prepared.

    Raises:
        ConfigError: The configuration cannot work. Nothing was written.
    """
    started = time.time()
    config = resolved(compose_launch(launch))
    command = [*trainer_command(config, only_prepare), *launch.words()]
    out = Path(config["recipe"]["out"])
    environment = _environment(launch, config)
    if status := _prepare_data(launch, config, environment):
        return status
    if only_prepare:
        return 0
    if _begins_anew(launch, config):
        _forget(out)
    return _train(command, config, environment, started)


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
    if recipe["trainer"] == _PPO:
        return [_python(), "-m", _PPO]
    nodes = trainer["nnodes"]
    if not isinstance(nodes, int):
        raise ConfigError(f"trainer.nnodes={nodes}: expected a number")
    where = ["--standalone"]
    if nodes > 1:
        rank, head = os.environ.get("NODE_RANK") or "NODE_RANK", os.environ.get("MASTER_ADDR") or "MASTER_ADDR"
        if (rank == "NODE_RANK" or head == "MASTER_ADDR") and not only_prepare:
            raise ConfigError(
                f"trainer.nnodes={nodes}: start it on each node with NODE_RANK (0, 1, ...) and MASTER_ADDR set"
            )
        port = os.environ.get("MASTER_PORT", "29500")
        where = [f"--nnodes={nodes}", f"--node-rank={rank}", f"--master-addr={head}", f"--master-port={port}"]
    torchrun = [_python(), "-m", "torch.distributed.run", *where, f"--nproc-per-node={trainer['n_gpus_per_node']}"]
    return [*torchrun, "-m", recipe["trainer"]]


def shown_command(launch: RunPlan) -> str:
    """Return the command that starts the trainer as text for a shell, without starting anything.

    Args:
        launch: The planned run.

    Raises:
        ConfigError: The configuration cannot work.
    """
    config = resolved(compose_launch(launch))
    trainer, words = trainer_command(config, only_prepare=True), launch.words()
    on_cpu = "VERL_PLATFORM=cpu " if _is_on_cpu(launch, config) else ""
    begun = on_cpu + shlex.join([*trainer, *words[:4]])  # the first four words end with the configuration's name
    return " \\\n    ".join([begun, *map(shlex.quote, words[4:])])


def _python() -> str:
    return os.environ.get("PYTHON") or sys.executable


def _is_on_cpu(launch: RunPlan, config: Mapping[str, Any]) -> bool:
    return launch.smoke or bool(config["recipe"]["on_cpu"])


def _environment(launch: RunPlan, config: Mapping[str, Any]) -> dict[str, str]:
    # Unbuffered: the log has the lines of both streams in their order, and the last lines of a process that dies.
    environment = {"PYTHONUNBUFFERED": "1", "RAY_DEDUP_LOGS": "0", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    if _is_on_cpu(launch, config):
        environment.setdefault("VERL_PLATFORM", "cpu")
        environment["RAY_ADDRESS"] = "local"  # do not join a Ray cluster that already runs
    return environment


def _prepare_data(launch: RunPlan, config: Mapping[str, Any], environment: Mapping[str, str]) -> int:
    """Run the script that writes the rows, and return its exit status.

    Existing rows are used again, unless they were made with other options. A smoke run and a run with data of the
    user's always write new rows.
    """
    recipe = config["recipe"]
    out = Path(recipe["out"])
    words = prepare_words(recipe)
    made, wanted = out / "data" / ".prepared", " ".join([*(["--smoke"] if launch.smoke else []), *words]) + "\n"
    is_there = (out / "data" / "train.parquet").is_file() and (not made.is_file() or made.read_text() == wanted)
    if is_there and not launch.smoke and launch.data is None:
        return 0
    out.mkdir(parents=True, exist_ok=True)
    command = [_python(), recipe["prepare_data"], "--out", str(out / "data")]
    command += ["--smoke"] if launch.smoke else []
    command += ["--tools", recipe["tools"]] if recipe["tools"] else []
    command += [*words, *(["--source", launch.data] if launch.data is not None else [])]
    if status := subprocess.run(command, env=environment, check=False).returncode:
        return status
    made.parent.mkdir(exist_ok=True)
    made.write_text(wanted)
    return 0


def prepare_words(recipe: Mapping[str, Any]) -> list[str]:
    """Return a recipe's own options for its script that writes the rows.

    Example: `{"no-tool": True, "splits": ["a", "b"]}` returns `["--no-tool", "--splits", "a", "b"]`.

    Args:
        recipe: The section `recipe` of the composed configuration. An option in its `prepare` that is None or False is
            left out.
    """
    words: list[str] = []
    for key, value in recipe["prepare"].items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{key}", *map(str, values)]
    return words


def _begins_anew(launch: RunPlan, config: Mapping[str, Any]) -> bool:
    """Return whether to delete the log, metrics and records of an earlier run in the same folder.

    A run on a CPU takes minutes and starts from the beginning, unless it has a checkpoint from which verl resumes.
    """
    resumes = config["trainer"].get("resume_mode", "auto") != "disable"
    checkpoint = Path(config["recipe"]["out"]) / "checkpoints" / _CHECKPOINT
    return _is_on_cpu(launch, config) and not (resumes and checkpoint.is_file())


def _forget(out: Path) -> None:
    for path in [*metric_files(out), out / "train.log"]:
        path.unlink(missing_ok=True)
    for name in ("records", "validation"):
        shutil.rmtree(out / name, ignore_errors=True)


def _train(command: list[str], config: Mapping[str, Any], environment: dict[str, str], started: float) -> int:
    recipe, out, console = config["recipe"], Path(config["recipe"]["out"]), Console()
    log, metrics = out / "train.log", _next_metrics(out)
    environment["VERL_FILE_LOGGER_PATH"] = str(metrics)
    start_up = StartUp(started) if recipe["trainer"] == _PPO else None
    display = Display(log, metrics, _records(config), config["trainer"]["total_training_steps"], console, start_up)
    console.print(f"log: {log}", soft_wrap=True, highlight=False, markup=False)
    try:
        status = run_watched(command, environment, log, display.show_while)
    except KeyboardInterrupt:
        console.print("interrupted; every process of the run was stopped")
        return 130
    if status != 0:
        lines = log.read_text(errors="replace").splitlines()
        console.print("\n".join(lines[-_TAIL:]), markup=False, highlight=False, soft_wrap=True)
        doing = "training" if start_up is None else start_up.doing
        print(f"the trainer ended with exit status {status} while {doing}; whole log: {log}")
        return status if status > 0 else 1
    if start_up is not None:
        (out / "start_up.json").write_text(json.dumps({"started": started, "seconds": start_up.seconds}) + "\n")
    if start_up is not None and not metric_files(out):
        # Without verl's file logger there are no metrics to report.
        print(json.dumps({"recipe": out.name, "metrics": None, "out": str(out)}))
        return 0
    return subprocess.run([_python(), recipe["report"], str(out)], env=environment, check=False).returncode


def _records(config: Mapping[str, Any]) -> Path | None:
    """Return the folder of the conversations' records; None: the run writes none."""
    custom = config.get("actor_rollout_ref", {}).get("rollout", {}).get("custom") or {}
    folder = (custom.get("multiturn") or {}).get("record_dir")
    return None if folder is None else Path(folder)


def _next_metrics(out: Path) -> Path:
    """Return the file for the metrics of this start of the run.

    verl's logger empties its file at the start. So a resumed run gets a new file and keeps the files of its earlier
    starts (`observe/metric_files.py` reads them all).
    """
    path, start = out / "metrics.jsonl", 1
    while path.is_file() and path.stat().st_size:
        start += 1
        path = out / f"metrics.{start}.jsonl"
    return path

"""Train the quickstart: start verl's own trainer, show its progress, and sum the run up.

    bash scripts/quickstart.sh [--seed N] [--steps N] [--out DIR] [any.verl.override=value …]

The trainer is `python -m verl.trainer.main_ppo`, unchanged, in a process group of its own; whatever it starts is gone
when this program ends, also after Ctrl-C, SIGTERM or a closed terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from start_up import StartUp
from summary import ACCURACY, REWARD, StepRecords, summarize

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_MARK = "VERL_MULTITURN_RUN"


def trainer_command(args: argparse.Namespace) -> list[str]:
    """verl's trainer with the quickstart's settings; the user's overrides come last and win."""
    data, out = args.out / "data", args.out
    rollout = "actor_rollout_ref.rollout"
    actor = "actor_rollout_ref.actor"
    settings: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": data / "train.parquet",
        "data.val_files": data / "test.parquet",
        "data.train_batch_size": 16,
        "data.max_prompt_length": 320,
        "data.max_response_length": 128,
        "data.truncation": "error",
        "data.return_raw_chat": True,
        "data.seed": args.seed,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": HERE / "model",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.optim.lr": 2e-4,
        f"{actor}.ppo_mini_batch_size": 16,
        f"{actor}.ppo_micro_batch_size_per_gpu": 64,
        f"{actor}.use_kl_loss": False,
        f"{actor}.entropy_coeff": 0,
        f"{actor}.data_loader_seed": args.seed,
        f"{actor}.fsdp_config.seed": args.seed,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        # The same precision on both sides: their probabilities then agree to some 1e-6.
        f"{actor}.fsdp_config.dtype": "float32",
        f"+{actor}.fsdp_config.mixed_precision": "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
        f"{rollout}.dtype": "float32",
        f"{rollout}.name": "sglang_async",
        f"{rollout}.load_format": "auto",
        f"{rollout}.n": 8,
        f"{rollout}.gpu_memory_utilization": 0.8,  # of what is free while it starts; max_total_tokens is the bound
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 128,
        f"{rollout}.multi_turn.enable": True,
        f"{rollout}.multi_turn.tool_config_path": ROOT / "tool_configs" / "calculator.yaml",
        f"{rollout}.multi_turn.max_assistant_turns": 3,
        f"{rollout}.multi_turn.max_parallel_calls": 2,
        f"{rollout}.agent.default_agent_loop": "multiturn_agent",
        f"{rollout}.agent.num_workers": 1,
        f"+{rollout}.engine_kwargs.sglang.random_seed": args.seed,
        f"+{rollout}.custom.multiturn.record_dir": out / "records",
        "reward.custom_reward_function.path": HERE / "reward.py",
        "reward.custom_reward_function.name": "compute_score",
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.logger": "[console,file]",
        "trainer.project_name": "quickstart",
        "trainer.experiment_name": "quickstart",
        "trainer.total_training_steps": args.steps,
        "trainer.total_epochs": 1000,
        "trainer.save_freq": args.steps,  # the trained model, at the end
        "trainer.test_freq": max(1, args.steps // 4),
        "trainer.val_before_train": True,
        "trainer.default_local_dir": out / "checkpoints",
    }
    return [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        f"hydra.run.dir={out / 'hydra'}",
        *(f"{key}={value}" for key, value in settings.items()),
        *args.overrides,
    ]


def _is_alive(process: psutil.Process) -> bool:
    """Zombies are not: who adopted them may leave them for ever."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def stop_everything(mark: str, trainer: subprocess.Popen[bytes] | None) -> None:
    """End every process of the run: what bears its mark in its environment, what belongs to the trainer's session, and
    all descendants of either (a process that renames itself overwrites its environment). Asked first, then killed,
    until none is left."""
    session = trainer.pid if trainer is not None else -1
    known: set[psutil.Process] = set()

    def belongs(process: psutil.Process) -> bool:
        try:
            return process.environ().get(_MARK) == mark or os.getsid(process.pid) == session
        except (psutil.Error, ProcessLookupError):
            return False

    for attempt in range(6):
        found = {process for process in psutil.process_iter() if process.pid != os.getpid() and belongs(process)}
        for process in list(found | known):
            with contextlib.suppress(psutil.Error):
                found |= set(process.children(recursive=True))
        known = {process for process in known | found if _is_alive(process)}
        if not known:
            return
        for process in known:
            with contextlib.suppress(psutil.Error):
                process.terminate() if attempt == 0 else process.kill()
        psutil.wait_procs(list(known), timeout=5)


def follow(path: Path) -> Iterator[str]:
    """New whole lines of a growing file, at every call of `next` as many as there are; then an empty string."""
    position, rest = 0, ""
    while True:
        if path.exists():
            with path.open(encoding="utf-8", errors="replace") as file:
                file.seek(position)
                text = file.read()
                position = file.tell()
            *lines, rest = (rest + text).split("\n")
            yield from lines
        yield ""


def watch(
    trainer: subprocess.Popen[bytes], args: argparse.Namespace, console: Console, start_up: StartUp
) -> list[dict[str, Any]]:
    """Show the run while it lasts; the metrics of every logged step."""
    metrics: list[dict[str, Any]] = []
    log, logged = follow(args.out / "train.log"), follow(args.out / "metrics.jsonl")
    records = StepRecords(args.out / "records")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(start_up.doing, total=args.steps)
        running = True
        while running:
            running = trainer.poll() is None
            for line in iter(lambda: next(log), ""):
                start_up.see(line)
            if not start_up.is_over:
                start_up.look_for_conversations(args.out / "records")
                progress.update(bar, description=start_up.doing)
            for line in iter(lambda: next(logged), ""):
                entry = json.loads(line)
                metrics.append(entry)
                step, data = entry["step"], entry["data"]
                if REWARD in data:
                    progress.update(bar, completed=step, description="training")
                    rate = records.calls_per_trajectory(step)
                    console.print(
                        f"step {step:3d}  reward {data[REWARD]:.3f}  calls/trajectory {rate:.2f}  "
                        f"{data['timing_s/step']:.1f} s"
                    )
                if ACCURACY in data:
                    console.print(f"step {step:3d}  validation accuracy {data[ACCURACY]:.3f}")
            time.sleep(0.3)
    return metrics


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the tasks, the sampling and the trainer")
    parser.add_argument("--steps", type=int, default=20, help="GRPO steps")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "quickstart")
    args, args.overrides = parser.parse_known_args()
    wrong = [word for word in args.overrides if word.startswith("-") or ("=" not in word and word[:1] != "~")]
    if wrong:
        parser.error(
            f"unknown argument {wrong[0]!r}; expected --seed, --steps, --out or a verl override: key=value or ~key"
        )
    args.out = args.out.resolve()
    return args


def main() -> int:
    args = parse_arguments()
    console = Console()
    started = time.time()
    start_up = StartUp(started)
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    prepare = [sys.executable, str(HERE / "prepare_data.py"), str(args.out / "data"), "--seed", str(args.seed)]
    subprocess.run(prepare, check=True)

    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        _MARK: mark,
        "VERL_FILE_LOGGER_PATH": str(args.out / "metrics.jsonl"),
        "RAY_ADDRESS": "local",  # never somebody else's cluster
        "RAY_DEDUP_LOGS": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }

    def interrupted(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, interrupted)
    console.print(f"log: {args.out / 'train.log'}")
    trainer: subprocess.Popen[bytes] | None = None
    try:
        with (args.out / "train.log").open("wb") as log:
            trainer = subprocess.Popen(
                trainer_command(args), stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        metrics = watch(trainer, args, console, start_up)
    except KeyboardInterrupt:
        console.print("interrupted; stopping every process of the run")
        return 130
    finally:
        # A second Ctrl-C must not cut the cleaning short.
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        stop_everything(mark, trainer)
    if trainer.returncode != 0:
        lines = (args.out / "train.log").read_text(errors="replace").splitlines()
        console.print("\n".join(lines[-40:]), markup=False, highlight=False)
        ended = f"the trainer ended with exit status {trainer.returncode} while {start_up.doing}"
        print(f"{ended}; whole log: {args.out / 'train.log'}")
        return trainer.returncode if trainer.returncode > 0 else 1
    summarize(args.out, metrics, args.seed, started, start_up.seconds, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())

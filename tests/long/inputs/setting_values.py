"""Values of settings as people write them, and machines on which nothing can start."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.long.inputs.input_cases import Case, Right, Seen, accept, refuse, run_command
from tests.long.inputs.input_files import Files, folder_of, in_folder
from verl_multiturn.cli.run import refuse_early
from verl_multiturn.runs.plan import plan_run
from verl_multiturn.runs.ray_start import require_places
from verl_multiturn.runs.run import run_configuration

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ACCOUNTS: dict[str, str | None] = dict.fromkeys(
    ("WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE", "RAY_ADDRESS", "VERL_PLATFORM")
)
ROW = {
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "data_source": "sums",
    "reward_model": {"style": "rule", "ground_truth": "4"},
}


def print_run(*words: str, recipe: str = "quickstart", shows: str = "") -> Callable[[], Awaitable[Seen]]:
    """Return the door of `run NAME --print`.

    Args:
        words: Its further words.
        recipe: Name of the recipe.
        shows: Text that the printed command has, where it is accepted.
    """

    def run(folder: Path) -> Seen:
        seen = run_command("run", recipe, "--print", "--out", str(folder / "out"), *words)
        value = shows if shows in seen.sentence else "something else"
        return Seen(seen.kind, value if shows else None, seen.sentence, seen.status)

    return in_folder(run, {}, ACCOUNTS)


def begin_run(
    *words: str, files: Files | None = None, changes: Mapping[str, str | None] | None = None
) -> Callable[[], Awaitable[Seen]]:
    """Return the door of `run`'s questions before it imports verl, files and accounts included; nothing is started."""

    def run(folder: Path) -> Seen:
        plan = plan_run("quickstart", out=folder / "out", overrides=list(words))
        run_configuration(plan, refuse_early)
        return Seen("accepted")

    home: dict[str, str | None] = {"HOME": "/nowhere/at/all"}
    return in_folder(run, files or {}, {**ACCOUNTS, **home, **(changes or {})})


def _values() -> list[Case]:
    no = "true or false"
    whole = "whole number"
    wrong: list[tuple[str, tuple[str, ...]]] = [
        ("data.shuffle=off", ("data.shuffle", "'off'", no)),
        (f"{ACTOR}.use_kl_loss=no", ("use_kl_loss", "'no'", no)),
        (f"{ACTOR}.use_kl_loss=0", ("use_kl_loss", "0", no)),
        ('trainer.val_before_train="False"', ("val_before_train", "'False'", no)),
        (f"{ROLLOUT}.multi_turn.enable=on", ("multi_turn.enable", "'on'", no)),
        ("algorithm.use_kl_in_reward=null", ("use_kl_in_reward", "null", no)),
        ("data.train_batch_size=16.0", ("train_batch_size", "16.0", whole)),
        ("data.train_batch_size=1e2", ("train_batch_size", "100.0", whole)),
        ("data.train_batch_size='16'", ("train_batch_size", "'16'", whole)),
        ("data.train_batch_size=", ("train_batch_size",)),
        ("trainer.total_epochs=ten", ("total_epochs", "'ten'", whole)),
        ("trainer.save_freq=null", ("save_freq", "null", whole)),
        ("data.max_prompt_length=1k", ("max_prompt_length", "'1k'", whole)),
        ("data.max_response_length=1_024.5", ("max_response_length", whole)),
        (f"{ACTOR}.optim.lr='1e-6'", ("optim.lr", "'1e-6'", "number")),
        (f"{ROLLOUT}.temperature=hot", ("temperature", "'hot'", "number")),
        (f"{ROLLOUT}.n=two", (f"{ROLLOUT}.n", "'two'", whole)),
        ("data.train_files=5", ("train_files", "5")),
        ("trainer.logger='[console,file]'", ("trainer.logger", "list")),
        ("trainer.logger=[console,tensorbord]", ("'tensorbord'", "'tensorboard'")),
        ("algorithm.adv_estimator=rlooo", ("'rlooo'", "'rloo'")),
        (f"{ACTOR}.policy_loss.loss_mode=vanila", ("'vanila'", "'vanilla'")),
        ("algorithm.kl_ctrl=off", ("kl_ctrl", "'off'")),
        ("data=5", ("group",)),
        ("data.shufle=True", ("shufle", "shuffle")),
        ("mt.tool_reward.mod=add", ("mod", "mode")),
        ("mt.tool_reward.mode=ad", ("tool_reward.mode", "'ad'", "'add'")),
        ("mt.tol_timeout_s=5", ("tol_timeout_s", "tool_timeout_s")),
        (f"{ROLLOUT}.custom.multiturn.prefix_tree=yes", ("prefix_tree", "'yes'")),
        ("trainer.v1.trainer_mode=colocate_asink", ("'colocate_asink'", "'colocate_async'")),
        (f"{ACTOR}.ppo_mini_batch_size=0", ("ppo_mini_batch_size", "0")),
        ("recipe.on_cpu=off", ("on_cpu", "'off'")),
    ]
    right: list[tuple[str, str]] = [
        ("data.shuffle=false", "data.shuffle=false"),
        (f"{ACTOR}.optim.lr=1", f"{ACTOR}.optim.lr=1"),
        ("data.seed=null", "data.seed=null"),
        ("trainer.logger=[console,file]", "[console,file]"),
        ("mt.tool_reward.mode=add", f"++{ROLLOUT}.custom.multiturn.tool_reward.mode=add"),
        ("+mt.tool_timeout_s=5", f"++{ROLLOUT}.custom.multiturn.tool_timeout_s=5"),
        (f"{ROLLOUT}.custom.multiturn.tool_reward.mode=add", "tool_reward.mode=add"),
        ("data.train_files=[a.parquet,b.parquet]", "[a.parquet,b.parquet]"),
        ("+my.own_key=off", "+my.own_key=off"),
        (f"{ROLLOUT}.temperature=1", "temperature=1"),
    ]
    further: list[tuple[str, Callable[[], Awaitable[Seen]], Right]] = [
        (
            "batch 4, mini-batch 4, n 4",
            print_run("data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4", f"{ROLLOUT}.n=4"),
            refuse("ppo_micro_batch_size_per_gpu", "divisor"),
        ),
        (
            "3 GPUs, engines of 2",
            print_run("trainer.n_gpus_per_node=3", f"{ROLLOUT}.tensor_model_parallel_size=2", recipe="gsm8k_multiturn"),
            refuse("3", "2 GPUs"),
        ),
        (
            "adapters in separate_async",
            print_run("--variant", "lora", "--mode", "separate_async", recipe="gsm8k_multiturn"),
            refuse("separate_async"),
        ),
        (
            "a variant that is none",
            print_run("--variant", "loar", recipe="gsm8k_multiturn"),
            refuse("'loar'", "'lora'"),
        ),
        ("a recipe that is none", print_run(recipe="quickstrat"), refuse("'quickstrat'", "quickstart")),
        ("a mode that is none", print_run("--mode", "asink"), refuse("asink", "sync")),
        ("seed that is text", print_run("--seed", "x"), refuse("--seed")),
        ("wandb without a key", begin_run("trainer.logger=[console,wandb]"), refuse("wandb", "WANDB_API_KEY")),
        ("wandb offline", begin_run("trainer.logger=[console,wandb]", changes={"WANDB_MODE": "offline"}), accept()),
        ("a logger whose package is missing", begin_run("trainer.logger=[clearml]"), refuse("clearml", "pip install")),
        ("no such tool YAML", begin_run(f"{ROLLOUT}.multi_turn.tool_config_path=no/such.yaml"), refuse("no/such.yaml")),
        ("no such reward file", begin_run("reward.custom_reward_function.path=no_reward.py"), refuse("no_reward.py")),
        ("no such model", begin_run("actor_rollout_ref.model.path=./no_model"), refuse("no_model")),
        (
            "a variable as a number",
            begin_run("data.train_batch_size=${oc.env:SIZE}", changes={"SIZE": "64"}),
            refuse("oc.decode"),
        ),
        (
            "a variable that is decoded",
            begin_run("data.train_batch_size=${oc.decode:${oc.env:SIZE}}", changes={"SIZE": "64"}),
            accept(),
        ),
    ]
    return [
        *(Case("settings", word, print_run(word), refuse(*words)) for word, words in wrong),
        *(Case("settings", word, print_run(word, shows=shows), accept(shows)) for word, shows in right),
        *(Case("settings", given, door, answer) for given, door, answer in further),
        *_rows(),
    ]


def _rows() -> list[Case]:
    """Return rows that a run is begun with."""

    def with_rows(
        *rows: Mapping[str, Any], batch: int = 1, more: tuple[str, ...] = ()
    ) -> Callable[[], Awaitable[Seen]]:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        words = [
            f"data.train_batch_size={batch}",
            f"{ACTOR}.ppo_mini_batch_size={batch}",
            f"{ACTOR}.use_dynamic_bsz=True",
        ]
        return begin_run(
            "data.train_files=rows.jsonl", "data.val_files=rows.jsonl", *words, *more, files={"rows.jsonl": text}
        )

    without = {key: value for key, value in ROW.items() if key != "reward_model"}
    return [
        Case(
            "settings", "fewer rows than a batch", with_rows(ROW, ROW, ROW, batch=4), refuse("3 rows", "4 of a batch")
        ),
        Case("settings", "as many rows as a batch", with_rows(ROW, ROW, ROW, ROW, batch=4), accept()),
        Case(
            "settings",
            "a start with rows without reward_model",
            with_rows(ROW, without),
            refuse("row 1", "reward_model"),
        ),
        Case(
            "settings",
            "the same, where tools score",
            with_rows(without, more=("mt.tool_reward.mode=replace",)),
            accept(),
        ),
    ]


def machine(
    changes: Mapping[str, str | None], settings: Mapping[str, Any] | None = None
) -> Callable[[], Awaitable[Seen]]:
    """Return the door of a run's checks of a machine before Ray is started."""

    async def door() -> Seen:
        with folder_of({"home/x": "", "file": "", "tmp/x": ""}) as folder:
            given = {"HOME": str(folder / "home"), "RAY_TMPDIR": "/tmp", **changes}
            values = {name: value.replace("FOLDER", str(folder)) for name, value in given.items() if value is not None}
            require_places(settings or {}, values)
        return Seen("accepted")

    return door


def send(*signals: signal.Signals, asks: bool = False) -> Callable[[], Awaitable[Seen]]:
    """Return the door of signals to a launcher: the value is whether its command still runs, and its exit status is 0.

    Args:
        signals: The signals, one after another.
        asks: Whether the launcher asks its command to stop; the command then ends by itself.
    """
    program = (
        # A shell starts background commands with some signals ignored, and ignored ones stay so.
        f"import signal, sys\nfor each in {[int(each) for each in signals]}: signal.signal(each, signal.SIG_DFL)\n"
        "from pathlib import Path\nfrom verl_multiturn.runs.processes import run_watched\n"
        "child = 'import os, time; print(os.getpid(), flush=True)\\n'\n"
        "child += 'while not os.path.exists(\"asked\"): time.sleep(0.02)'\n"
        f"stop = (lambda: Path('asked').touch()) if {asks} else None\n"
        "raise SystemExit(run_watched([sys.executable, '-c', child], {}, Path('log'), stop=stop))"
    )

    def run(folder: Path) -> Seen:
        launcher = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
        while not ((log := folder / "log").is_file() and log.read_text(encoding="utf-8").endswith("\n")):
            time.sleep(0.02)
        child = psutil.Process(int(log.read_text(encoding="utf-8")))
        for each in signals:
            launcher.send_signal(each)
        launcher.wait(60)
        _, left = psutil.wait_procs([child], timeout=10)
        for each in left:
            each.kill()
        return Seen("accepted", (bool(left), launcher.returncode == 0))

    return in_folder(run, {})


def _machines() -> list[Case]:
    inputs: list[tuple[str, dict[str, str | None], dict[str, Any], Right]] = [
        ("a machine that is well", {}, {}, accept()),
        ("HOME is a file", {"HOME": "FOLDER/file"}, {}, refuse("HOME", "token", "set ")),
        ("HOME in /proc", {"HOME": "/proc/nowhere"}, {}, refuse("HOME", "/proc/nowhere")),
        ("HOME below a file", {"HOME": "FOLDER/file/deeper"}, {}, refuse("HOME")),
        ("HOME that is not there yet", {"HOME": "FOLDER/home/new"}, {}, accept()),
        ("a token without a HOME", {"HOME": "/proc/x", "RAY_AUTH_TOKEN": "abc"}, {}, accept()),
        ("no authentication", {"HOME": "/proc/x", "RAY_AUTH_MODE": "disabled"}, {}, accept()),
        ("RAY_TMPDIR is a file", {"RAY_TMPDIR": "FOLDER/file"}, {}, refuse("RAY_TMPDIR")),
        ("RAY_TMPDIR is long", {"RAY_TMPDIR": "/tmp/" + "x" * 70}, {}, refuse("RAY_TMPDIR", "107")),
        ("TMPDIR in /proc", {"RAY_TMPDIR": None, "TMPDIR": "/proc/x"}, {}, refuse("TMPDIR")),
        ("_temp_dir in /proc", {}, {"_temp_dir": "/proc/x"}, refuse("_temp_dir")),
        ("a cluster is joined", {"HOME": "/proc/x", "RAY_ADDRESS": "10.0.0.1:6379"}, {}, accept()),
    ]
    ended = accept((False, False))
    signals: list[tuple[str, Callable[[], Awaitable[Seen]], Right]] = [
        *(
            (each.name, send(each), ended)
            for each in (
                signal.SIGUSR2,
                signal.SIGQUIT,
                signal.SIGXCPU,
                signal.SIGTERM,
                signal.SIGHUP,
                signal.SIGUSR1,
                signal.SIGPWR,
            )
        ),
        ("SIGUSR1 to a run that can stop", send(signal.SIGUSR1, asks=True), accept((False, True))),
    ]
    return [
        *(Case("machines", given, machine(changes, settings), right) for given, changes, settings, right in inputs),
        *(Case("signals", given, door, right, is_slow=True) for given, door, right in signals),
    ]


def cases() -> list[Case]:
    """Return the inputs of this file."""
    return [*_values(), *_machines()]

"""`verl-multiturn doctor --gpu`: a short training run that tries the whole path on this machine in minutes.

It is a short version of the quickstart: a tiny model calls a calculator, on SGLang, in two steps of GRPO with their
weight syncs. Platforms differ only in settings, so the tests run the same code on the CPU platform.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_multiturn.recipes import shipped_folder
from verl_multiturn.records.read.records import read_records
from verl_multiturn.runs.doctor import WITHOUT_FLASH_ATTN, DoctorFinding, has_flash_attn

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_BATCH = 8
_SAMPLES = 8  # conversations for each task: the quickstart's `rollout.n`
_SMALL = {
    "data.train_batch_size": _BATCH,
    f"{_ACTOR}.ppo_mini_batch_size": _BATCH,
    "data.val_max_samples": 16,
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": 64,
}
_BF16 = "{param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}"
_GPU = {
    # FlashAttention takes no float32.
    f"++{_ACTOR}.fsdp_config.mixed_precision": _BF16,
    f"{_ROLLOUT}.dtype": "bfloat16",
    # Among SGLang's attention backends, this one supports the tiny model's head size of 32.
    f"+{_ROLLOUT}.engine_kwargs.sglang.attention_backend": "triton",
    f"{_ROLLOUT}.gpu_memory_utilization": 0.3,
    # Compiling, and capturing CUDA graphs, would take longer than the two steps.
    f"{_ROLLOUT}.enforce_eager": True,
    f"{_ACTOR}.fsdp_config.use_torch_compile": False,
}
_NO_FLASH_ATTN = {
    "actor_rollout_ref.model.use_remove_padding": False,
    "++actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
}
_MOST_DIFFERENCE = {"cpu": 1e-4, "nvidia": 2e-2}
"""Largest mean of |rollout - trainer probability| that passes. float32 on a CPU gave 4e-7, bfloat16 about 1e-3."""

# Texts in a trainer's log that name the reason of a failure, and the remedy. The first text that is found counts.
_REASONS = {
    "CUDA out of memory": "the GPU's memory is taken: look at nvidia-smi, and end what holds it",
    "no kernel image is available": "a package has no code for this GPU: install with `verl-multiturn install gpu DIR`",
    "undefined symbol": "a package was built for another torch: install with `verl-multiturn install gpu DIR`",
    "FlashAttention2 has been toggled on": f"flash-attn is missing: install it, or use {WITHOUT_FLASH_ATTN}",
    "No space left on device": "a disk is full: look at df -h / /tmp /dev/shm",
    "The current node timed out during startup": "start the same command again, when the machine is less busy",
    "NCCL error": "NCCL failed: run again with NCCL_DEBUG=INFO and look at the log",
}


def overrides(platform: str) -> list[str]:
    """Return the settings that differ from the quickstart's, as verl's overrides.

    Args:
        platform: verl's name of the platform: `nvidia`, or `cpu`.
    """
    settings: dict[str, Any] = dict(_SMALL)
    if platform != "cpu":
        settings |= _GPU | ({} if has_flash_attn() else _NO_FLASH_ATTN)
    return [f"{key}={value}" for key, value in settings.items()]


def run_whole_path(out: Path, platform: str, say: Callable[[str], None], steps: int = 2) -> list[DoctorFinding]:
    """Train for some steps, and judge the result.

    Args:
        out: Folder for the run's output; files that are in it are lost.
        platform: verl's name of the platform: `nvidia`, or `cpu`.
        say: Called with each line that the run prints.
        steps: Number of training steps.
    """
    recipe = shipped_folder() / "recipes" / "quickstart"
    command = [sys.executable, "-m", "verl_multiturn.cli", "run", str(recipe)]
    command += ["--steps", str(steps), "--out", str(out), *overrides(platform)]
    environment = {**os.environ, "VERL_PLATFORM": platform, "PYTHON": sys.executable}
    last = ""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        encoding="utf-8",
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            say(line.rstrip("\n"))
            last = line.strip() or last
    if run.returncode != 0:
        return [_failure(out, run.returncode, last)]
    return judge_run(out, platform, steps)


def _failure(out: Path, status: int, last: str) -> DoctorFinding:
    log = out / "train.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    named = [remedy for sign, remedy in _REASONS.items() if sign in text]
    found = last or f"the run ended with exit status {status} and said nothing"
    return DoctorFinding("GRPO steps", False, found, named[0] if named else f"read the last error in {log}")


def judge_run(out: Path, platform: str, steps: int) -> list[DoctorFinding]:
    """Judge a run that ended without an error, from the files that it wrote.

    Args:
        out: Folder of the run's output.
        platform: verl's name of the platform: `nvidia`, or `cpu`.
        steps: Number of training steps that were requested.
    """
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    trained = [record for record in read_records(out / "trajectories.jsonl") if not record["validation"]]
    log = f"compare {out / 'train.log'} with the quickstart's on a CPU"
    rows, wanted = summary["certificate_rows"], steps * _BATCH * _SAMPLES
    violations = summary["certificate_violations"]
    difference, most = summary["prob_diff_mean"], _MOST_DIFFERENCE[platform]
    calls = summary["tool_calls_per_trajectory"] * len(trained)
    return [
        _judged("GRPO steps", summary["steps"] == steps, f"{summary['steps']} of {steps}", log),
        _judged(
            "tool calls",
            calls > 0 and summary["tool_error_rate"] < 0.5,
            f"{calls:.0f} in {len(trained)} conversations, {summary['tool_error_rate']:.0%} failed",
            f"read the conversations in {out / 'trajectories.jsonl'}",
        ),
        _judged("weight syncs", *_synced(trained, steps), log),
        _judged(
            "|rollout - trainer probability|",
            difference is not None and difference <= most,
            f"{'none' if difference is None else f'{difference:.1e}'} in the mean; at most {most:.0e} is expected",
            "engine and trainer compute different models: look for another attention backend, dtype or kernel version",
        ),
        _judged(
            "certificate",
            rows == wanted and violations == 0,
            f"{rows} of {wanted} rows verified, {violations} violations",
            f"verl-multiturn verify {out / 'trajectories.jsonl'}",
        ),
    ]


def _judged(what: str, ok: bool, found: str, remedy: str) -> DoctorFinding:
    return DoctorFinding(what, ok, found, "" if ok else remedy)


def _versions(record: dict[str, Any]) -> set[int]:
    return {version for row in record["rows"] for _, _, version, *_ in row["runs"]}


def _synced(trained: list[dict[str, Any]], steps: int) -> tuple[bool, str]:
    """Return whether each step was sampled with the weights of the step before it, and the versions as a text."""
    versions = {
        step: sorted({version for record in trained if record["step"] == step for version in _versions(record)} - {-1})
        for step in range(1, steps + 1)
    }
    found = ", ".join(f"step {step} sampled with version {versions[step]}" for step in versions)
    return all(versions[step] == [step - 1] for step in versions), found

"""The environment variables of a CPU run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import psutil

DETECTED = "VERL_MULTITURN_CPU_DETECTED"
"""Environment variable that is set when the CPU platform was not requested, but chosen by detection."""

STAND_INS = Path(__file__).resolve().parents[1] / "cpu" / "stand_ins"

# SGLang refuses to start without an accelerator unless SGLANG_USE_CPU_ENGINE is set. verl picks its training engine by
# device name and has registered FSDP only for "cuda"; VERL_ENGINE_DEVICE is verl's own way to override that name.
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "VERL_ENGINE_DEVICE": "cuda", "VERL_PLATFORM": "cpu"}

# Modules of verl and SGLang that warn, in every process without an accelerator, of engines and kernels that need one.
SILENT = (
    "verl.workers.engine",
    "sglang.srt.layers.quantization.awq.awq",
    "sglang.srt.layers.quantization.gguf",
    "sglang.srt.layers.attention.fla.utils",
)

# Variables for processes that are started from here on. Values that the user has set win.
SPEED = {
    # Without this Ray gives each worker one thread. `verl-multiturn run` sets fewer where more do not pay
    # (`runs/threads.py`).
    "OMP_NUM_THREADS": str(os.cpu_count() or 1),
    # A thread that waits for the others sleeps. GNU's OpenMP spins otherwise, and takes the core that another process
    # needs: the worker's loop, the server and TransferQueue share the cores with the engine.
    "OMP_WAIT_POLICY": "passive",
    # TransferQueue's own default is 8, and with fewer cores it warns at every call.
    "TQ_NUM_THREADS": str(min(8, psutil.cpu_count(logical=False) or os.cpu_count() or 1)),
    # Ray would start two workers before the run has set its workers' Python; both end unused.
    "RAY_prestart_worker_first_driver": "0",
    # Keep freed memory: returning every large tensor to the system and faulting it in again costs more than computing.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def engine_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a new process of the rollout engine needs.

    Args:
        variables: The environment variables of the process that starts it.
    """
    kept = [part for part in variables.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(STAND_INS)]
    return {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([*kept, str(STAND_INS)])}


def run_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return all environment variables of a CPU run's processes: those of `variables`, and the platform's.

    Args:
        variables: The environment variables of the process that starts them. Those for speed win over the platform's.
    """
    filters = [variables.get("PYTHONWARNINGS"), *(f"ignore::UserWarning:{module}" for module in SILENT)]
    warnings = ",".join(dict.fromkeys(",".join(filter(None, filters)).split(",")))
    return {**SPEED, **variables, **engine_variables(variables), "PYTHONWARNINGS": warnings}

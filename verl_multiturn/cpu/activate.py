"""Turns the CPU platform on in this process and in every process it starts.

Called by `plugin.py` at the end of `import verl`, in the driver and in each Ray worker. Light: torch and verl are
imported already, SGLang is not.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

DETECTED = "VERL_MULTITURN_CPU_DETECTED"
"""Set when nobody asked for the CPU platform."""

STAND_INS = Path(__file__).resolve().parent / "stand_ins"

# SGLang refuses to start without an accelerator unless told so; verl picks its training engines by device name and has
# registered FSDP for "cuda" only, with this variable as its own override.
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "VERL_ENGINE_DEVICE": "cuda", "VERL_PLATFORM": "cpu"}

# What verl and SGLang warn of in every process where there is no accelerator: engines and kernels that need one.
_SILENT = (
    "verl.workers.engine",
    "sglang.srt.layers.quantization.awq.awq",
    "sglang.srt.layers.quantization.gguf",
    "sglang.srt.layers.attention.fla.utils",
)

# Read by processes that are started from here on, and the user's own values win.
_SPEED = {
    # Ray gives its workers one thread each where nothing is said; trainer and engine take turns with all cores.
    "OMP_NUM_THREADS": str(os.cpu_count() or 1),
    # TransferQueue's own default is 8, and where there are fewer cores it warns at every call.
    "TQ_NUM_THREADS": str(min(8, psutil.cpu_count(logical=False) or os.cpu_count() or 1)),
    # Keep freed memory: giving every large tensor back to the system and faulting it in again costs more than the sums.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def wanted() -> bool:
    """Whether this is a CPU run: asked for, or no accelerator in sight."""
    asked = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if asked:
        return asked == "cpu"
    # A node without an accelerator may belong to a cluster that has some: only the driver of a run of its own decides,
    # and tells its workers by the variable.
    if _joins_a_cluster() or any(part.endswith("default_worker.py") for part in sys.orig_argv):
        return False
    import torch
    from verl.plugin.platform.platform_manager import PlatformRegistry

    if torch.cuda.is_available():
        return False
    # The smi check finds the accelerators of a node also from a process that was given none.
    platforms = [PlatformRegistry.get(name) for name in PlatformRegistry.registered_names() if name != "cpu"]
    return not any(
        platform is not None and platform().is_platform_available(use_smi_check=True) for platform in platforms
    )


def _joins_a_cluster() -> bool:
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return canonicalize_bootstrap_address(None) is not None
    except ValueError:
        return True  # ray://, which is no address of that kind


def environment() -> dict[str, str]:
    """Variables that a fresh process of the rollout engine needs."""
    kept = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(STAND_INS)]
    return {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([*kept, str(STAND_INS)])}


def activate() -> None:
    """Register the platform and mend what verl 0.9.1 assumes of an accelerator."""
    if not os.environ.get("VERL_PLATFORM"):
        os.environ[DETECTED] = "1"
        logger.warning("no accelerator found: this run uses the CPU platform; set VERL_PLATFORM to choose another")
    os.environ.update(environment())
    for name, value in _SPEED.items():
        os.environ.setdefault(name, value)
    filters = [os.environ.get("PYTHONWARNINGS"), *(f"ignore::UserWarning:{module}" for module in _SILENT)]
    os.environ["PYTHONWARNINGS"] = ",".join(dict.fromkeys(",".join(filter(None, filters)).split(",")))
    if str(STAND_INS) not in sys.path:
        sys.path.append(str(STAND_INS))

    import torch
    import verl.utils.distributed
    import verl.utils.model
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_manager import PlatformRegistry
    from verl.workers.rollout import base

    from verl_multiturn.cpu.defaults import fill_in
    from verl_multiturn.cpu.platform import (
        CpuPlatform,
        initialize_gloo_process_group,
        initialize_torchrun_group,
        load_value_model,
    )
    from verl_multiturn.verl_bridge import preflight

    PlatformRegistry.register(platform="cpu")(CpuPlatform)
    set_platform(CpuPlatform())
    # verl builds the backend "cpu:gloo,<device>:<backend>", which names the CPU twice here; torch refuses that.
    verl.utils.distributed.initialize_global_process_group_ray = initialize_gloo_process_group
    verl.utils.distributed.initialize_global_process_group = initialize_torchrun_group
    verl.utils.model.load_valuehead_model = load_value_model
    # FSDP2 pins what it keeps on the CPU, as verl has it do for a reference model; torch needs a driver for that.
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor  # type: ignore[method-assign,assignment,return-value]
    if fill_in not in preflight.config_hooks:
        preflight.config_hooks.append(fill_in)
    rollout = "verl_multiturn.cpu.rollout.CpuAsyncSGLangRollout"
    base._ROLLOUT_REGISTRY[("sglang_async", "async")] = rollout
    base._ROLLOUT_REGISTRY[("sglang", "async")] = rollout

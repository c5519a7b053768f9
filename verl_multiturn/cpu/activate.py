"""The switch that turns the CPU platform on, in this process and in every process it starts.

`plugin.py` calls it at the end of `import verl`, in the driver and in each Ray worker. It is cheap: torch and verl are
imported already by then, and SGLang is not imported here.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

DETECTED = "VERL_MULTITURN_CPU_DETECTED"
"""Environment variable that is set when nobody asked for the CPU platform, and it was chosen by detection."""

STAND_INS = Path(__file__).resolve().parent / "stand_ins"

# SGLang refuses to start without an accelerator unless SGLANG_USE_CPU_ENGINE is set. verl picks its training engine by
# device name and has registered FSDP only for "cuda"; VERL_ENGINE_DEVICE is verl's own way to override that name.
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "VERL_ENGINE_DEVICE": "cuda", "VERL_PLATFORM": "cpu"}

# Modules of verl and SGLang that warn, in every process without an accelerator, of engines and kernels that need one.
_SILENT = (
    "verl.workers.engine",
    "sglang.srt.layers.quantization.awq.awq",
    "sglang.srt.layers.quantization.gguf",
    "sglang.srt.layers.attention.fla.utils",
)

# Variables for processes that are started from here on. Values that the user has set win.
_SPEED = {
    # Without this Ray gives each worker one thread. Trainer and engine work in turns, so each may use all cores.
    "OMP_NUM_THREADS": str(os.cpu_count() or 1),
    # TransferQueue's own default is 8, and with fewer cores it warns at every call.
    "TQ_NUM_THREADS": str(min(8, psutil.cpu_count(logical=False) or os.cpu_count() or 1)),
    # Keep freed memory: returning every large tensor to the system and faulting it in again costs more than computing.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def wanted() -> bool:
    """Return whether this process belongs to a CPU run: it was asked for, or no accelerator was found."""
    asked = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if asked:
        return asked == "cpu"
    # A node without an accelerator may belong to a cluster that has some. So only the driver of a local run decides;
    # it tells its workers by the variable VERL_PLATFORM.
    if _joins_a_cluster() or any(part.endswith("default_worker.py") for part in sys.orig_argv):
        return False
    import torch
    from verl.plugin.platform.platform_manager import PlatformRegistry

    if torch.cuda.is_available():
        return False
    # The SMI check finds the accelerators of a node also in a process that was given none of them.
    platforms = [PlatformRegistry.get(name) for name in PlatformRegistry.registered_names() if name != "cpu"]
    return not any(
        platform is not None and platform().is_platform_available(use_smi_check=True) for platform in platforms
    )


def _joins_a_cluster() -> bool:
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return canonicalize_bootstrap_address(None) is not None
    except ValueError:
        return True  # a ray:// address, which this function of Ray's does not parse


def environment() -> dict[str, str]:
    """Return the environment variables that a new process of the rollout engine needs."""
    kept = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(STAND_INS)]
    return {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([*kept, str(STAND_INS)])}


def activate() -> None:
    """Register the CPU platform, and replace the parts of verl 0.9.1 that assume an accelerator."""
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

    from verl_multiturn.cpu.cpu_platform import (
        CpuPlatform,
        initialize_gloo_process_group,
        initialize_torchrun_group,
        load_value_model,
    )
    from verl_multiturn.cpu.defaults import fill_in
    from verl_multiturn.verl_bridge.startup import prepare as preflight

    PlatformRegistry.register(platform="cpu")(CpuPlatform)
    set_platform(CpuPlatform())
    # verl builds the backend "cpu:gloo,<device>:<backend>". Here that would name the CPU twice, which torch refuses.
    verl.utils.distributed.initialize_global_process_group_ray = initialize_gloo_process_group
    verl.utils.distributed.initialize_global_process_group = initialize_torchrun_group
    verl.utils.model.load_valuehead_model = load_value_model
    # FSDP2 pins the memory of what it offloads to the CPU, as verl lets it do with a reference model. Pinning needs the
    # driver of an accelerator.
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor  # type: ignore[method-assign,assignment,return-value]
    if fill_in not in preflight.config_hooks:
        preflight.config_hooks.append(fill_in)
    rollout = "verl_multiturn.cpu.rollout.CpuAsyncSGLangRollout"
    base._ROLLOUT_REGISTRY[("sglang_async", "async")] = rollout
    base._ROLLOUT_REGISTRY[("sglang", "async")] = rollout

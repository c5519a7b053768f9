"""verl's platform interface for a CPU: one logical device, no streams, no separate memory."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase

from verl_multiturn.cpu_processes.environment import engine_variables


def initialize_gloo_process_group(timeout_second: int | None = None, backend: str | None = None) -> None:
    """Create the default process group over gloo alone, unless there is one.

    The signature is that of verl's `initialize_global_process_group_ray`, which this replaces.

    Args:
        timeout_second: Time limit of a collective operation in seconds; None: torch's default.
        backend: ignored.
    """
    if torch.distributed.is_initialized():
        return
    torch.distributed.init_process_group(
        backend="gloo",
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        timeout=timedelta(seconds=timeout_second) if timeout_second is not None else None,
        init_method=os.environ.get("DIST_INIT_METHOD"),
    )


def initialize_torchrun_group(timeout_second: int = 36_000) -> tuple[int, int, int]:
    """Create the default process group over gloo alone; return local rank, rank and world size.

    The signature is that of verl's `initialize_global_process_group`, which verl's SFT trainer calls under torchrun.

    Args:
        timeout_second: Time limit of a collective operation in seconds.
    """
    initialize_gloo_process_group(timeout_second)
    return int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def load_value_model(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
    """Load the critic's model, with the attention `sdpa`.

    The signature is that of verl's `load_valuehead_model`, which insists on FlashAttention.
    """
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation="sdpa",
        trust_remote_code=trust_remote_code,
    )


class _CpuDevice(types.ModuleType):
    """`torch.cpu` plus the functions that verl calls on an accelerator's module. Memory figures are in bytes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        return int(psutil.Process().memory_info().rss)

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return "cpu"

    @staticmethod
    def empty_cache() -> None:
        return

    ipc_collect = empty_cache

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        return

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    @staticmethod
    def is_bf16_supported() -> bool:
        return True


_DEVICE = _CpuDevice("verl_multiturn.cpu.device")


class CpuPlatform(PlatformBase):
    """verl's platform `cpu`, with one logical device for each worker.

    Ray counts these devices as GPUs (`ray_kwargs.ray_init.num_gpus`).
    """

    @property
    def device_name(self) -> str:
        """Device type, as torch writes it."""
        return "cpu"

    @property
    def vendor_name(self) -> str:
        """Vendor of the hardware, by verl's names."""
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        """Module in the place of `torch.<device>`."""
        return _DEVICE

    def is_available(self) -> bool:
        """Return True: a CPU is always there."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return True: a CPU is always there."""
        return True

    def current_device(self) -> Any:
        """Return the device's name instead of an index."""
        # verl passes it to `tensor.to()`, where an index would mean a GPU.
        return "cpu"

    def device_count(self) -> int:
        """Return 1, the number of logical devices."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is one device."""
        return

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: a CPU has no streams to wait for."""
        return

    def manual_seed(self, seed: int) -> None:
        """Seed torch's random numbers."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's random numbers."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: there is no allocator of a device."""
        return

    def empty_cache(self) -> None:
        """Do nothing: there is no cache of a device."""
        return

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """Return `(None, None)`: a CPU has no compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Return the backend of the process groups."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return the name of the variable that lists a worker's devices."""
        # Ray sets it for a worker that was given a logical GPU. verl assigns servers to nodes by it.
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Run the block without marking it for a profiler."""
        yield

    def profiler_start(self) -> None:
        """Do nothing: there is no profiler of a device."""
        return

    def profiler_stop(self) -> None:
        """Do nothing: there is no profiler of a device."""
        return

    def ray_resource_name(self) -> str:
        """Return Ray's name for the logical devices."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return no variables: Ray may set the visible devices."""
        return []

    def is_ipc_supported(self) -> bool:
        """Return False: weights cannot be sent by CUDA IPC handles."""
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        """Return the environment variables of the rollout engine's processes."""
        return engine_variables(os.environ)

    def cudart(self) -> Any:
        """Return None: there is no CUDA runtime."""
        return None

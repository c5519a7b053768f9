"""The switch that turns the CPU platform on, in this process and in every process it starts.

`plugin.py` calls it at the end of `import verl`, in the driver and in each Ray worker. It is cheap: torch and verl are
imported already by then, and SGLang is not imported here.
"""

from __future__ import annotations

import logging
import os
import sys
from types import ModuleType
from typing import Any

import wrapt

from verl_multiturn.cpu_processes.environment import DETECTED, STAND_INS, run_variables

logger = logging.getLogger(__name__)


def wanted() -> bool:
    """Return whether this process belongs to a CPU run: it was requested, or no accelerator was found."""
    asked = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if asked:
        return asked == "cpu"
    # A node without an accelerator may belong to a cluster that has some. So only the driver of a local run decides;
    # it informs its workers by the variable VERL_PLATFORM.
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


def activate() -> None:
    """Register the CPU platform, and replace the parts of verl 0.9.1 that assume an accelerator."""
    if not os.environ.get("VERL_PLATFORM"):
        os.environ[DETECTED] = "1"
        logger.warning("no accelerator found: this run uses the CPU platform; set VERL_PLATFORM to choose another")
    os.environ.update(run_variables(os.environ))
    if str(STAND_INS) not in sys.path:
        sys.path.append(str(STAND_INS))

    import torch
    import verl.utils.distributed
    import verl.utils.model
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_manager import PlatformRegistry

    from verl_multiturn.cpu.cpu_platform import (
        CpuPlatform,
        initialize_gloo_process_group,
        initialize_torchrun_group,
        load_value_model,
    )
    from verl_multiturn.cpu.defaults import fill_in
    from verl_multiturn.cpu.engine_processes import fork_engines
    from verl_multiturn.cpu.tensors import compute_at_once
    from verl_multiturn.verl_bridge.servers import registrations
    from verl_multiturn.verl_bridge.startup import configuration

    PlatformRegistry.register(platform="cpu")(CpuPlatform)
    set_platform(CpuPlatform())
    # verl builds the backend "cpu:gloo,<device>:<backend>". Here that would name the CPU twice, which torch refuses.
    verl.utils.distributed.initialize_global_process_group_ray = initialize_gloo_process_group
    verl.utils.distributed.initialize_global_process_group = initialize_torchrun_group
    verl.utils.model.load_valuehead_model = load_value_model
    compute_at_once()
    # FSDP2 pins the tensors that it offloads to the CPU, as verl lets it do with a reference model. Pinning needs the
    # driver of an accelerator.
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor  # type: ignore[method-assign,assignment,return-value]
    if fill_in not in configuration.config_hooks:
        configuration.config_hooks.append(fill_in)
    fork_engines()
    wrapt.register_post_import_hook(_register_attention, "sglang.srt.layers.attention.attention_registry")
    wrapt.register_post_import_hook(_unpin, "sglang.srt.layers.logits_processor")
    rollout = "verl_multiturn.cpu.rollout.CpuAsyncSGLangRollout"
    registrations.set_rollout_class(rollout, rollout)


class _Unpinned(wrapt.ObjectProxy[ModuleType]):
    """torch, whose new tensors are not in pinned memory."""

    def tensor(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        """Return a new tensor."""
        return self.__wrapped__.tensor(*args, **kwargs)


def _unpin(processor: ModuleType) -> None:
    """Let SGLang compute the log-probs of a prompt, for a teacher: SGLang 0.5.12 pins the indices of its tokens."""
    vars(processor)["torch"] = _Unpinned(vars(processor)["torch"])


def _register_attention(registry: ModuleType) -> None:
    """Register our attention with SGLang, in every process that has imported its registry."""
    from verl_multiturn.cpu.defaults import ATTENTION

    def create(runner: Any) -> Any:
        from verl_multiturn.cpu.attention import SharedPrefixAttention

        return SharedPrefixAttention(runner)

    for name in ATTENTION.values():
        registry.register_attention_backend(name)(create)

"""Settings of verl that a CPU run needs: a few are forced, the others only fill in what is not set."""

from __future__ import annotations

import os
import sys

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_multiturn.cpu_processes.environment import DETECTED, SPEED
from verl_multiturn.cpu_processes.handle import ray_executable
from verl_multiturn.driver import is_trainer
from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.settings import adapter_rank, cluster_address

# Settings that SGLang 0.5.12 needs to run without an accelerator. Each can be overridden under
# actor_rollout_ref.rollout.engine_kwargs.sglang.
_SGLANG = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "enable_memory_saver": False,
    "max_total_tokens": 16384,
    "sleep_on_idle": True,  # without it an idle scheduler keeps a core busy that training needs
}
_CHECKPOINT_ENGINE = "verl_multiturn.cpu.checkpoint_engine"
# Forced settings, whatever a GPU recipe says: verl and SGLang cannot run on a CPU without them.
_FORCED = {
    "trainer.device": "cpu",
    "actor_rollout_ref.model.use_remove_padding": False,
    "critic.model.use_remove_padding": False,
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile": False,
    "critic.fsdp.use_torch_compile": False,
    "actor_rollout_ref.rollout.enforce_eager": True,
    "actor_rollout_ref.rollout.free_cache_engine": False,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
}


def fill_in(config: DictConfig, ray_cpus: int) -> None:
    """Complete a composed trainer configuration for a CPU run, in place.

    Args:
        config: verl's whole configuration.
        ray_cpus: Number of logical CPUs that Ray is told to have when the user set none. verl reserves far more of
            them than it uses.

    Raises:
        ConfigError: The CPU platform was only detected, and the run joins a cluster that may have accelerators; or
            the engine would serve adapters.
    """
    key, rank = adapter_rank(config)
    if rank:
        raise ConfigError(
            f"{key}={rank} on the CPU platform: SGLang 0.5.12 serves adapters on GPUs only; leave it out, or set "
            "actor_rollout_ref.model.lora.merge=True"
        )
    cluster = cluster_address(config.ray_kwargs.ray_init.get("address"))
    if cluster and os.environ.get(DETECTED):
        raise ConfigError(
            f"this machine has no accelerator, and the run joins Ray's cluster at {cluster}; say which platform the "
            "cluster has: VERL_PLATFORM=nvidia (or another), or VERL_PLATFORM=cpu"
        )
    if others := [f"{name}={os.environ[name]}" for name in SPEED if _is_set_otherwise(name)]:
        print(f"verl-multiturn: on this CPU the environment's {', '.join(others)} counts", file=sys.stderr)
    with open_dict(config):
        for key, value in _FORCED.items():
            OmegaConf.update(config, key, value)
        rollout = config.actor_rollout_ref.rollout
        sglang = {**_SGLANG, **dict(rollout.engine_kwargs.get("sglang") or {})}
        OmegaConf.update(config, "actor_rollout_ref.rollout.engine_kwargs.sglang", sglang, force_add=True)
        model = config.actor_rollout_ref.model
        attention = OmegaConf.select(model, "override_config.attn_implementation")
        if attention in (None, "flash_attention_2", "flash_attention_3"):
            OmegaConf.update(model, "override_config.attn_implementation", "sdpa", force_add=True)
        if not rollout.checkpoint_engine.custom_backend_module:
            _choose_checkpoint_engine(rollout.checkpoint_engine, config.trainer.v1.trainer_mode)
        ray_init = config.ray_kwargs.ray_init
        if cluster:
            return  # a running cluster keeps the resources that it was started with
        if ray_init.get("include_dashboard") is None:
            ray_init.include_dashboard = False  # nobody looks at it, and on a busy machine it is what fails first
        if ray_init.get("num_gpus") is None:
            ray_init.num_gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
            ray_init.num_gpus += rollout.n_gpus_per_node * rollout.nnodes  # servers apart from the trainer
        if ray_init.get("num_cpus") is None:
            ray_init.num_cpus = ray_cpus
        executable = "ray_kwargs.ray_init.runtime_env.py_executable"
        if is_trainer() and OmegaConf.select(config, executable) is None and (own := ray_executable()) is not None:
            OmegaConf.update(config, executable, own, force_add=True)


def _is_set_otherwise(name: str) -> bool:
    """Return whether a variable of OpenMP has another value than the platform would give it."""
    return name.startswith("OMP_") and os.environ.get(name, SPEED[name]).lower() != SPEED[name]


def _choose_checkpoint_engine(engine: DictConfig, mode: str) -> None:
    """Let gloo carry weights to engines that are apart; what carries them on GPUs needs an accelerator."""
    apart = mode.endswith("separate_async")
    if apart and engine.backend not in ("naive", "nccl", "gloo"):  # verl's default, that of the recipes' mode, and ours
        print(
            f"verl-multiturn: checkpoint_engine.backend={engine.backend!r} needs an accelerator; on this CPU gloo "
            "carries the weights, unless checkpoint_engine.custom_backend_module is set",
            file=sys.stderr,
        )
    engine.backend = "gloo" if apart else "naive"
    engine.custom_backend_module = _CHECKPOINT_ENGINE if apart else None

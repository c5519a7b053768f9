"""Settings of verl that a CPU run needs: a few are forced, the others only fill in missing ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_multiturn.cpu.ray_start import adapt_start
from verl_multiturn.cpu_processes.environment import DETECTED, SPEED
from verl_multiturn.cpu_processes.handle import ray_executable
from verl_multiturn.errors import ConfigError
from verl_multiturn.processes.driver import is_trainer
from verl_multiturn.runs.threads import CHOSEN
from verl_multiturn.verl_bridge.settings import adapter_rank, cluster_address, teacher_devices

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
ATTENTION = {
    "prefill_attention_backend": "shared_prefix_prefill",
    "decode_attention_backend": "shared_prefix_decode",
}
"""Names of `cpu/attention.py` in SGLang's registry, by the setting that gets one.

They are two, and beside `attention_backend`: SGLang would take a name that is in both settings for the backend
itself, and runs Triton's kernels with every backend that it does not know.
"""
_CHECKPOINT_ENGINE = "verl_multiturn.cpu.checkpoint_engine"
_PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
_FORCED_ENGINE = {"enforce_eager": True, "free_cache_engine": False, "tensor_model_parallel_size": 1}
"""Settings of every engine, that of a teacher, too."""
# Forced settings, whatever a GPU recipe sets: verl and SGLang cannot run on a CPU without them.
_FORCED = {
    "trainer.device": "cpu",
    "actor_rollout_ref.model.use_remove_padding": False,
    "critic.model.use_remove_padding": False,
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile": False,
    "critic.fsdp.use_torch_compile": False,
    **{f"actor_rollout_ref.rollout.{name}": value for name, value in _FORCED_ENGINE.items()},
}


def fill_in(config: DictConfig, ray_cpus: int) -> None:
    """Complete a composed trainer configuration for a CPU run, in place.

    Args:
        config: verl's whole configuration.
        ray_cpus: Number of logical CPUs that Ray assumes when the user set none. verl reserves far more of
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
        _fill_engine(rollout)
        if teachers := teacher_devices(config):
            for teacher in config.distillation.teacher_models.values():
                teacher.inference.update(_FORCED_ENGINE)  # verl reads it of each
                _fill_engine(teacher.inference)
        model = config.actor_rollout_ref.model
        attention = OmegaConf.select(model, "override_config.attn_implementation")
        if attention in (None, "flash_attention_2", "flash_attention_3"):
            OmegaConf.update(model, "override_config.attn_implementation", "sdpa", force_add=True)
        _choose_prefix_tree(rollout)
        if not rollout.checkpoint_engine.custom_backend_module:
            _choose_checkpoint_engine(rollout.checkpoint_engine, config.trainer.v1.trainer_mode)
        ray_init = config.ray_kwargs.ray_init
        if cluster:
            return  # a running cluster keeps the resources that it was started with
        if is_trainer():
            adapt_start()
        if ray_init.get("include_dashboard") is None:
            ray_init.include_dashboard = False  # it has no reader, and on a busy machine it fails first
        if ray_init.get("num_gpus") is None:
            ray_init.num_gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
            ray_init.num_gpus += rollout.n_gpus_per_node * rollout.nnodes + teachers  # servers apart from the trainer
        if ray_init.get("num_cpus") is None:
            ray_init.num_cpus = ray_cpus
        executable = "ray_kwargs.ray_init.runtime_env.py_executable"
        if is_trainer() and OmegaConf.select(config, executable) is None and (forked := ray_executable()) is not None:
            OmegaConf.update(config, executable, forked, force_add=True)


def _fill_engine(rollout: DictConfig) -> None:
    """Fill in SGLang's settings of an engine, where the user has none."""
    own = dict(OmegaConf.select(rollout, "engine_kwargs.sglang") or {})
    OmegaConf.update(rollout, "engine_kwargs.sglang", {**_SGLANG, **_attention(own), **own}, force_add=True)


def _attention(own: Mapping[str, Any]) -> dict[str, str]:
    """Return our attention as SGLang's settings, unless the user's name one, or SGLang would not find it."""
    if not {"attention_backend", *ATTENTION}.isdisjoint(own):
        return {}
    if not (package := os.environ.get(_PACKAGE, "")).startswith("verl_multiturn."):
        # Our package makes SGLang's processes import verl, and so this room.
        print(f"verl-multiturn: {_PACKAGE}={package!r}: attention is SGLang's torch_native, slower", file=sys.stderr)
        return {}
    return ATTENTION


def _is_set_otherwise(name: str) -> bool:
    """Return whether the user gave a variable of OpenMP another value than the platform would."""
    given = os.environ.get(name, SPEED[name])
    is_ours = name == "OMP_NUM_THREADS" and given == os.environ.get(CHOSEN)
    return name.startswith("OMP_") and given.lower() != SPEED[name] and not is_ours


def _choose_prefix_tree(rollout: DictConfig) -> None:
    """Let training compute common prefixes once where it is exact: a CPU has proven it, and no GPU has run it yet."""
    custom = rollout.get("custom")
    ours = custom.get("multiturn") if isinstance(custom, Mapping) else custom
    given = ours.get("prefix_tree") if isinstance(ours, Mapping) else ours
    if given is None:  # the start-up check refuses other sections by name
        OmegaConf.update(rollout, "custom.multiturn.prefix_tree", "auto", force_add=True)


def _choose_checkpoint_engine(engine: DictConfig, mode: str) -> None:
    """Let gloo carry weights to engines that are apart; the GPUs' way needs an accelerator."""
    apart = mode.endswith("separate_async")
    if apart and engine.backend not in ("naive", "nccl", "gloo"):  # verl's default, that of the recipes' mode, and ours
        print(
            f"verl-multiturn: checkpoint_engine.backend={engine.backend!r} needs an accelerator; on this CPU gloo "
            "carries the weights, unless checkpoint_engine.custom_backend_module is set",
            file=sys.stderr,
        )
    engine.backend = "gloo" if apart else "naive"
    engine.custom_backend_module = _CHECKPOINT_ENGINE if apart else None

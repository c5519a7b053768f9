"""Logical CPUs: how many a run reserves in Ray, and how many Ray has."""

from __future__ import annotations

import sys

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.settings import cluster_address, teacher_devices
from verl_multiturn.verl_bridge.startup.view import RunView, is_dry_start


def required_ray_cpus(config: DictConfig) -> dict[str, int]:
    """Return how many logical CPUs verl 0.9.1's V1 trainer reserves in Ray, by their use."""
    devices = config.trainer.n_gpus_per_node * config.trainer.nnodes
    rollout = config.actor_rollout_ref.rollout
    standalone = rollout.nnodes * rollout.n_gpus_per_node
    backend = OmegaConf.select(config, "transfer_queue.backend.storage_backend")
    units = OmegaConf.select(config, "transfer_queue.backend.SimpleStorage.num_data_storage_units", default=8)
    parts = {
        "TransferQueue's controller": 1,
        "TransferQueue's storage (transfer_queue.backend.SimpleStorage.num_data_storage_units)": (
            int(units) if backend == "SimpleStorage" else 0
        ),
        "training workers, 3 for each device": 3 * devices,
        "standalone rollout workers, 2 for each device": 2 * standalone,
        "teachers (distillation), 3 for each device": 3 * teacher_devices(config),
        "starting actors": 1,
    }
    return {name: count for name, count in parts.items() if count}


def check_ray_cpus(run: RunView) -> None:
    """Refuse a local Ray with fewer logical CPUs than verl reserves: the run would wait without an end.

    For a cluster with fewer only a warning is printed, since it may grow; one that cannot be joined is refused.
    """
    run.require_stack()
    from ray._private.utils import get_num_cpus

    ray_init = run.config.ray_kwargs.ray_init
    cluster = cluster_address(ray_init.get("address"))
    if not run.is_v1 or (cluster or "").startswith("ray://"):
        return  # Other trainers reserve other numbers; a cluster behind `ray://` is not joined only to count.
    if is_dry_start() and (cluster or (not ray_init.get("num_cpus") and _is_for_another_machine(run))):
        return
    if cluster:
        have = _cluster_cpus(ray_init.get("address") or "auto")
    else:
        have = ray_init.get("num_cpus") or int(get_num_cpus())
    parts = required_ray_cpus(run.config)
    need = sum(parts.values())
    if have >= need:
        return
    listed = "; ".join(f"{count} {name}" for name, count in parts.items())
    problem = f"Ray has {have} logical CPUs and this run reserves {need}, so it would never start: {listed}."
    if cluster:
        print(f"\nverl-multiturn: the cluster at {cluster}: {problem}\n", file=sys.stderr)
        return
    raise ConfigError(
        f"{problem} Set ray_kwargs.ray_init.num_cpus={need} (logical CPUs need not exist), or fewer storage units"
    )


def _is_for_another_machine(run: RunView) -> bool:
    """Return whether a run needs GPUs, and this machine has none."""
    import torch

    return bool(run.value("trainer.device") != "cpu" and not torch.cuda.is_available())


def _cluster_cpus(address: str) -> int:
    import ray

    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except ConnectionError as error:
        raise ConfigError(f"Ray's cluster cannot be joined: {error}; start it, or set RAY_ADDRESS=local") from error
    try:
        return int(ray.cluster_resources().get("CPU", 0))
    finally:
        ray.shutdown()

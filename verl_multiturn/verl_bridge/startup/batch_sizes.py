"""The checks that refuse sizes which verl 0.9.1's V1 trainer can divide only after minutes, or not at all.

The trainer pads each batch to whole mini-batches (`_get_required_batch_multiple`), so a `train_batch_size` that is no
multiple of the mini-batch is accepted. A mini-batch itself is divided among the data-parallel ranks and then into
micro-batches (`engine_workers.py`, `train_mini_batch`), and there verl asserts that nothing is left over.
"""

from __future__ import annotations

import math
import warnings

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic

from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.startup.our_trainer import our_mode

_ACTOR = "actor_rollout_ref.actor"


def check_batch_sizes(config: DictConfig) -> None:
    """Check the batch sizes, and the size of an engine, of a run with verl's V1 trainer.

    Args:
        config: verl's whole configuration, with a trainer that ours extends.

    Raises:
        ConfigError: a batch, or the number of GPUs, cannot be divided as the trainer will divide it.
    """
    _check_sync_steps(config)
    _check_engine_size(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl tells it itself when the algorithm has no critic
        sections = [_ACTOR, "critic"] if need_critic(config) else [_ACTOR]
    for section in sections:
        _check_mini_batch(config, section)


def _check_engine_size(config: DictConfig) -> None:
    """Check that whole engines fit on the GPUs; verl notices only when the models are loaded, or waits for ever."""
    rollout, key = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    apart = our_mode(config) == "separate_async"
    pools = [(rollout, key)] if apart else []
    # In separate_async, too, the trainer's GPUs have engines, which validate and help out.
    pools += [(config.trainer, "trainer")] if not apart or config.actor_rollout_ref.get("hybrid_engine", True) else []
    sizes = {
        f"{key}.{size}": rollout[size]
        for size in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    }
    each = math.prod(sizes.values())
    shown = " × ".join(f"{name}={size}" for name, size in sizes.items() if size != 1)
    for where, named in pools:
        devices = where.nnodes * where.n_gpus_per_node
        if devices % each:
            raise ConfigError(
                f"{shown}: an engine takes {each} GPUs, and {named}.nnodes={where.nnodes} × {named}.n_gpus_per_node="
                f"{where.n_gpus_per_node} gives {devices}, which is no multiple of it; engines of 1 GPU always fit"
            )


def _check_sync_steps(config: DictConfig) -> None:
    mode = our_mode(config)
    key = f"trainer.v1.{mode}.parameter_sync_step"
    batch, steps = config.data.train_batch_size, OmegaConf.select(config, key)
    if steps is None:
        return
    if mode == "separate_async":
        mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
        if batch != steps * mini:
            raise ConfigError(
                f"data.train_batch_size={batch}, {key}={steps} and {_ACTOR}.ppo_mini_batch_size={mini}: the trainer "
                f"separate_async needs their product {steps * mini} as train_batch_size; change one of the three"
            )
    elif steps != 1:
        raise ConfigError(
            f"{key}={steps!r}: only the trainer separate_async makes several updates in a step. After the first one, "
            f"the engines of {mode!r} stand still, and the second may wait for ever; leave it out"
        )


def _check_mini_batch(config: DictConfig, section: str) -> None:
    part, n = OmegaConf.select(config, section), config.actor_rollout_ref.rollout.n
    ranks = _data_parallel_ranks(config, part)
    mini = part.ppo_mini_batch_size
    if not ranks or not isinstance(mini, int):
        return
    rows = mini * n
    named = f"{section}.ppo_mini_batch_size={mini} with actor_rollout_ref.rollout.n={n}"
    if rows % ranks:
        raise ConfigError(
            f"{named}: a mini-batch has {rows} rows, which cannot be divided equally among {ranks} data-parallel "
            f"ranks; make {mini} times {n} a multiple of {ranks}"
        )
    micro = part.ppo_micro_batch_size_per_gpu
    each = rows // ranks
    if not part.use_dynamic_bsz and micro and each % micro:
        raise ConfigError(
            f"{named}: each of {ranks} data-parallel ranks gets {each} rows of a mini-batch, and "
            f"{section}.ppo_micro_batch_size_per_gpu={micro} does not divide them; choose a divisor of {each}, or set "
            f"{section}.use_dynamic_bsz=True"
        )


def _data_parallel_ranks(config: DictConfig, part: DictConfig) -> int:
    """Return the number of data-parallel ranks of an actor or a critic; 0 where it is not known."""
    devices = int(config.trainer.n_gpus_per_node * config.trainer.nnodes)
    if part.strategy in ("fsdp", "fsdp2"):
        # The actor's section is `fsdp_config`, and there verl's older key, beside the section, wins.
        older = part.get("ulysses_sequence_parallel_size") or 1 if "fsdp_config" in part else 1
        engine = part.get("fsdp_config") or part.get("fsdp") or {}
        split = older if older > 1 else engine.get("ulysses_sequence_parallel_size") or 1
    elif part.strategy == "megatron":
        if part.megatron.get("dynamic_context_parallel"):
            return 1
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        split = math.prod(part.megatron.get(size) or 1 for size in sizes)
    else:
        return 0
    return devices // int(split) if devices % split == 0 else 0  # verl itself refuses the rest

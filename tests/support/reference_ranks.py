"""Two ranks on the CPU, each with its part of an actor and of a reference: the reference after a reset.

Call it as `python -m tests.support.reference_ranks fsdp|fsdp2 FOLDER`. It prints a JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

RANKS = 2


def make(kind: str, seed: int, kept: bool) -> Any:
    """Return a sharded model: a root with parameters of its own, and two layers.

    Args:
        kind: `fsdp` or `fsdp2`.
        seed: Seed of its weights.
        kept: Whether gathered parameters are kept after a pass (`reshard_after_forward=False`).
    """
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(5, 5) for _ in range(2)]
    model = torch.nn.Sequential(torch.nn.Embedding(7, 5), *layers, torch.nn.Linear(5, 3, bias=False))
    model.register_buffer("scale", torch.full((1,), float(seed)))
    model.register_buffer("unsaved", torch.full((1,), float(seed)), persistent=False)
    if kind == "fsdp":
        strategy = ShardingStrategy.SHARD_GRAD_OP if kept else ShardingStrategy.FULL_SHARD
        policy = ModuleWrapPolicy({torch.nn.Linear})
        offload = CPUOffload(offload_params=False)
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, sharding_strategy=strategy, cpu_offload=offload, device_id="cpu"
        )
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not kept)
    return fully_shard(model, mesh=mesh, reshard_after_forward=not kept)


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        given: torch.Tensor = model(torch.arange(7))
        return given.clone()


def update(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def worker_of(rank: int, actor: Any, optimizer: Any, reference: Any) -> Any:
    from verl_multiturn.verl_bridge.trainer.reference_worker import ReferenceWorker

    worker: Any = object.__new__(ReferenceWorker)
    worker._rank, worker._world_size = rank, RANKS
    worker.actor = SimpleNamespace(engine=SimpleNamespace(module=actor, optimizer=optimizer))
    worker.ref = SimpleNamespace(engine=SimpleNamespace(module=reference))
    return worker


def _run(rank: int, kind: str, folder: str, results: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    found: dict[str, Any] = {}
    for kept in (False, True):
        actor, reference = make(kind, 1, kept), make(kind, 2, kept)
        optimizer = torch.optim.AdamW(actor.parameters(), lr=0.1)
        worker = worker_of(rank, actor, optimizer, reference)
        before = worker.look_at_reference()
        outputs(reference)  # the parameters that FSDP gathers here must not be used after the reset
        update(actor, optimizer)
        found["before"] = float((outputs(actor) - outputs(reference)).abs().max())
        states = len(optimizer.state)
        worker.reset_reference()
        moment = outputs(actor)
        found[f"after, kept={kept}"] = float((outputs(reference) - moment).abs().max())
        found["states"] = [states > 0, len(optimizer.state)]
        found["buffers"] = [float(reference.scale), float(reference.unsaved)]
        update(actor, optimizer)
        found["apart"] = float((outputs(reference) - moment).abs().max())
        found["moved"] = float((outputs(actor) - moment).abs().max())
        place = f"{folder}/{kept}"
        worker.save_reference(place, 3)
        other = worker_of(rank, actor, optimizer, make(kind, 4, kept))
        outputs(other.ref.engine.module)
        found["step"] = other.load_reference(place)
        found[f"loaded, kept={kept}"] = float((outputs(other.ref.engine.module) - moment).abs().max())
        found["faults"] = before
    results.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def main(kind: str, folder: str) -> None:
    """Print the findings of each rank."""
    import verl  # noqa: F401  # before the fork, so that it is imported once

    import verl_multiturn.verl_bridge.trainer.reference_worker  # noqa: F401

    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    ranks = [context.Process(target=_run, args=(rank, kind, folder, results)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    print(json.dumps(dict(sorted(results.get() for _ in ranks))))


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
    main(*sys.argv[1:])

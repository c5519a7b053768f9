"""The checkpoint engine `gloo`: sends the trainer's weights to servers in other processes, without an accelerator.

verl imports this module through `checkpoint_engine.custom_backend_module`, which `cpu/defaults.py` sets. For each
transfer there is one gloo group: the first training worker has rank 0 and sends, the servers' workers receive. Weights
travel in buckets, each as its length and its pickled tensors; a length of 0 ends the transfer.
"""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Generator
from datetime import timedelta
from typing import Any

import ray
import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.sglang_rollout.utils import get_named_tensor_buckets

# A transfer of a CPU run takes seconds. When a server dies meanwhile, the trainer fails instead of waiting forever.
_TIMEOUT = timedelta(minutes=5)
_meeting_point: Any = distributed.TCPStore


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """verl's interface over a gloo group.

    Args:
        bucket_size: Most bytes of weights that travel at once.
        is_master: Whether this is the training worker that sends.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._bucket_size = bucket_size
        self._is_master = is_master
        self._store: Any = None
        self._group: Any = None

    def prepare(self) -> dict[str, Any]:
        """Open the group's meeting point on the sender, and return its address."""
        if not self._is_master:
            return {}
        address = ray.util.get_node_ip_address().strip("[]")
        self._store = _meeting_point(address, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        return {"address": address, "port": self._store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return rank, world size and meeting point of each training worker and of each server's worker."""
        size = 1 + rollout_world_size

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            count = len(ranks)
            return {"rank": ranks, "world_size": [size] * count, "meeting_point": [metadata[0]] * count}

        return arguments([0, *[-1] * (actor_wg_world_size - 1)]), arguments(list(range(1, size)))

    def init_process_group(self, rank: int, world_size: int, meeting_point: dict[str, Any]) -> None:
        """Join the group; a rank of -1 stays outside."""
        if rank < 0:
            return
        if self._store is None:
            address, port = meeting_point["address"], meeting_point["port"]
            self._store = _meeting_point(address, port, is_master=False, timeout=_TIMEOUT)
        self._group = distributed.ProcessGroupGloo(self._store, rank, world_size, _TIMEOUT)

    def finalize(self) -> None:
        """Leave the group."""
        self._group = self._store = None

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> None:
        """Send weights, given by name. A training worker outside the group only takes part in gathering them."""
        async for bucket in get_named_tensor_buckets(weights, self._bucket_size):
            named = [(name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor) for name, tensor in bucket]
            if self._group is not None:
                # A view would be pickled with its whole storage; a clone has only its own values.
                self._send(pickle.dumps([(name, tensor.detach().cpu().clone()) for name, tensor in named]))
        if self._group is not None:
            self._send(b"")

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors as they come."""
        while payload := self._receive():
            for name, tensor in pickle.loads(payload):
                yield name, tensor

    def _send(self, payload: bytes) -> None:
        self._broadcast(torch.tensor([len(payload)]))
        if payload:
            self._broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def _receive(self) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        self._broadcast(length)
        payload = torch.empty(int(length), dtype=torch.uint8)
        if len(payload):
            self._broadcast(payload)
        return payload.numpy().tobytes()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast([tensor], distributed.BroadcastOptions()).wait()

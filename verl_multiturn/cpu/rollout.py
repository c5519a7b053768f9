"""`AsyncSGLangRollout` on a CPU: it sends weights by value, since there are no CUDA IPC handles."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Generator
from typing import Any

import torch
from ray.exceptions import RayActorError
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.utils import MultiprocessingSerializer
from torch.distributed.tensor import DTensor
from verl.workers.rollout.sglang_rollout.utils import get_named_tensor_buckets

from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.compat.engine import local_tensor_class
from verl_multiturn.verl_bridge.loops.spmd import AsyncSGLangRollout

_LocalSerializedTensor = local_tensor_class()


class CpuAsyncSGLangRollout(AsyncSGLangRollout):
    """The rollout of the CPU platform, which sends weights as pickled tensors in SGLang's own request.

    There is one tensor-parallel rank, as SGLang has on a CPU.
    """

    async def update_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Send new weights to the engine, bucket by bucket, and empty the engine's cache afterwards.

        Args:
            weights: Names and tensors.
            global_steps: Training step of the weights, which becomes the engine's weight version; None: not set.
            wire_format: Must be `named_tensors`.
            kwargs: Further arguments of verl's; only `peft_config` is looked at.

        Raises:
            ConfigError: There are LoRA adapters to send, or another wire format is requested.
        """
        if kwargs.get("peft_config"):
            raise ConfigError(
                "the CPU platform does not send LoRA adapters; set actor_rollout_ref.model.lora.merge=True"
            )
        if wire_format != "named_tensors":
            raise ConfigError(f"the CPU platform sends whole tensors; wire format {wire_format!r} is not supported")
        await self._init_server_adapter()
        bucket_bytes = int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20
        async for bucket in get_named_tensor_buckets(weights, bucket_bytes):
            named = [(name, _LocalSerializedTensor(values=[_by_value(tensor)])) for name, tensor in bucket]
            payload = MultiprocessingSerializer.serialize(named)
            if self._engine is not None:
                await self._engine.update_weights_from_tensor(
                    UpdateWeightsFromTensorReqInput(serialized_named_tensors=[payload], flush_cache=False)
                )
        if self._engine is not None:
            await self._engine.flush_cache()
            if global_steps is not None:
                with contextlib.suppress(RayActorError):  # the server has died
                    await self.server_actor.set_global_steps.remote(global_steps)


def _by_value(tensor: torch.Tensor) -> bytes:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    # Without the copy, a view would be pickled with its whole storage.
    return pickle.dumps(whole.detach().contiguous().clone())

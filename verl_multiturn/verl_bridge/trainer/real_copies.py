"""`RealCopiesWorker`: verl's training worker, whose saved parameters are copies wherever the live ones lie.

With `parameter_sync_step` of 2 or more, verl's trainer `separate_async` saves the parameters at the step's start. It
restores them whenever it computes `old_log_probs`, so that all updates of a step share one proximal policy. With FSDP2
verl saves `parameter.detach().cpu()`. For a parameter that lies on a CPU already, that is not a copy, but the parameter
itself: the saved one changes with each update, and the proximal policy is silently the current one.

Invariants:
- no saved tensor shares memory with a live parameter or buffer;
- what verl copied already is not copied again.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from verl.experimental.separation.engine_workers import DetachActorWorker


class RealCopiesWorker(DetachActorWorker):
    """verl's `DetachActorWorker`, whose saved parameters do not change with the live ones."""

    @property
    def copy_handler(self) -> Any:
        """Return the function that copies the parameters of a module."""
        return partial(copy_apart, super().copy_handler)


def copy_apart(copy: Any, module: Any) -> Any:
    """Return the result of a function of verl's for a module, with clones of the tensors that are still the live ones.

    Args:
        copy: Function of a module that returns dictionaries, lists and tuples of tensors and other values.
        module: The module; with Megatron a list of modules.
    """
    modules = module if isinstance(module, list) else [module]
    tensors = (tensor for each in modules for tensor in (*each.parameters(), *each.buffers()))
    return _apart(copy(module), _storages(tensors))


def _storages(tensors: Iterable[torch.Tensor]) -> set[tuple[torch.device, int]]:
    """Return where the tensors' memory begins, as pairs of a device and an address."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return {_storage(tensor) for tensor in local if tensor.numel()}


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _apart(saved: Any, live: set[tuple[torch.device, int]]) -> Any:
    """Return saved values in the same dictionaries, lists and tuples, with clones of tensors in live memory."""
    if isinstance(saved, torch.Tensor):
        return saved.clone() if _storage(saved) in live else saved
    if type(saved) is dict:
        return {key: _apart(value, live) for key, value in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)(_apart(value, live) for value in saved)
    return saved

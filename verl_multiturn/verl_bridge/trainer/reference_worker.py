"""verl's training workers, whose reference gets the actor's parameters (`custom.multiturn.reference_reset`).

Actor and reference of verl's fused worker are two FSDP modules in one process. Each rank holds the same part of both,
so that a reset is a copy within each process. Nothing is gathered, and nothing is sent:

    rank 0    actor's part of each parameter  →  reference's part, in place, in the reference's type and memory
    rank 1    the same

The optimizer begins anew with each reset, as in ProRL (arXiv 2505.24864, section on resets of the reference): its state
is empty, and its schedule of learning rates goes on.

Invariants:
- a copy is whole or does not begin: names and shapes of all parts are compared first;
- no part that FSDP gathered before a copy is used after it;
- a file of a reference is never changed in place, since checkpoints may share it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_torch_device
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.trainer.real_copies import RealCopiesWorker

_SHOWN = 3
Shards = Mapping[str, torch.Tensor]
"""A rank's part of each parameter, and of each buffer that checkpoints have, by name."""


def shards_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's part of each parameter and saved buffer of an FSDP module: the live memory, no copies.

    Args:
        module: The module, under FSDP or FSDP2. Parts that it has gathered are released.
    """
    _release_gathered(module)
    with torch.no_grad():
        return {name: _local(tensor.data) for name, tensor in (*module.named_parameters(), *_saved_buffers(module))}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _saved_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer


def _release_gathered(module: torch.nn.Module) -> None:
    """Let a module gather its parameters again at its next use.

    After a pass without gradients FSDP keeps those of the root, or with `reshard_after_forward=False` all of them.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
        elif isinstance(part, FullyShardedDataParallel) and part._is_root is not None:  # it was used before
            handle = part._handle
            if handle is not None and handle.uses_sharded_strategy:
                handle.reshard(True)


def difference(source: Shards, target: Shards) -> str:
    """Return in words how the parts of two models differ in names and shapes; empty: they do not."""
    found = [f"only one of them has {name}" for name in sorted(source.keys() ^ target.keys())]
    for name in sorted(source.keys() & target.keys()):
        if source[name].shape != target[name].shape:
            found.append(f"{name} is {tuple(source[name].shape)} in one and {tuple(target[name].shape)} in the other")
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


@torch.no_grad()
def copy_shards(source: Shards, target: Shards) -> None:
    """Copy the parts of one model into the memory of another one's, in that one's types.

    Raises:
        ConfigError: The two differ in names or shapes; nothing is changed.
    """
    if differs := difference(source, target):
        raise ConfigError(f"the reference cannot get these parameters ({differs}); {_REMEDY}")
    for name, tensor in source.items():
        target[name].copy_(tensor)


_REMEDY = "give actor_rollout_ref.ref the actor's parts, or leave out custom.multiturn.reference_reset"


class ReferenceCopies:
    """Mixin for verl's fused worker of actor and reference; list it before verl's class."""

    # Attributes of verl's worker.
    actor: Any
    ref: Any
    rank: int
    world_size: int

    _saved: tuple[int, Path] | None = None
    """The step of the reference in force, and a file that has it; None: none has."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]  # verl has no types
    def look_at_reference(self) -> str:
        """Return why the reference cannot get the actor's parameters on this rank; empty: it can."""
        return difference(shards_of(self.actor.engine.module), shards_of(self.ref.engine.module))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]  # verl has no types
    def reset_reference(self) -> None:
        """Give the reference the actor's parameters, and let the actor's optimizer begin anew."""
        get_torch_device().synchronize()  # verl may still be moving the actor to the CPU
        copy_shards(shards_of(self.actor.engine.module), shards_of(self.ref.engine.module))
        get_torch_device().synchronize()
        self.actor.engine.optimizer.state.clear()
        self._saved = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]  # verl has no types
    def save_reference(self, folder: str, step: int) -> None:
        """Write this rank's part of the reference into a checkpoint; of one that is in another already, as a link.

        Args:
            folder: Folder for the reference, as an absolute path.
            step: The step whose weights the reference has; 0: those of the run's model, of which nothing is written.
                This rank's disk then loses the file of a checkpoint that is written over.
        """
        path = self._file(Path(folder))
        if not step:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it is not there, or other ranks have files in it
                path.parent.rmdir()
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.with_name(f".{path.name}")
        begun.unlink(missing_ok=True)
        if not self._links(step, begun):
            shards = {name: tensor.cpu() for name, tensor in shards_of(self.ref.engine.module).items()}
            torch.save({"step": step, "shards": shards}, begun)
        os.replace(begun, path)
        self._saved = step, path

    def _links(self, step: int, path: Path) -> bool:
        """Return whether a path could be made a link to the file that has a reference already."""
        if self._saved is None or self._saved[0] != step:
            return False
        try:
            path.hardlink_to(self._saved[1])
        except OSError:  # it is gone, or the disk knows no links
            return False
        return True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]  # verl has no types
    def load_reference(self, folder: str) -> int:
        """Restore this rank's part of the reference from a checkpoint; return its step, 0 where none is there.

        Args:
            folder: Folder for the reference, as an absolute path.

        Raises:
            ConfigError: It is that of another model or of other parts, or other ranks have files there alone.
        """
        path = self._file(Path(folder))
        if not path.is_file():
            if path.parent.is_dir():
                raise ConfigError(
                    f"{str(path)!r} is missing, expected the reference of rank {self.rank} of {self.world_size}; "
                    "resume with as many ranks as the checkpoint has, from a whole copy of it"
                )
            return 0
        saved = torch.load(path, map_location="cpu", weights_only=True)
        copy_shards(saved["shards"], shards_of(self.ref.engine.module))
        get_torch_device().synchronize()
        self._saved = int(saved["step"]), path
        return int(saved["step"])

    def _file(self, folder: Path) -> Path:
        return folder / f"reference_world_size_{self.world_size}_rank_{self.rank}.pt"


class ReferenceWorker(ReferenceCopies, ActorRolloutRefWorker):
    """verl's `ActorRolloutRefWorker`, whose reference can be reset."""


class DetachedReferenceWorker(ReferenceCopies, RealCopiesWorker):
    """verl's worker of `separate_async`, whose reference can be reset."""


WORKERS = {ActorRolloutRefWorker: ReferenceWorker, DetachActorWorker: DetachedReferenceWorker}
"""Our worker in the place of each of verl's."""

"""The weights of a checkpoint of verl's FSDP trainers, put together from the files of its ranks.

Invariants:
- each tensor keeps the data type that the trainer gave it;
- nothing of a checkpoint is executed: its files are read as tensors, never as programs.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_multiturn.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def read_shards(paths: Sequence[Path], tell: Callable[[str], None]) -> dict[str, Tensor]:
    """Return the whole tensors of a checkpoint by name.

    Args:
        paths: The files of all ranks, in their order.
        tell: Gets a line about each file.

    Raises:
        ConfigError: A file is damaged, the ranks do not fit together, or a tensor is split in a way that only a tensor
            parallel trainer makes.
    """
    read = []
    for number, path in enumerate(paths):
        tell(f"reading rank {number} of {len(paths)}: {path}")
        read.append(_read(path))
    first = read[0]
    for path, tensors in zip(paths, read, strict=True):
        if tensors.keys() != first.keys():
            odd = sorted(tensors.keys() ^ first.keys())[0]
            raise ConfigError(f"{str(path)!r} and {str(paths[0])!r} differ in {odd!r}; name another checkpoint")
    return {name: _whole(name, [tensors[name] for tensors in read], paths) for name in first}


def _read(path: Path) -> Mapping[str, Any]:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # It says of each file that no processes are connected, which nothing here needs.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    kinds = [DeviceMesh, DTensor, DTensorSpec, TensorMeta, Replicate, Shard]
    with contextlib.suppress(ImportError):
        from torch.distributed.tensor.placement_types import _StridedShard

        kinds.append(_StridedShard)
    try:
        with torch.serialization.safe_globals(kinds):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        why = str(error).splitlines()[0] if "GLOBAL" not in str(error) else "it holds more than tensors"
        raise ConfigError(
            f"{str(path)!r} cannot be read as a rank's weights ({why}); name another checkpoint"
        ) from None
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{str(path)!r} is torn or damaged ({why}); name another checkpoint") from None
    if (
        not isinstance(found, Mapping)
        or not found
        or not all(isinstance(each, torch.Tensor) for each in found.values())
    ):
        raise ConfigError(f"{str(path)!r} holds no weights by name; expected what verl's FSDP trainer saves")
    return found


def _whole(name: str, parts: list[Any], paths: Sequence[Path]) -> Tensor:
    """Return a tensor of which each rank has its part, or the whole."""
    import torch
    from torch.distributed.tensor import DTensor

    if not isinstance(parts[0], DTensor):
        for path, part in zip(paths, parts, strict=True):
            if not torch.equal(part, parts[0]):
                raise ConfigError(f"{str(path)!r}: {name!r} is another than that of rank 0; name another checkpoint")
        plain: Tensor = parts[0].detach()
        return plain
    placements, mesh = parts[0].placements, parts[0].device_mesh.mesh
    split = [axis for axis, placement in enumerate(placements) if placement.is_shard()]
    if len(split) > 1 or any(type(placement).__name__ not in ("Shard", "Replicate") for placement in placements):
        raise ConfigError(f"{name!r} is split as {placements}; expected shards of FSDP or HSDP in one dimension alone")
    if not split:
        copied: Tensor = parts[0].to_local().detach()
        return copied
    # The ranks along the axis that is split; at all other axes of the mesh, which hold copies, the first.
    line = mesh.movedim(split[0], -1).reshape(-1, mesh.shape[split[0]])[0]
    pieces = [parts[rank].to_local().detach() for rank in line.tolist()]
    whole = torch.cat(pieces, dim=placements[split[0]].dim) if len(pieces) > 1 else pieces[0]
    if whole.shape != parts[0].shape:
        raise ConfigError(f"{name!r} has the shape {list(whole.shape)} when it is put together; expected "
                          f"{list(parts[0].shape)}; name another checkpoint")  # fmt: skip
    return whole

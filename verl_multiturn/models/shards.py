"""The weights of a checkpoint of verl's FSDP trainers, put together from the files of its ranks.

Invariants:
- each tensor keeps the data type that the trainer gave it;
- nothing of a checkpoint is executed: its files are read as tensors, never as programs;
- a file's checksums hold, which torch writes and does not compare; and each file was written by the rank in its name.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_multiturn.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_MOST_TIMES = 4
"""Largest size of all tensors of a file, in sizes of the file: tied ones share their bytes."""


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
    _check_ranks(paths, read)
    return {name: _whole(name, [tensors[name] for tensors in read], paths) for name in first}


def _read(path: Path) -> Mapping[str, Any]:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # It warns for each file that no processes are connected, which nothing here needs.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    kinds = [DeviceMesh, DTensor, DTensorSpec, TensorMeta, Replicate, Shard]
    with contextlib.suppress(ImportError):
        from torch.distributed.tensor.placement_types import _StridedShard

        kinds.append(_StridedShard)
    try:
        with zipfile.ZipFile(path) as archive:
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError("a part of it is compressed, which torch does not do")
        with torch.serialization.safe_globals(kinds):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        with zipfile.ZipFile(path) as archive:
            if (torn := archive.testzip()) is not None:
                raise ValueError(f"the checksum of its part {torn!r} is another one")
    except pickle.UnpicklingError as error:
        why = str(error).splitlines()[0] if "GLOBAL" not in str(error) else "it holds more than tensors"
        raise ConfigError(
            f"{str(path)!r} cannot be read as a rank's weights ({why}); name another checkpoint"
        ) from None
    except Exception as error:  # damaged bytes may raise anything
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{str(path)!r} is torn or damaged ({why}); name another checkpoint") from None
    if not isinstance(found, Mapping) or not found or not all(_is_plain(each) for each in found.values()):
        raise ConfigError(f"{str(path)!r} holds no weights by name; expected what verl's FSDP trainer saves")
    own = (part.to_local() if isinstance(part, DTensor) else part for part in found.values())
    if sum(part.numel() * part.element_size() for part in own) > _MOST_TIMES * path.stat().st_size:
        raise ConfigError(f"{str(path)!r} holds tensors that are larger than the file, as views of few bytes are; name "
                          "another checkpoint")  # fmt: skip
    return found


def _is_plain(part: Any) -> bool:
    """Return whether a part of a file is a tensor whose values lie in the file."""
    import torch

    return isinstance(part, torch.Tensor) and part.layout is torch.strided and part.device.type == "cpu"


def _check_ranks(paths: Sequence[Path], read: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a file that another rank wrote than the one in its name, as one that was copied under a wrong name.

    Raises:
        ConfigError: There is one.
    """
    from torch.distributed.tensor import DTensor

    for rank, (path, tensors) in enumerate(zip(paths, read, strict=True)):
        mesh = next((part.device_mesh for part in tensors.values() if isinstance(part, DTensor)), None)
        if mesh is None or (place := mesh.get_coordinate()) is None:
            continue
        if (wrote := int(mesh.mesh[tuple(place)])) != rank:
            raise ConfigError(
                f"{str(path)!r} was written by rank {wrote}, and not by rank {rank}; copy it again from the node that "
                "wrote it"
            )


def _split_axes(part: Any) -> list[int]:
    return [axis for axis, placement in enumerate(part.placements) if placement.is_shard()]


def _line(part: Any) -> list[int]:
    """Return the ranks along the axis that is split; at all other axes of the mesh, which hold copies, the first."""
    mesh, axis = part.device_mesh.mesh, _split_axes(part)[0]
    ranks: list[int] = mesh.movedim(axis, -1).reshape(-1, mesh.shape[axis])[0].tolist()
    return ranks


def _whole(name: str, parts: list[Any], paths: Sequence[Path]) -> Tensor:
    """Return a tensor of which each rank has its part, or the whole."""
    import torch
    from torch.distributed.tensor import DTensor

    for path, part in zip(paths, parts, strict=True):
        own = part.to_local() if isinstance(part, DTensor) else part
        if own.is_floating_point() and not bool(torch.isfinite(own).all()):
            raise ConfigError(f"{str(path)!r}: {name!r} has values that are no finite numbers, as of a training that "
                              "diverged; name an earlier checkpoint")  # fmt: skip
    if not isinstance(parts[0], DTensor):
        for path, part in zip(paths, parts, strict=True):
            if not torch.equal(part, parts[0]):
                raise ConfigError(f"{str(path)!r}: {name!r} is another than that of rank 0; name another checkpoint")
        plain: Tensor = parts[0].detach()
        return plain
    placements, split = parts[0].placements, _split_axes(parts[0])
    if len(split) > 1 or any(type(placement).__name__ not in ("Shard", "Replicate") for placement in placements):
        raise ConfigError(f"{name!r} is split as {placements}; expected shards of FSDP or HSDP in one dimension alone")
    if not split:
        copied: Tensor = parts[0].to_local().detach()
        return copied
    pieces = [parts[rank].to_local().detach() for rank in _line(parts[0])]
    whole = torch.cat(pieces, dim=placements[split[0]].dim) if len(pieces) > 1 else pieces[0]
    if whole.shape != parts[0].shape:
        raise ConfigError(f"{name!r} has the shape {list(whole.shape)} when it is put together; expected "
                          f"{list(parts[0].shape)}; name another checkpoint")  # fmt: skip
    return whole

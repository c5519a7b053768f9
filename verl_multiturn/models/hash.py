"""`model_hash`: which weights these are, whatever the files they lie in.

Invariants:
- two folders have the same hash if they have the same tensors: name, data type, shape and bytes. Into how many files
  they are split, in which order, and other files in the folder change nothing;
- it reads the files' own bytes and needs neither torch nor safetensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LENGTH = 8
"""Bytes at the start of a file that give the length of its header."""
_LONGEST_HEADER = 32 << 20
"""Bytes of a header; safetensors itself allows 100 MB, of which JSON makes gigabytes."""
_BLOCK = 64 << 20


@dataclass(frozen=True)
class _TensorPlace:
    """A tensor in a file: its description, and its first byte and the one after its last."""

    path: Path
    dtype: str
    shape: list[int]
    begin: int
    end: int


def model_hash(folder: Path) -> str:
    """Return the hash of the weights of a Hugging Face folder: 16 hexadecimal digits.

    It is blake2b over all tensors in the order of their names: of each its name, data type, shape and bytes.

    Args:
        folder: A folder with `model.safetensors`, or with several files and their index.

    Raises:
        ConfigError: The folder has no such weights, or one of the files is damaged or missing.
    """
    places = dict[str, _TensorPlace]()
    for path in weight_files(folder):
        for name, place in _tensors_of(path):
            if name in places:
                raise ConfigError(f"{str(path)!r} has {name!r}, as {str(places[name].path)!r} has; remove one of them")
            places[name] = place
    hashed = hashlib.blake2b(digest_size=8)
    for name in sorted(places):
        place = places[name]
        hashed.update(json.dumps([name, place.dtype, place.shape]).encode())
        for block in _blocks(place):
            hashed.update(block)
    return hashed.hexdigest()


def tensor_sizes(folder: Path) -> tuple[int, int]:
    """Return the number of tensors in a Hugging Face folder, and that of their values, by the files' headers.

    Raises:
        ConfigError: The folder has no such weights, or one of the files is damaged.
    """
    places = [place for path in weight_files(folder) for _, place in _tensors_of(path)]
    return len(places), sum(place.end - place.begin for place in places)


def tensor_shapes(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Return data type and shape of each tensor in a Hugging Face folder by its name, by the files' headers.

    Raises:
        ConfigError: The folder has no such weights, or one of the files is damaged.
    """
    found = (each for path in weight_files(folder) for each in _tensors_of(path))
    return {name: (place.dtype, place.shape) for name, place in found}


def weight_files(folder: Path) -> list[Path]:
    """Return the files of safetensors that hold the weights of a Hugging Face folder.

    Raises:
        ConfigError: There are none, the index cannot be read or names a file that is missing, or there is an index
            beside a `model.safetensors` that it does not name: programs differ in which of them they load.
    """
    single, index = folder / WEIGHTS, folder / INDEX
    if not index.is_file():
        if not single.is_file():
            raise ConfigError(f"{str(folder)!r} has neither {WEIGHTS} nor {INDEX}; name a folder with weights")
        return [single]
    try:
        files = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{str(index)!r} is no index of weights ({error!r}); write the folder again") from None
    if odd := [name for name in files if Path(name).name != name or not name]:
        raise ConfigError(
            f"{INDEX} of {str(folder)!r} names {odd[0]!r}, and not a file of the folder itself; write the folder again"
        )
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise ConfigError(f"{str(folder)!r} lacks {missing[0]!r}, which {INDEX} names; write the folder again")
    if single.is_file() and WEIGHTS not in files:
        raise ConfigError(f"{str(folder)!r} has {WEIGHTS}, and an {INDEX} that does not name it; remove one of them")
    return [folder / name for name in files]


def _tensors_of(path: Path) -> Iterator[tuple[str, _TensorPlace]]:
    """Yield the name and the place of each tensor of a file.

    Raises:
        ConfigError: The file is damaged or cut short.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            if _LENGTH + length > size:
                raise ValueError("it is cut short")
            if length > _LONGEST_HEADER:
                raise ValueError(f"its header has {length:,} bytes; {_LONGEST_HEADER:,} are allowed")
            header: dict[str, dict[str, Any]] = json.loads(file.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = (_LENGTH + length + int(offset) for offset in entry["data_offsets"])
            place = _TensorPlace(path, str(entry["dtype"]), [int(length) for length in entry["shape"]], begin, end)
            if not begin <= end <= size or (end - begin) * 8 % max(math.prod(place.shape), 1):
                raise ValueError(f"it is cut short at {name!r}")
            yield name, place
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} is no whole file of safetensors ({error}); write the folder again") from None


def _blocks(place: _TensorPlace) -> Iterator[bytes]:
    """Yield the bytes of a tensor, some at a time."""
    if place.begin == place.end:
        return
    with place.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for begin in range(place.begin, place.end, _BLOCK):
            yield content[begin : min(begin + _BLOCK, place.end)]

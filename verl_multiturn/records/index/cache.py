"""Storage of indices: in the user's own cache, never beside the records, where other users could forge one.

    $XDG_CACHE_HOME/verl-multiturn/view/KEY.index          ~/.cache/… where it is not set

A kept index is a line of JSON, its state, and behind it the table as Parquet.

Invariants:
- the folder is this user's alone (mode 0700, no link); where it cannot be had, an index stays in memory;
- a kept index is checked against the records, never believed. Its state names each file that it was made of: device,
  inode, size and time of change, and the digest of the bytes read from a file of lines (`Sources.fits`). It is taken if
  every file is as it was, or has only grown: then its earlier bytes are read again, and their digest is compared;
- the state has the digest of the table behind it, so that one that was changed, or is another run's, is not taken.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from verl_multiturn.paths import cache_folder, open_regular, whole_file

ROWS = 100_000
"""Rows of one part of an index, and of a group in the file."""

Identity = list[int]
"""Device, inode, size and time of the last change of a file; the last cannot be set as `touch` sets a file's age."""
_MOST_FILES, _MOST_BYTES = 64, 4_000_000_000
"""Indices and bytes that are kept; those that were used last stay."""
_BLOCK, _END = 1 << 20, 1 << 12


class CacheFolderError(OSError):
    """There is no folder that is this user's alone."""


def kept_at(folder: Path) -> Path:
    """Return where the index of a folder of records, or of a single file, is kept.

    Raises:
        CacheFolderError: There is no place for it.
    """
    key = hashlib.blake2b(os.fsencode(os.path.realpath(folder)), digest_size=16).hexdigest()
    return _own_folder() / f"{key}.index"


def _own_folder() -> Path:
    try:
        folder = cache_folder("view")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except (OSError, RuntimeError) as error:  # there may be no home folder
        raise CacheFolderError(f"no index is kept: {error}; set XDG_CACHE_HOME to a folder of yours") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise CacheFolderError(f"no index is kept: {str(folder)!r} is open to others; chmod 700 it, or remove it")
    return folder


def keep(folder: Path, state: Mapping[str, Any], table: pa.Table) -> None:
    """Keep the index of a folder of records.

    Args:
        folder: The folder, or a single file.
        state: The state that `kept` returns, in JSON's values.
        table: Its rows.

    Raises:
        CacheFolderError: There is no place for it.
        OSError: It cannot be written.
    """
    place = kept_at(folder)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", row_group_size=ROWS)
    packed = sink.getvalue()
    with whole_file(place) as half, half.open("wb") as file:
        file.write(json.dumps({**state, "table": _digest_of(packed)}).encode() + b"\n")
        file.write(packed)
    _make_room(place)


def kept(folder: Path) -> tuple[dict[str, Any], pq.ParquetFile] | None:
    """Return state and table of the index of a folder of records, as they were kept; None: there is none that is whole.

    Args:
        folder: The folder, or a single file.
    """
    try:
        place = kept_at(folder)
        with open_regular(place) as file:
            state, packed = json.loads(file.readline()), pa.py_buffer(file.read())
        if state["table"] != _digest_of(packed):
            return None
        place.touch()
        return state, pq.ParquetFile(pa.BufferReader(packed))
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None


def _digest_of(packed: pa.Buffer) -> str:
    return hashlib.sha256(packed).hexdigest()


def _make_room(kept: Path) -> None:
    """Remove the indices that were not used for longest, so that the cache stays small.

    Args:
        kept: The index that was just written; it stays.
    """
    files = []
    for path in kept.parent.iterdir():
        with contextlib.suppress(OSError):
            files.append((path.lstat().st_mtime_ns, path.lstat().st_size, path))
    size = 0
    for number, (_, own, path) in enumerate(sorted(files, reverse=True)):
        size += own
        if path != kept and (number >= _MOST_FILES or size > _MOST_BYTES):
            with contextlib.suppress(OSError):
                path.unlink()


def identity(path: Path) -> Identity | None:
    """Return which file this is, and how it is; None: there is none."""
    try:
        return identity_of(path.stat())
    except OSError:
        return None


def identity_of(found: os.stat_result) -> Identity:
    """Return which file was looked at, and how it is."""
    return [found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns]


def digest_of_end(file: BinaryIO, size: int) -> str:
    """Return the digest of the last of a file's first bytes: one that was written anew has others.

    Args:
        file: The file.
        size: How many first bytes are meant.
    """
    file.seek(max(0, size - _END))
    return hashlib.blake2b(file.read(min(size, _END)), digest_size=16).hexdigest()


def digest_of_begin(file: BinaryIO, size: int) -> hashlib._Hash:
    """Return the digest of a file's first bytes, to which more can be added.

    Args:
        file: The file.
        size: How many bytes.
    """
    file.seek(0)
    digest = hashlib.sha256()
    while size > 0 and (block := file.read(min(size, _BLOCK))):
        digest.update(block)
        size -= len(block)
    return digest

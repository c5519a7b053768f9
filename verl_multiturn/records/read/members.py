"""Gzip members of a file of records: read one by one, so that a damaged one costs itself alone."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from verl_multiturn.paths import open_regular
from verl_multiturn.records.read.lines import LONGEST_LINE, alone_if_large

_GZIP = 31  # zlib's `wbits` for a member with its header and checksum
_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00"
"""How each member of ours begins."""
_CHUNK = 1 << 15
_PIECE = 1 << 20
"""Bytes that are unpacked at a time; zlib doubles its buffer, and a large one is taken twice."""
_LARGE = 8 << 20
"""Bytes from which on a member is unpacked while no other one is."""
LONGEST_MEMBER = LONGEST_LINE
"""Largest number of bytes that are unpacked of a member; a larger one is of a stranger, or holds a longer line."""
_MOST_TRIED = 1 << 30
"""Bytes that are read or unpacked at places that look like a member and are none, before a file's rest is given up."""


_MOST_SEARCHED = 1 << 28
"""Bytes without the beginning of a member, after which a file's rest is given up."""


class Member(NamedTuple):
    """A member that was read, or a stretch of the file that is none."""

    offset: int
    end: int
    lines: list[bytes] | None
    """Its lines that are not empty; None: it cannot be read."""
    problem: str = ""
    """Why it cannot be read."""
    cost: int = 0
    """Bytes that were read and unpacked to find it out."""


def read_members(path: Path, start: int = 0) -> Iterator[Member]:
    """Yield the members of a file from an offset on. After an unreadable part, the next member is searched for.

    Args:
        path: The file.
        start: Offset of a member, or of the end of the last one that was read.

    Raises:
        OSError: The file cannot be read.
    """
    with open_regular(path, within=path.parent) as file:
        tried = 0
        while True:
            file.seek(start)
            if not file.read(1):
                return
            member = _read(file, start)
            if member.lines is not None:
                yield member
                start = member.end
                continue
            following = _next_header(file, start + 1)
            while following is not None and tried < _MOST_TRIED:
                candidate = _read(file, following)
                if candidate.lines is not None:
                    break
                tried += candidate.cost
                following = _next_header(file, following + 1)
            given_up = following is not None and tried >= _MOST_TRIED
            end = file.seek(0, 2) if following is None or given_up else following
            yield Member(start, end, None, member.problem)
            start = end


def member_at(path: Path, offset: int) -> Member:
    """Return the member at an offset.

    Raises:
        OSError: The file cannot be read.
    """
    with open_regular(path, within=path.parent) as file:
        return _read(file, offset)


def _read(file: IO[bytes], offset: int) -> Member:
    """Read the member at an offset; of one that cannot be read, `end` is how far it was looked at."""
    file.seek(offset)
    unpack, parts, size = zlib.decompressobj(_GZIP), [], 0

    def none(problem: str) -> Member:
        return Member(offset, file.tell(), None, problem, file.tell() - offset + size)

    with contextlib.ExitStack() as stack:
        while not unpack.eof:
            chunk = unpack.unconsumed_tail or file.read(_CHUNK)
            if not chunk:
                return none("the file ends within it, as a killed process or a full disk does")
            try:
                parts.append(unpack.decompress(chunk, min(_PIECE, LONGEST_MEMBER + 1 - size)))
            except zlib.error as error:
                return none(f"it is damaged: {error}")
            size += len(parts[-1])
            if size > LONGEST_MEMBER:
                return none(f"it holds more than {LONGEST_MEMBER} bytes")
            if size - len(parts[-1]) <= _LARGE < size:
                stack.enter_context(alone_if_large(size))
        text = b"".join(parts)
        parts.clear()
        lines = [line for line in text.split(b"\n") if line]
    return Member(offset, file.tell() - len(unpack.unused_data), lines)


def _next_header(file: IO[bytes], start: int) -> int | None:
    """Return the next offset at which a member of ours may begin; None: there is none in the next 256 MiB."""
    file.seek(start)
    held = b""
    end = start + _MOST_SEARCHED
    while start < end and (chunk := file.read(_CHUNK)):
        held += chunk
        found = held.find(_HEADER)
        if found >= 0:
            return start + found
        kept = held[-len(_HEADER) + 1 :]
        start += len(held) - len(kept)
        held = kept
    return None

"""`Sources`: the files that an index was made of, how far each was read, and whether each is unchanged."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from verl_multiturn.errors import CertificateError
from verl_multiturn.paths import open_regular
from verl_multiturn.records.index.cache import digest_of_begin, digest_of_end, identity, identity_of
from verl_multiturn.records.read.lines import LONGEST_LINE

_BLOCK = 16_000_000


class Sources:
    """The files of one folder.

    Args:
        place: The folder; of a single file, the folder that it lies in.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._read: dict[str, int] = {}
        """Where the next line of a file begins, by the file's name; so with the next two."""
        self._digests: dict[str, hashlib._Hash | str] = {}
        """Digest of the bytes before it; a text where nothing was added yet."""
        self._ends: dict[str, str] = {}
        """Digest of the end of that, which is looked at before more is read."""
        self._identities: dict[str, Any] = {}
        """Which file it was when it was read."""
        self._endless: set[str] = set()
        """Files that have a line which is too long."""

    def note(self, name: str) -> None:
        """Note a file that is read as a whole, as it is now."""
        self._identities[name] = identity(self._place / name)

    def lines(self, name: str) -> Iterator[tuple[int, bytes]]:
        """Yield the whole lines of a file that were not read yet, with their places.

        Raises:
            OSError: The file cannot be read.
            CertificateError: A line is too long; nothing of the file is read any more.
        """
        start = self._read.get(name, 0)
        if name in self._endless:
            return
        with open_regular(self._place / name, within=self._place) as file:
            found = os.fstat(file.fileno())
            if found.st_size <= start:
                return
            self._identities[name] = identity_of(found)
            digest = self._digest(name, file, start)
            for at, lines in _blocks(file, start):
                if lines is None:
                    self._endless.add(name)
                    raise CertificateError(
                        f"the line at byte {at} has more than {LONGEST_LINE} bytes; the rest is left out"
                    )
                digest.update(lines)
                self._read[name] = at + len(lines)
                for text in lines.split(b"\n")[:-1]:
                    yield at, text
                    at += len(text) + 1
            self._ends[name] = digest_of_end(file, self._read.get(name, 0))

    def _digest(self, name: str, file: BinaryIO, start: int) -> hashlib._Hash:
        """Return the digest of a file's first bytes, to which more is added."""
        held = self._digests.get(name)
        if held is None or isinstance(held, str):
            held = self._digests[name] = digest_of_begin(file, start)
        return held

    def has_changed(self) -> bool:
        """Return whether another file is under a name than the one that was read, or less of it."""
        return any(map(self._is_other, self._identities))

    def _is_other(self, name: str) -> bool:
        found, before = identity(self._place / name), self._identities[name]
        if found is None:
            return True
        if found == before:
            return False
        if found[:2] != before[:2] or found[2] <= before[2] or name not in self._read:
            return True
        try:
            with open_regular(self._place / name, within=self._place) as file:
                return digest_of_end(file, self._read[name]) != self._ends[name]
        except OSError:
            return True

    def state(self) -> dict[str, Any]:
        """Return the state that `fits` reads, in JSON's values."""
        digests = {name: held if isinstance(held, str) else held.hexdigest() for name, held in self._digests.items()}
        read = {name: [at, digests[name]] for name, at in self._read.items()}
        return {"read": read, "identities": self._identities, "ends": self._ends}

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Take the state of a kept index; return whether each file is unchanged, or has only grown.

        Raises:
            OSError: A file cannot be read.
            KeyError, TypeError, ValueError: The state is none of ours.
        """
        self._identities, self._ends = dict(state["identities"]), dict(state["ends"])
        self._read = {name: read for name, (read, _) in state["read"].items()}
        self._digests = {name: digest for name, (_, digest) in state["read"].items()}
        others = self._identities.keys() - self._read.keys()
        return all(map(self._is_as_read, self._read)) and all(
            identity(self._place / name) == self._identities[name] for name in others
        )

    def _is_as_read(self, name: str) -> bool:
        """Return whether a file of lines still begins with the bytes read from it."""
        with open_regular(self._place / name, within=self._place) as file:
            found = identity_of(os.fstat(file.fileno()))
            if found != self._identities[name]:
                made = digest_of_begin(file, self._read[name])
                if file.tell() != self._read[name] or made.hexdigest() != self._digests[name]:
                    return False
                self._digests[name] = made
                self._identities[name] = found
        return True


def _blocks(file: BinaryIO, start: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield position and text of whole lines from a position on, many at a time; None: a line is too long."""
    file.seek(start)
    at, size = start, 0
    parts: list[bytes] = []
    while block := file.read(_BLOCK):
        end = block.rfind(b"\n") + 1
        if end:
            lines = b"".join([*parts, block[:end]])
            yield at, lines
            at += len(lines)
            parts, size = [], 0
        parts.append(block[end:])
        size += len(block) - end
        if size > LONGEST_LINE:
            yield at, None
            return

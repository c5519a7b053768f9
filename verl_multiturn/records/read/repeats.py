"""Conversations that a folder has twice, as after a copy of a file: the first one counts, and a fault names the others.

A conversation is in one worker's files, and begins and ends once. Files are read in the order of their names, those
with lines beside them first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.records.read.contradictions import place_fault, unbegun_fault
from verl_multiturn.records.summaries import HAS_RECORD

_BITS = {event: 1 << at for at, event in enumerate(("begin", "end", "cancel", "raise", "drop"))}
"""Events of which a conversation has one each."""
_BEGUN, _ENDED = _BITS["begin"], _BITS["end"]


class Repeats:
    """Which files the conversations of some folders are in, and which came again."""

    def __init__(self) -> None:
        self._homes: dict[str, str] = {}
        """Request id → path of its files without their endings."""
        self._found: dict[tuple[Path, str], dict[str, None]] = {}
        self._odd: dict[str, None] = {}

    @property
    def faults(self) -> list[str]:
        """The exclusions, a sentence for each file and the one that has the same conversations; and the oddities."""
        return [*(repeat_fault(path, list(ids), home) for (path, home), ids in self._found.items()), *self._odd]

    def is_again(self, request_id: str, path: Path, stem: str) -> bool:
        """Return whether a conversation is in the files of another stem, too, and note it.

        Args:
            request_id: Its request id.
            path: The file in which it was read.
            stem: Stem of that file.
        """
        return self._is_elsewhere(request_id, path, str(path.with_name(stem)))

    def _is_elsewhere(self, request_id: str, path: Path, own: str) -> bool:
        home = self._homes.setdefault(request_id, own)
        if home == own:
            return False
        self._note(request_id, path, home)
        return True

    def once(self, lines: Iterable[Mapping[str, Any]], path: Path, stem: str) -> Iterator[dict[str, Any]]:
        """Yield the lines of a file without those of conversations of other files, and without those that come again.

        Args:
            lines: Its lines, as `schema.Line`.
            path: The file.
            stem: Stem of that file.
        """
        own = str(path.with_name(stem))
        seen: dict[str, int] = {}
        places: dict[int, str] = {}
        others: dict[str, None] = {}
        for line in lines:
            request_id = line["request_id"]
            if self._is_elsewhere(request_id, path, own):
                continue
            if bit := _BITS.get(line["event"], 0):
                before = seen.get(request_id, 0)
                if before & bit:
                    self._note(request_id, path, str(path))
                    continue
                seen[request_id] = before | bit
                if line["event"] in HAS_RECORD and line["offset"] is not None:
                    at = (line["offset"] << 31) + (line["place"] or 0)
                    if places.setdefault(at, request_id) != request_id:
                        others[request_id] = None
            yield dict(line)
        if unbegun := [name for name, bits in seen.items() if bits & _ENDED and not bits & _BEGUN]:
            self._odd[unbegun_fault(path, unbegun)] = None
        if others:
            self._odd[place_fault(path, list(others))] = None

    def note_within(self, request_id: str, path: Path) -> None:
        """Note that a file has the record of a conversation twice."""
        self._note(request_id, path, str(path))

    def _note(self, request_id: str, path: Path, home: str) -> None:
        self._found.setdefault((path, home), {})[request_id] = None


def repeat_fault(path: Path, request_ids: list[str], home: str) -> str:
    """Return the sentence about conversations that a file has again.

    Args:
        path: The file.
        request_ids: Their request ids.
        home: The file, or the stem of the files, that has them first.
    """
    where = "it has them twice" if home == str(path) else f"{home!r} has them, too"
    many = f"{len(request_ids)} conversations are" if len(request_ids) > 1 else "a conversation is"
    return f"{path}: {many} left out, that of request {request_ids[0]!r} first: {where}"

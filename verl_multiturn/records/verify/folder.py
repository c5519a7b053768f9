"""Verification of files and folders of records, as `verl-multiturn verify` does it.

Each record is verified by itself, and compared with the files beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from verl_multiturn.errors import CertificateError
from verl_multiturn.paths import open_regular
from verl_multiturn.records import schema
from verl_multiturn.records.read.files import PACKED, PLAIN, RecordFile, folder_of, record_files
from verl_multiturn.records.read.lines import fitted, parse_line, read_lines
from verl_multiturn.records.read.members import Member, read_members
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.repeats import Repeats
from verl_multiturn.records.summaries import ends_of
from verl_multiturn.records.verify.joins import JoinCheck
from verl_multiturn.records.verify.record import VerifiedRecord, verify_record
from verl_multiturn.records.verify.sessions import SessionCheck

_TORN = "a torn line, as a process leaves that is killed or finds the disk full"
_EXPECTED = "expected a file of records, or a folder of them"


class RecordCheck(NamedTuple):
    """The result for one record of a file."""

    file: Path
    place: str
    """Number of its line, from 1; in a packed file the offset of its gzip member, and the number of its line there."""
    verified: VerifiedRecord | None
    """None: it cannot be verified."""
    problem: str = ""
    """Why it cannot be."""
    request_id: str = ""
    is_torn: bool = False
    """Whether it was only not written to its end, as a process leaves it that is killed or finds the disk full."""
    is_repeated: bool = False
    """Whether its conversation was there already: in another file of the folder, or in this one."""


def verify_files(paths: Iterable[Path]) -> Iterator[RecordCheck]:
    """Verify files of records, one by one.

    Args:
        paths: Files, folders of them, and run folders.

    Raises:
        CertificateError: A path is neither, a file cannot be read or holds no record, or a line is valid JSON but no
            valid record.
        ConfigError: A path does not exist.
    """
    for path in paths:
        folder = folder_of(path)
        files = record_files(folder)
        if not files:
            raise CertificateError(f"{str(path)!r} holds no *{PACKED} and no *{PLAIN}; {_EXPECTED}")
        beside, sessions = JoinCheck(folder), SessionCheck(folder)
        for fault in beside.faults:
            yield RecordCheck(folder, "join", None, fault)
        for fault in sessions.faults:
            yield RecordCheck(folder, "sessions", None, fault)
        for torn in sessions.torn:
            yield RecordCheck(torn, "its end", None, _TORN, is_torn=True)
        repeats = Repeats()
        for file in sorted(files, key=lambda each: not RecordFile(each).has_lines):
            yield from verify_file(file, beside, repeats, sessions)
        for name, what in sessions.alone():
            yield RecordCheck(folder, f"session {name}", None, what, name)


def verify_file(
    path: Path,
    beside: JoinCheck | None = None,
    repeats: Repeats | None = None,
    sessions: SessionCheck | None = None,
) -> Iterator[RecordCheck]:
    """Verify a file of records; see `verify_files`.

    Args:
        path: The file.
        beside: The joins of its folder; None: they are not looked at.
        repeats: The conversations of the folder's other files; None: they are not looked at.
        sessions: The lines of the folder's sessions; None: they are not looked at.
    """
    found = False
    beside, repeats = beside or JoinCheck(path), repeats or Repeats()
    seen: set[str] = set()
    try:
        if path.exists() and not path.is_file():  # a pipe or a device may have no end
            raise CertificateError(f"{str(path)!r} is no plain file; {_EXPECTED}")
        path = Path(os.path.realpath(path)) if path.is_symlink() and beside.folder is None else path
        open_regular(path, within=path.parent).close()  # behind a link out are other lines, too
        ends, scores = _lines_of(path)
        for place, at, text in _texts(path):
            if isinstance(text, Member):
                what = f"a gzip member of {text.end - text.offset} bytes: {text.problem}"
                yield RecordCheck(path, place, None, what, is_torn=text.end == path.stat().st_size)
                ends = {key: line for key, line in ends.items() if not text.offset <= key[0] < text.end}
                continue
            try:
                record = parse_line(text)
                found = found or record is not None
                verified = None if record is None else verify_record(record)
            except CertificateError as error:
                raise CertificateError(f"{path}:{place}: {error}") from error
            name = "" if record is None else str(record.get("request_id", ""))
            line = ends.pop(at, None)
            if verified is not None and (repeats.is_again(name, path, RecordFile(path).stem) or name in seen):
                yield RecordCheck(path, place, None, f"request {name!r} is there already", name, is_repeated=True)
                continue
            seen.add(name)
            if verified is not None and record is not None:
                fit = fitted(schema.Record, record)
                verified.violations.extend(beside.violations(fit, line, scores.get(name)))
                verified.violations.extend([] if sessions is None else sessions.violations(fit))
            yield RecordCheck(path, place, verified, "" if verified else _TORN, name, verified is None)
    except OSError as error:
        raise CertificateError(f"{str(path)!r} cannot be read: {error}") from error
    if not found:
        raise CertificateError(f"{str(path)!r} holds no record; expected one a line, as JSON")
    for (offset, number), line in ends.items():
        what = f"there is no record; by a line one of request {line['request_id']!r} is here"
        yield RecordCheck(path, f"offset {offset}:{number + 1}", None, what, line["request_id"])


def _lines_of(path: Path) -> tuple[dict[tuple[int, int], Mapping[str, Any]], dict[str, float]]:
    """Return the lines of the ends of a file's records by their places, and the scores by request id."""
    if not RecordFile(path).is_packed:
        return {}, {}
    lines = list(Records(path).lines())
    return ends_of(lines), {line["request_id"]: line["score"] for line in lines if _has_score(line)}


def _has_score(line: Mapping[str, Any]) -> bool:
    return line["event"] == "score" and isinstance(line["score"], float)


def _texts(path: Path) -> Iterator[tuple[str, tuple[int, int], bytes | Member]]:
    """Yield each record of a file: its place in words, its place as lines have it, and its text.

    A member that cannot be read is yielded as it is.
    """
    if not RecordFile(path).is_packed:
        for line in read_lines(path):
            yield str(line.number), (line.offset, 0), line.text
        return
    for member in read_members(path):
        if member.lines is None:
            yield f"offset {member.offset}", (member.offset, 0), member
            continue
        for number, text in enumerate(member.lines):
            yield f"offset {member.offset}:{number + 1}", (member.offset, number), text

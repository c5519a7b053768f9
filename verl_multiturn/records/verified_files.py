"""Verification of files and folders of records, as `verl-multiturn verify` does it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from verl_multiturn.errors import CertificateError
from verl_multiturn.records.files import PACKED, PLAIN, RecordFile, folder_of, record_files
from verl_multiturn.records.lines import parse_line, read_lines
from verl_multiturn.records.members import Member, read_members
from verl_multiturn.records.verification import VerifiedRecord, verify_record

_TORN = "a torn line, as a process leaves that is killed or finds the disk full"
_EXPECTED = "expected a file of records, or a folder of them"


class Verdict(NamedTuple):
    """What became of one record of a file."""

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


def verify_files(paths: Iterable[Path]) -> Iterator[Verdict]:
    """Verify files of records, one by one.

    Args:
        paths: Files, folders of them, and run folders.

    Raises:
        CertificateError: A path is neither, a file cannot be read or holds no record, or a line is valid JSON but no
            valid record.
        ConfigError: A path does not exist.
    """
    for path in paths:
        files = record_files(folder_of(path))
        if not files:
            raise CertificateError(f"{str(path)!r} holds no *{PACKED} and no *{PLAIN}; {_EXPECTED}")
        for file in files:
            yield from verify_file(file)


def verify_file(path: Path) -> Iterator[Verdict]:
    """Verify a file of records; see `verify_files`."""
    found = False
    try:
        if path.exists() and not path.is_file():  # a pipe or a device may have no end
            raise CertificateError(f"{str(path)!r} is no plain file; {_EXPECTED}")
        for place, text in _texts(path):
            if isinstance(text, Member):
                what = f"a gzip member of {text.end - text.offset} bytes: {text.problem}"
                yield Verdict(path, place, None, what, is_torn=text.end == path.stat().st_size)
                continue
            try:
                record = parse_line(text)
                found = found or record is not None
                verified = None if record is None else verify_record(record)
            except CertificateError as error:
                raise CertificateError(f"{path}:{place}: {error}") from error
            name = "" if record is None else str(record.get("request_id", ""))
            yield Verdict(path, place, verified, "" if verified else _TORN, name, verified is None)
    except OSError as error:
        raise CertificateError(f"{str(path)!r} cannot be read: {error}") from error
    if not found:
        raise CertificateError(f"{str(path)!r} holds no record; expected one a line, as JSON")


def _texts(path: Path) -> Iterator[tuple[str, bytes | Member]]:
    """Yield the place and the text of each record of a file; a member that cannot be read as it is."""
    if not RecordFile(path).is_packed:
        for line in read_lines(path):
            yield str(line.number), line.text
        return
    for member in read_members(path):
        if member.text is None:
            yield f"offset {member.offset}", member
            continue
        for number, text in enumerate(filter(None, member.text.split(b"\n")), start=1):
            yield f"offset {member.offset}:{number}", text

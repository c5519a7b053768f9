"""Verification of recorded conversations against the receipts that were recorded with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from verl_multiturn.certificate.check import Row, Violation, verify
from verl_multiturn.certificate.conversations import unjoined
from verl_multiturn.certificate.json_numbers import read_integers, read_numbers
from verl_multiturn.certificate.receipts import Receipts
from verl_multiturn.certificate.records import parse_line, rows_of
from verl_multiturn.describe import show
from verl_multiturn.errors import CertificateError
from verl_multiturn.row_keys import RowKey

LONGEST_LINE = 1 << 28
"""Largest number of bytes in a line, so that a file without line ends does not fill the memory."""
_COLUMNS = ("ids", "mask", "versions", "turn_ids", "sources")
_OF_ROWS = (*_COLUMNS, "logprobs", "prompt_length", "receipts")
_EXPECTED = "expected a file of records, or a folder of them"


@dataclass(frozen=True)
class VerifiedRecord:
    """The result of verifying one record; without violations the record is right."""

    sampled_tokens: int
    """Number of tokens in the record's receipts, of all its rows."""
    violations: list[Violation]


def verify_record(record: Mapping[str, Any]) -> VerifiedRecord:
    """Verify one record of `certificate.records`, with all rows of its conversation.

    Args:
        record: the record, as `json.loads` returns it.

    Raises:
        CertificateError: this is not a record, or its receipts are missing or cannot be read.
    """
    try:
        request_id, uid = str(record["request_id"]), str(record.get("uid", ""))
        rows = [(_row(columns, request_id, uid), columns.get("receipts")) for columns in rows_of(record)]
        if "rows" in record and (more := [name for name in _OF_ROWS if name in record]):
            raise ValueError(f"it has {more[0]} beside rows, so that readers may take one for the other")
    except KeyError as error:
        raise CertificateError(f"no record of a conversation: {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise CertificateError(f"no record of a conversation: {error}") from error
    if not rows or any(receipts is None for _, receipts in rows):
        raise CertificateError(f"the record of request {request_id} holds no receipts; it cannot be verified")
    try:
        known = [Receipts.from_json(receipts) for _, receipts in rows if receipts is not None]
    except ValueError as error:
        raise CertificateError(f"the record of request {request_id} holds {error}") from error
    found = [each for (row, _), receipts in zip(rows, known, strict=True) for each in verify(row, receipts)]
    by_key = {RowKey(uid, str(own.session_id), str(index)): own for index, own in enumerate(known)}
    disordered = [
        Violation(request_id, None, None, f"row {index} of the record has the receipts of row {receipts.row}")
        for index, receipts in enumerate(known)
        if receipts.row != index
    ]
    if "session" in record:
        disordered += _unlisted(request_id, record["session"], [place for _, place in known[0].ledger])
    sampled = sum(len(g.ids) for receipts in known for g in receipts.generations)
    return VerifiedRecord(sampled, found + disordered + unjoined(by_key))


def _unlisted(request_id: str, session: Any, places: list[int | str]) -> list[Violation]:
    """Return a violation if a session lists its completions in other places than its receipts do."""
    try:
        listed = [each["place"] for each in session["completions"]]
    except (KeyError, TypeError) as error:
        raise CertificateError(f"the record of request {request_id} has no session: {error!r}") from error
    if listed == places:
        return []
    return [Violation(request_id, None, None, f"its session lists the places {listed}, its receipts {places}")]


def _row(columns: Mapping[str, Any], request_id: str, uid: str) -> Row:
    ids, mask, versions, turn_ids, sources = (read_integers(name, columns[name]) for name in _COLUMNS)
    length = columns["prompt_length"]
    if type(length) is not int or not 0 <= length <= len(ids):
        raise ValueError(f"prompt_length is {show(length, 100)}, expected an integer from 0 to {len(ids)}")
    return Row(
        prompt_ids=ids[:length],
        response_ids=ids[length:],
        mask=mask,
        logprobs=read_numbers("logprobs", columns["logprobs"]),
        versions=versions,
        whole=True,
        turn_ids=turn_ids,
        sources=sources,
        request_id=request_id,
        uid=uid,
    )


def verify_files(paths: Iterable[Path]) -> Iterator[tuple[Path, int, VerifiedRecord | None]]:
    """Verify JSONL files of records, line by line.

    Args:
        paths: files, and folders of `*.jsonl` files.

    Yields:
        A file, the number of a line in it, from 1, and the line's verdict; None for a torn line, as a killed process
        leaves.

    Raises:
        CertificateError: a path is neither, a file cannot be read or holds no record, or a line is valid JSON but no
            valid record.
    """
    for path in paths:
        try:
            files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        except OSError as error:  # a name that is too long, or a folder above it that is closed
            raise CertificateError(f"{str(path)!r} cannot be read: {error}") from error
        if not files:
            raise CertificateError(f"{str(path)!r} holds no *.jsonl; {_EXPECTED}")
        for file in files:
            for number, verdict in verify_file(file):
                yield file, number, verdict


def verify_file(path: Path) -> Iterator[tuple[int, VerifiedRecord | None]]:
    """Verify a JSONL file of records, line by line; see `verify_files`."""
    found = False
    try:
        if path.exists() and not path.is_file():  # a pipe or a device may have no end
            raise CertificateError(f"{str(path)!r} is no plain file; {_EXPECTED}")
        with path.open("rb") as file:
            for number, line in _lines(file, path):
                try:
                    record = parse_line(line)
                    found = found or record is not None
                    yield number, None if record is None else verify_record(record)
                except CertificateError as error:
                    raise CertificateError(f"{path}:{number}: {error}") from error
    except OSError as error:
        raise CertificateError(f"{str(path)!r} cannot be read: {error}") from error
    if not found:
        raise CertificateError(f"{str(path)!r} holds no record; expected one a line, as JSON")


def _lines(file: IO[bytes], path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that is not empty, without the mark that an editor may put before the first.

    Raises:
        CertificateError: a line does not end.
    """
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise CertificateError(
                f"{path}:{number}: a line of more than {LONGEST_LINE} bytes; expected one record a line, as JSON"
            )
        if text := line.decode("utf-8-sig" if number == 1 else "utf-8", errors="replace").strip():
            yield number, text

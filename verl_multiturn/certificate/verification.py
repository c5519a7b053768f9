"""Verification of recorded conversations against the receipts that were recorded with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_multiturn.certificate.check import Row, Violation, verify
from verl_multiturn.certificate.conversations import unjoined
from verl_multiturn.certificate.receipts import Receipts
from verl_multiturn.certificate.records import parse_line, rows_of
from verl_multiturn.errors import CertificateError

_COLUMNS = ("ids", "mask", "logprobs", "versions", "turn_ids", "sources")


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
        CertificateError: this is no record, or its receipts are missing or cannot be read.
    """
    try:
        request_id, uid = str(record["request_id"]), str(record.get("uid", ""))
        rows = [(_row(columns, request_id, uid), columns.get("receipts")) for columns in rows_of(record)]
    except (KeyError, TypeError, ValueError) as error:
        raise CertificateError(f"no record of a conversation: {type(error).__name__}: {error}") from error
    if not rows or any(receipts is None for _, receipts in rows):
        raise CertificateError(f"the record of request {request_id} holds no receipts; it cannot be verified")
    try:
        known = [Receipts.from_json(receipts) for _, receipts in rows if receipts is not None]
    except ValueError as error:
        raise CertificateError(f"the record of request {request_id} holds {error}") from error
    found = [each for (row, _), receipts in zip(rows, known, strict=True) for each in verify(row, receipts)]
    by_name = {f"{uid}_{receipts.session_id}_{index}": receipts for index, receipts in enumerate(known)}
    disordered = [
        Violation(request_id, None, None, f"row {index} of the record has the receipts of row {receipts.row}")
        for index, receipts in enumerate(known)
        if receipts.row != index
    ]
    if "session" in record:
        disordered += _unlisted(request_id, record["session"], [place for _, place in known[0].ledger])
    sampled = sum(len(g.ids) for receipts in known for g in receipts.generations)
    return VerifiedRecord(sampled, found + disordered + unjoined(by_name))


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
    ids, mask, logprobs, versions, turn_ids, sources = (np.asarray(columns[name]) for name in _COLUMNS)
    length = int(columns["prompt_length"])
    return Row(
        prompt_ids=ids[:length],
        response_ids=ids[length:],
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        whole=True,
        turn_ids=turn_ids,
        sources=sources,
        request_id=request_id,
        uid=uid,
    )


def verify_file(path: Path) -> Iterator[tuple[int, VerifiedRecord | None]]:
    """Verify a JSONL file of records, line by line.

    Args:
        path: the file.

    Yields:
        The number of a line, from 1, and its verdict; None for a torn line, as a killed process leaves.

    Raises:
        CertificateError: the file cannot be read or holds no record, or a line is valid JSON but no valid record.
    """
    if path.is_dir():
        raise CertificateError(f"{str(path)!r} is a folder; expected files of records, such as {path}/*.jsonl")
    found = False
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                record = parse_line(line)
                if record is None:
                    yield number, None
                    continue
                found = True
                if not isinstance(record, dict):
                    raise CertificateError(f"{path}:{number}: expected an object, got {type(record).__name__}")
                try:
                    yield number, verify_record(record)
                except CertificateError as error:
                    raise CertificateError(f"{path}:{number}: {error}") from error
    except OSError as error:
        raise CertificateError(f"{str(path)!r} cannot be read: {error}") from error
    if not found:
        raise CertificateError(f"{str(path)!r} holds no record; expected one a line, as JSON")

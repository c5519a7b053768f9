"""Verification of recorded conversations against the receipts of the engine's output.

A record of schema 2 holds each token once. Of every generation it has the digest of the receipt, which was made when
the engine answered. So the receipts are built again from the tokens of the rows, their digests are compared, and then
each row is verified as a batch is (`certificate.check`).

Anybody may have written a record: integers are integers, no `true` and no `1.0`, and nothing is in it that the
schema does not name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from pydantic import ValidationError

from verl_multiturn.certificate.check import CertificateRow, Violation, verify
from verl_multiturn.certificate.conversations import unjoined
from verl_multiturn.certificate.receipts import CAUSES, GenerationPlace, Receipt, Receipts
from verl_multiturn.config import USER
from verl_multiturn.describe import show
from verl_multiturn.errors import CertificateError
from verl_multiturn.records import schema
from verl_multiturn.records.json_text import dumps, plain
from verl_multiturn.records.read.lines import flaw_of, require_schema
from verl_multiturn.records.rows import columns
from verl_multiturn.rollout.limits import INVALID, StopReason
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.tools.running.results import CallStatus

_INTEGERS = ("ids", "mask", "versions", "turn_ids", "sources")
_SOURCES = range(6)
_REASONS, _STATUSES = [str(each) for each in StopReason], [str(each) for each in CallStatus]
_AFTER_A_CUT = {StopReason.TURN_LENGTH, StopReason.RESPONSE_LENGTH, StopReason.WALL_CLOCK, *INVALID}
"""Reasons for the end of a conversation whose last turn was cut; time may be up, or the engine gone, at any moment."""
_MOST_TOKENS, _TOO_MANY = 1 << 24, 1 << 31


@dataclass(frozen=True)
class VerifiedRecord:
    """The result of verifying one record; without violations the record is right."""

    sampled_tokens: int
    """Number of sampled tokens in the record's rows."""
    violations: list[Violation]


def verify_record(record: Mapping[str, Any]) -> VerifiedRecord:
    """Verify one record, with all rows of its conversation.

    Args:
        record: The record, as `json.loads` returns it, or as it is handed to the writer.

    Raises:
        CertificateError: This is not a record of our schema, or its tokens cannot be read.
    """
    require_schema(record)
    return _Verification(record).run()


def receipts_of(record: Mapping[str, Any]) -> list[Receipts]:
    """Return the receipts of each row of a record, built again from its tokens.

    Raises:
        CertificateError: This is not a record, or its tokens cannot be read.
    """
    return _Verification(record).receipts


def receipts_of_generations(record: Mapping[str, Any]) -> list[Receipt]:
    """Return the receipt of each generation of a record, built again from its tokens.

    Raises:
        CertificateError: This is not a record, or its tokens cannot be read.
    """
    return _Verification(record).generations


class _Verification:
    """The verification of one record.

    Raises:
        CertificateError: This is not a record, or its tokens cannot be read.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        try:
            # As JSON, where a tuple is a list; a number has to be a number.
            checked = schema.Record.model_validate_json(dumps(plain(record)), strict=True)
        except ValidationError as error:
            raise CertificateError(f"no record of a conversation: {flaw_of(error)}") from None
        self._record = checked.model_dump(by_alias=True)
        self._name: str = self._record["request_id"]
        self._found: list[Violation] = []
        self._rows = [self._row(index, row) for index, row in enumerate(self._record["rows"])]
        self.generations = each = [self._receipt(number) for number, _ in enumerate(self._record["generations"])]
        places = [
            GenerationPlace(
                receipt.digest,
                generation["cause"] if generation["row"] is None else generation["row"],
                receipt.role,
            )
            for receipt, generation in zip(each, self._record["generations"], strict=True)
        ]
        self.receipts = [self._receipts(index, each, places) for index, _ in enumerate(self._rows)]

    def run(self) -> VerifiedRecord:
        for row, own in zip(self._rows, self.receipts, strict=True):
            self._found += verify(row, own)
        session = self._record["session"] or {"roles": []}
        trained = session["trained"] if session["roles"] else self._record["trained"] or None
        rows = {RowKey(own.uid, str(own.session_id), str(own.row)): own for own in self.receipts}
        self._found += unjoined(rows, trained)
        if self._record["status"] == "cancelled":
            self._cancelled()
        else:
            self._links()
            self._ends()
            if not self._rows:
                self._add(None, "it has no row")
        sampled = sum(len(receipt.ids) for own in self.receipts for receipt in own.generations)
        return VerifiedRecord(sampled, self._found)

    def _cancelled(self) -> None:
        """Find entries of a cancelled conversation that only one that ended by itself may have."""
        for name in ("rows", "generations", "stop_reason", "valid", "void", "score"):
            if self._record[name]:
                self._add(None, f"it was cancelled, and its {name} is {show(self._record[name], 60)}")

    def _add(self, turn: int | None, what: str) -> None:
        self._found.append(Violation(self._name, turn, None, what))

    def _row(self, index: int, row: Mapping[str, Any]) -> CertificateRow:
        """Return a row with its full columns.

        Raises:
            CertificateError: Its runs, ids and logprobs do not fit each other.
        """
        length, runs = row["prompt_length"], row["runs"]
        try:
            wrong = [run for run in runs if run[0] < 1 or run[1] not in (0, 1) or run[2] < -1 or run[4] not in _SOURCES]
            if wrong or not 0 <= length <= len(row["ids"]):
                found = f"a run {list(wrong[0])}" if wrong else f"prompt_length {length}"
                raise ValueError(f"it has {found}, with {len(row['ids'])} ids")
            full = columns(row)
        except ValueError as error:
            raise CertificateError(f"row {index} of request {self._name} cannot be read: {error}") from None
        ids, mask, versions, turn_ids, sources = (np.array(full[name], np.int64) for name in _INTEGERS)
        return CertificateRow(
            prompt_ids=ids[:length],
            response_ids=ids[length:],
            mask=mask,
            logprobs=np.array(full["logprobs"]),
            versions=versions,
            whole=True,
            turn_ids=turn_ids,
            sources=sources,
            request_id=self._name,
            uid=self._record["uid"],
        )

    def _receipt(self, number: int) -> Receipt:
        """Return the receipt of a generation, built again from its tokens.

        Raises:
            CertificateError: Its tokens cannot be read.
        """
        generation, rows = self._record["generations"][number], self._rows
        row, cause, start, count = (generation[name] for name in ("row", "cause", "start", "tokens"))
        own = [generation[name] for name in ("ids", "logprobs", "versions")]
        bounds = dict.fromkeys(("prompt_tokens", "max_tokens", "tokens"), _TOO_MANY) | {"row": len(rows)}
        for name, most in bounds.items():
            if generation[name] is not None and not 0 <= generation[name] < most:
                self._refuse(number, f"its {name} is {generation[name]}, expected an integer from 0 to {most - 1}")
        is_placed = row is not None
        if (
            is_placed == (cause is not None)
            or is_placed != (start is not None)
            or any((value is None) != is_placed for value in own)
        ):
            self._refuse(number, "expected a row and its start, or a cause and its tokens")
        if is_placed and start < 0:
            self._refuse(number, f"it begins at {start}")
        if not is_placed and cause not in CAUSES:
            self._refuse(number, f"its cause is {show(cause, 40)}, expected one of {list(CAUSES)}")
        ids, logprobs, versions = self._placed(rows[row], start, count) if is_placed else self._lost(number, own)
        with np.errstate(over="ignore"):
            receipt = Receipt(
                generation["prompt_tokens"],
                generation["prompt_digest"],
                generation["max_tokens"],
                np.asarray(ids, "<i4"),
                np.asarray(logprobs, "<f4"),
                np.asarray(versions, "<i8"),
                generation["role"],
            )
        if len(ids) != count:
            self._add(number, f"generation {number} has {len(ids)} tokens, expected {count}")
        elif not np.array_equal(receipt.ids, ids):
            self._add(number, f"generation {number} has an id that is no integer from 0 to 2**31 - 1")
        elif is_placed and start != generation["prompt_tokens"]:
            given = generation["prompt_tokens"]
            self._add(number, f"generation {number} begins at {start}; the engine was given {given} ids for it")
        elif is_placed and not receipt.is_generation:
            self._add(number, f"generation {number} is in row {row}, and cannot be trained on")
        elif receipt.digest != generation["digest"]:
            what = f"generation {number} is not what the engine returned: the digest is {receipt.digest}, "
            self._add(number, f"{what}by its receipt {show(generation['digest'], 60)}")
        return receipt

    def _placed(self, row: CertificateRow, start: int, count: int) -> tuple[Any, Any, Any]:
        assert row.logprobs is not None
        assert row.versions is not None
        here = slice(start, start + count)
        return np.concatenate([row.prompt_ids, row.response_ids])[here], row.logprobs[here], row.versions[here]

    def _lost(self, number: int, own: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Return the tokens of a generation that no row holds."""
        ids, logprobs, runs = own
        counts = [count for count, _ in runs]
        if any(not 0 < count <= _MOST_TOKENS for count in counts) or sum(counts) > _MOST_TOKENS:
            self._refuse(number, f"its runs of versions are {show(runs, 60)}")
        versions = np.repeat(np.array([version for _, version in runs], np.int64), counts)
        # `nan`, `inf` and `-inf` are texts there.
        return np.array(ids, np.int64), np.array([float(each) for each in logprobs]), versions

    def _refuse(self, number: int, why: str) -> NoReturn:
        raise CertificateError(f"generation {number} of request {self._name} cannot be read: {why}")

    def _receipts(self, index: int, receipts: Sequence[Receipt], places: Sequence[GenerationPlace]) -> Receipts:
        record = self._record
        return Receipts(
            self._name,
            [receipt for receipt, place in zip(receipts, places, strict=True) if place.where == index],
            record["uid"],
            record["number"],
            record["void"],
            not record["valid"],
            index,
            places,
            record["outages"],
        )

    def _links(self) -> None:
        """Check that calls, replies, parents and requests name generations that are there."""
        record, turns = self._record, len(self._record["generations"])
        for number, generation in enumerate(record["generations"]):
            if (parent := generation["parent"]) is not None and not 0 <= parent < number:
                self._add(number, f"generation {number} continues generation {parent}, which is none before it")
        named = [(f"call {index}", call["turn"]) for index, call in enumerate(record["calls"])]
        named += [
            (f"reply {index}", reply["turn"])
            for index, reply in enumerate(record["replies"])
            if reply["turn"] is not None
        ]
        for index, request in enumerate((record["session"] or {"requests": []})["requests"]):
            named += [(f"request {index}", generation) for generation in request["generations"]]
        for what, turn in named:
            if not 0 <= turn < turns:
                self._add(None, f"{what} is of generation {turn}; there are {turns}")
        if not 0 <= record["asked"] <= len(record["messages"]):
            self._add(None, f"{record['asked']} of its {len(record['messages'])} messages are the row's own")

    def _ends(self) -> None:
        """Check that why it ended, how its last turn ended and whether it is valid fit each other."""
        record, reason = self._record, self._record["stop_reason"]
        if reason not in _REASONS:
            self._add(None, f"its stop_reason is {show(reason, 40)}, expected one of {_REASONS}")
            return
        sampled = any(bool(row.mask.any()) for row in self._rows)
        if record["valid"] != (reason not in INVALID and sampled):
            given = "it is marked as valid" if record["valid"] else "it is marked as invalid"
            self._add(None, f"{given}, and ended with {reason}, with {'' if sampled else 'no '}sampled tokens to train")
        for index, call in enumerate(record["calls"]):
            if call["status"] not in _STATUSES:
                self._add(None, f"call {index} has the status {show(call['status'], 40)}, expected one of {_STATUSES}")
        last = record["replies"][-1] if record["replies"] else {"done": False, "truncated": False}
        if reason == StopReason.ENVIRONMENT_TRUNCATED and not last["truncated"]:
            self._add(None, "it ended with environment_truncated, and no last reply says so")
        if reason == StopReason.ENVIRONMENT_DONE and (last["truncated"] or not last["done"]):
            self._add(None, "it ended with environment_done, and no last reply says so")
        if record["session"] is None:
            self._cuts(reason)

    def _cuts(self, reason: str) -> None:
        """Check that a turn which its budget cut was the last one, and the reason for the end."""
        turns = [
            each
            for each in enumerate(self._record["generations"])
            if not each[1]["summary"] and each[1]["role"] != USER
        ]
        for number, generation in turns[:-1]:
            if generation["finish"] == "length":
                self._add(number, f"generation {number} was cut by its budget, and the conversation went on")
        is_cut = bool(turns) and turns[-1][1]["finish"] == "length"
        if reason == StopReason.TURN_LENGTH and not is_cut:
            self._add(None, "it ended with turn_length, and the budget cut no last turn")
        if is_cut and reason not in _AFTER_A_CUT:
            self._add(turns[-1][0], f"it ended with {reason}, though its last turn was cut by the budget")

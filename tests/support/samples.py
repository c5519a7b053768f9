"""Honest rows of a training batch, and the tools that put the faults of `tests.long.tokens.corruptions` into them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verl_multiturn.certificate.check import CertificateRow, Column, Violation, verify
from verl_multiturn.certificate.conversations import repeated, shared
from verl_multiturn.certificate.receipts import Receipts
from verl_multiturn.records.rows import columns
from verl_multiturn.records.verify.record import receipts_of
from verl_multiturn.rows.keys import RowKey


@dataclass(frozen=True)
class Sample:
    """A row of a batch, and the receipts of the engine's outputs for it."""

    row: CertificateRow
    receipts: Receipts

    @property
    def prompt(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.row.prompt_ids)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Start and end of each generation, in tokens of the response."""
        starts = [(g.prompt_tokens - self.prompt, len(g.ids)) for g in self.receipts.generations]
        return [(start, start + count) for start, count in starts]

    def turn_at(self, token: int) -> int:
        """Return the index of the turn that a response token belongs to, or that comes next after it."""
        return sum(end <= token for _, end in self.spans)

    def sampled(self, rng: random.Random) -> int:
        """Draw the index of a sampled response token."""
        return rng.choice([token for start, end in self.spans for token in range(start, end)])

    def seen_context(self) -> list[int]:
        """Return the indices of the response tokens that were not sampled and that a later turn saw."""
        pairs = zip(self.spans, self.spans[1:], strict=False)
        return [token for (_, end), (start, _) in pairs for token in range(end, start)]


@dataclass(frozen=True)
class Corrupted:
    """A faulty sample, with the turn and token that the certificate has to name; None means any."""

    row: CertificateRow
    receipts: Receipts
    turn: int | None = None
    token: int | None = None
    bypass: bool = False
    """True when the trainer uses the engine's logprobs as its old logprobs (bypass mode)."""
    keys: tuple[str, ...] = ()
    """Names of all rows of the batch."""
    request_ids: Mapping[str, str] = field(default_factory=dict)
    """Request ids of all receipts of the batch, by the row's name."""

    def found(self) -> list[Violation]:
        """Return the violations that the certificate finds."""
        found = verify(self.row, self.receipts, bypass=self.bypass, filtered=self.receipts.invalid)
        requests = {RowKey.parse(name): request_id for name, request_id in self.request_ids.items()}
        return found + repeated(map(RowKey.parse, self.keys)) + shared(requests)

    def caught(self) -> bool:
        """Return whether the certificate finds the fault and points at the right place."""
        return self.is_named(self.found())

    def is_named(self, found: Iterable[Violation]) -> bool:
        """Return whether one of these violations points at the right place."""
        return any(
            (self.turn is None or violation.turn == self.turn) and (self.token is None or violation.token == self.token)
            for violation in found
        )


def sample_of_record(record: Mapping[str, Any], other: int = 0) -> Sample:
    """Make the batch row that the trainer got from a record with one row.

    Args:
        record: The record.
        other: Weight version that the row is tagged with when the record knows none.
    """
    (row,), (receipts,) = record["rows"], receipts_of(record)
    return sample_of_columns(columns(row), row["prompt_length"], receipts, other)


def sample_of_columns(full: Mapping[str, Any], length: int, receipts: Receipts, other: int = 0) -> Sample:
    """Make the batch row that the trainer got from full columns, such as those of a `Trajectory`.

    Args:
        full: `ids`, `mask`, `logprobs` and `versions`, each with a value for each token.
        length: Number of tokens of the prompt.
        receipts: The receipts of the row.
        other: Weight version that the row is tagged with when the columns have none.
    """
    known = [version for version in full["versions"] if version >= 0]
    made = rebuilt(
        np.asarray(full["ids"][:length]),
        np.asarray(full["ids"][length:]),
        np.asarray(full["mask"][length:]) * (not receipts.invalid),
        np.asarray(full["logprobs"][length:], np.float32),
        np.asarray(full["versions"][length:]),
    )
    key = f"{receipts.uid}_{receipts.session_id}_{receipts.row}"
    made = replace(made, min_version=min(known, default=other), max_version=max(known, default=other), key=key)
    return Sample(replace(made, uid=receipts.uid), receipts)


def rebuilt(prompt: Column, response: Column, mask: Column, logprobs: Column, versions: Column) -> CertificateRow:
    """Make a row from its main columns; the other columns follow from them, as in verl's batches.

    Args:
        prompt: Ids of the prompt, of shape `(prompt tokens,)`.
        response: Ids of the response, `(response tokens,)`, as the remaining columns.
        mask: 1 for sampled tokens.
        logprobs: Logprobs of the engine; 0.0 for tokens that were not sampled.
        versions: Weight versions; -1 where there is none.
    """
    ids = np.concatenate([prompt, response])
    return CertificateRow(
        prompt_ids=prompt,
        response_ids=response,
        mask=mask,
        loss_mask=mask,
        logprobs=logprobs,
        versions=versions,
        loss_inputs={"old_log_probs": logprobs, "advantages": mask.astype(np.float32)},
        input_ids=ids,
        position_ids=np.arange(len(ids)),
    )


def padding_row(row: CertificateRow) -> CertificateRow:
    """Make a padding row like verl's, tagged with the weight versions of `row`, the first row of the batch."""
    zero = np.zeros(1, np.float32)
    made = rebuilt(np.full(127, 7), np.array([7]), np.array([0]), zero, np.array([-1]))
    uid = f"pad{0:032x}"
    made = replace(made, min_version=row.min_version, max_version=row.max_version)
    return replace(made, uid=uid, key=f"{uid}_0_0", padding=True)


def spliced(
    row: CertificateRow, start: int, end: int, ids: Any = (), trained: int = 0, lp: Any = None, version: int = -1
) -> CertificateRow:
    """Return the row with response tokens `start` to `end` replaced, in every column.

    Args:
        row: The row.
        start: Index of the first response token to replace.
        end: Index after the last one.
        ids: New ids; none removes the tokens.
        trained: Mask of the new tokens.
        lp: Logprobs of the new tokens; None means 0.0.
        version: Weight version of the new tokens.
    """

    def put(column: Column, values: Any) -> Column:
        return np.concatenate([column[:start], np.asarray(values, column.dtype), column[end:]])

    assert row.logprobs is not None
    assert row.versions is not None
    made = rebuilt(
        row.prompt_ids,
        put(row.response_ids, ids),
        put(row.mask, [trained] * len(ids)),
        put(row.logprobs, [0.0] * len(ids) if lp is None else lp),
        put(row.versions, [version] * len(ids)),
    )
    return replace(made, min_version=row.min_version, max_version=row.max_version, uid=row.uid, key=row.key)


def changed(column: Column | None, at: int, value: Any) -> Column:
    """Return a copy of the column with one other value."""
    assert column is not None
    copy = column.copy()
    copy[at] = value
    return copy


def with_input(row: CertificateRow, name: str, column: Column) -> CertificateRow:
    """Return the row with one input of the loss replaced."""
    return replace(row, loss_inputs={**row.loss_inputs, name: column})


def with_mask(sample: Sample, mask: Column, token: int | None) -> Corrupted:
    """Put a faulty mask into a sample, as both `response_mask` and `loss_mask`.

    verl hands out one column under both names.

    Args:
        sample: The honest row.
        mask: The faulty mask.
        token: Index of the first wrong response token; None when any place will do.
    """
    row = replace(sample.row, mask=mask, loss_mask=mask)
    if token is None:
        return Corrupted(row, sample.receipts)
    return Corrupted(row, sample.receipts, sample.turn_at(token), sample.prompt + token)


def at(sample: Sample, row: CertificateRow, token: int) -> Corrupted:
    """Mark a row as wrong at one token of the response."""
    return Corrupted(row, sample.receipts, sample.turn_at(token), sample.prompt + token)

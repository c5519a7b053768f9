"""The check of some rows of a batch: each row against its receipts, wherever the check runs.

Checks over several rows are not here: whether a row is twice in the batch, whether a conversation has all its
rows, whether a request is there under two names. The trainer does them for all rows together, by the notes of their
receipts, so that no part needs to have all rows of a conversation, and any rows may lie in different parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from verl_multiturn.certificate.check import CertificateRow, Violation, verify
from verl_multiturn.certificate.conversations import MembershipNote, misattributed, shared, uncaused, unjoined
from verl_multiturn.certificate.receipts import Receipts
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.certificate.columns import RECEIPTS, TEACHER, VERSIONS, fetch, is_ours, missing

Fields = dict[str, Any]
"""The columns of a row."""


class Rules(NamedTuple):
    """Holds the rules of the certificate for all rows of a batch."""

    loss_inputs: Sequence[str]
    """Names of the columns that the loss takes."""
    only_ours: bool
    """Whether every row is of our agent loop."""
    mask_may_shrink: bool
    """Whether verl's rejection sampling writes the mask."""
    bypass: bool
    """Whether the old log-probs of all rows are the engine's."""
    masks_void_rows: bool
    """Whether rows with void turns are kept out of the loss."""
    oldest: int | None = None
    """Version of the oldest weights whose tokens are trained; None: all tokens are."""
    teacher: bool = False
    """Whether the loss takes a teacher's columns."""


class TrainerRow(NamedTuple):
    """Holds the trainer's knowledge of a row that is checked."""

    key: RowKey
    min_version: Any
    max_version: Any
    """verl's tags of the versions of the weights that sampled its oldest and its newest token."""
    padding: bool
    """Whether verl added it to fill the batch."""
    left_out: bool
    """Whether the trainer has excluded its conversation."""
    has_engines: bool
    """Whether its old log-probs have to be the engine's, to the bit."""


class RowVerdict(NamedTuple):
    """Reports the check of a row."""

    key: RowKey
    found: Sequence[Violation]
    note: MembershipNote | None = None
    """Note of its receipts on its conversation; None: it has none, or they cannot be read."""
    tokens: int = 0
    """Sampled tokens in its receipts."""
    generations: int = 0
    """Usable generations in its receipts."""
    is_verified: bool = True
    """False for a row that another agent loop than ours made."""


def check_rows(
    rows: Sequence[TrainerRow], partition_id: str, rules: Rules, further: Sequence[str] = ()
) -> tuple[list[RowVerdict], list[Fields]]:
    """Fetch rows of a batch, and check each of them.

    Args:
        rows: The rows, at least one.
        partition_id: TransferQueue's partition.
        rules: The rules that they have to obey.
        further: Names of columns that others need who look at the rows.

    Returns:
        The verdict on each row, in order, and the columns `further` of each, as far as it has them.
    """
    teacher = TEACHER if rules.teacher else ()
    columns = fetch([row.key for row in rows], partition_id, [*rules.loss_inputs, *teacher, *further])
    kept = [{name: fields[name] for name in further if name in fields} for fields in columns]
    return [check_row(row, fields, rules) for row, fields in zip(rows, columns, strict=True)], kept


def check_row(row: TrainerRow, fields: Fields, rules: Rules) -> RowVerdict:
    """Check one row by its columns."""
    receipts = Receipts("", [])
    if rules.teacher and (lost := [name for name in TEACHER if name not in fields]):
        return RowVerdict(
            row.key, [Violation(f"of row {row.key}", None, None, f"it came without {' and '.join(lost)}")]
        )
    if not row.padding:
        if not (rules.only_ours or is_ours(fields)):
            return RowVerdict(row.key, [], is_verified=False)
        try:
            if lost := missing(fields):
                raise ValueError(f"it came without {' and '.join(lost)}")
            receipts = Receipts.from_bytes(fields[RECEIPTS].tobytes())
        except ValueError as error:
            return RowVerdict(row.key, [Violation(f"of row {row.key}", None, None, str(error))])
    filtered = receipts.invalid or receipts.unrewarded or row.left_out or (receipts.void and rules.masks_void_rows)
    bypass = rules.bypass or row.has_engines
    return RowVerdict(
        row.key,
        verify(_row(row, fields, rules), receipts, rules.mask_may_shrink, bypass, filtered, rules.oldest),
        None if row.padding else MembershipNote.of(receipts),
        sum(len(generation.ids) for generation in receipts.generations),
        sum(generation.is_generation for generation in receipts.generations),
    )


def violations_of(
    verdicts: Sequence[RowVerdict],
    left_out: Mapping[str, str],
    trained: Collection[str] | None = None,
    taken: Mapping[RowKey, Collection[str | None]] | None = None,
) -> list[Violation]:
    """Return all violations of a batch's rows: those of each row, and of how they belong together.

    Args:
        verdicts: The verdicts on all rows that are verified, from whichever parts.
        left_out: The cause of each conversation that the trainer has excluded, by its name.
        trained: The roles that are trained; None: there are no roles.
        taken: The roles of each row, as the estimator of advantages has them; None: there are no roles.
    """
    found = [violation for verdict in verdicts for violation in verdict.found]
    notes = {verdict.key: verdict.note for verdict in verdicts if verdict.note is not None}
    found += shared({key: note.request_id for key, note in notes.items()})
    found += uncaused(notes, left_out)
    found += [] if taken is None else misattributed(notes, taken)
    return found or unjoined(notes, trained)  # a row whose receipts cannot be read joins no others


def _row(row: TrainerRow, fields: Mapping[str, Any], rules: Rules) -> CertificateRow:
    return CertificateRow(
        prompt_ids=fields["prompts"],
        response_ids=fields["responses"],
        mask=fields["response_mask"],
        logprobs=fields.get("rollout_log_probs"),
        versions=fields.get(VERSIONS),
        loss_mask=fields["loss_mask"],
        loss_inputs={name: fields[name] for name in rules.loss_inputs if name in fields},
        input_ids=fields["input_ids"],
        position_ids=fields["position_ids"],
        teacher=(fields[TEACHER[0]], fields[TEACHER[1]]) if rules.teacher else None,
        min_version=row.min_version,
        max_version=row.max_version,
        uid=str(fields["uid"]),
        key=str(row.key),
        padding=row.padding,
    )

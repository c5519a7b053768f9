"""The certificate in parts: rows that are checked apart from each other, as processes check a large batch.

Each row lies in a part of its own. So the rows of a conversation, and rows that are twice in the batch, always lie in
different parts, which is the danger of parts. A part's result is pickled on its way, as between processes.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.long.tokens.row_conversations import TRAINED
from tests.support.samples import Corrupted, Sample
from verl_multiturn.certificate.check import CertificateRow, Violation
from verl_multiturn.certificate.conversations import MembershipNote, gaps, repeated
from verl_multiturn.certificate.receipts import Receipts
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.certificate.columns import RECEIPTS, VERSIONS
from verl_multiturn.verl_bridge.certificate.part import RowVerdict, Rules, TrainerRow, check_row, violations_of


def fields_of(row: CertificateRow, receipts: Receipts) -> dict[str, Any]:
    """Return a row's columns under verl's names, as the certificate fetches them."""
    ids = np.concatenate([row.prompt_ids, row.response_ids])
    return {
        "uid": row.uid,
        "prompts": row.prompt_ids,
        "responses": row.response_ids,
        "input_ids": ids if row.input_ids is None else row.input_ids,
        "position_ids": np.arange(len(ids)) if row.position_ids is None else row.position_ids,
        "response_mask": row.mask,
        "loss_mask": row.mask if row.loss_mask is None else row.loss_mask,
        "rollout_log_probs": row.logprobs,
        "old_log_probs": row.logprobs,
        "advantages": row.mask.astype(np.float32),
        VERSIONS: row.versions,
        RECEIPTS: np.frombuffer(receipts.to_bytes(), np.uint8),
        **row.loss_inputs,
    }


def verdict_of(row: CertificateRow, receipts: Receipts, bypass: bool = False) -> RowVerdict:
    """Return the verdict of a part with this row alone."""
    rules = Rules(list(row.loss_inputs), True, False, bypass, False)
    known = TrainerRow(RowKey.parse(row.key or ""), row.min_version, row.max_version, row.padding, False, False)
    fields = fields_of(row, receipts)
    verdict: RowVerdict = pickle.loads(pickle.dumps(check_row(known, fields, rules)))
    return verdict


def violations_in_parts(rows: Sequence[Sample]) -> list[Violation]:
    """Return the certificate's findings in a batch of these rows, each in a part of its own."""
    keys = [RowKey.parse(each.row.key or "") for each in rows]
    found = repeated(keys) or gaps(keys)
    return found or violations_of([verdict_of(each.row, each.receipts) for each in rows], {}, TRAINED)


def caught_in_parts(corrupted: Corrupted) -> bool:
    """Return whether parts find a fault of a row, and point at the right place; the batch's other rows are honest."""
    own = RowKey.parse(corrupted.row.key or "")
    found = repeated(map(RowKey.parse, corrupted.keys))
    verdicts = [verdict_of(corrupted.row, corrupted.receipts, corrupted.bypass)]
    for name, request_id in corrupted.request_ids.items():
        if (key := RowKey.parse(name)) != own:
            verdicts.append(RowVerdict(key, [], MembershipNote.of(Receipts(request_id, []))))
    return corrupted.is_named(found or violations_of(verdicts, {}))

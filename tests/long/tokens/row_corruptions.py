"""Faults of whole rows (names, padding rows, invalid rows) and of the loss's other inputs.

`corruptions.py` defines a corruption.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np

from tests.support.samples import Corrupted, Sample, at, changed, padding_row, rebuilt, with_input
from verl_multiturn.certificate.check import CertificateRow
from verl_multiturn.certificate.receipts import Receipts


def infinite_advantage(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the advantage of one sampled token to infinity, positive or negative."""
    return _with_number(s, rng.choice([np.inf, -np.inf]), "advantages", s.sampled(rng))


def nan_advantage(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the advantage of one sampled token to NaN."""
    return _with_number(s, np.nan, "advantages", s.sampled(rng))


def nan_advantage_at_a_masked_token(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the advantage of one observation token to NaN."""
    context = s.seen_context()
    return _with_number(s, np.nan, "advantages", rng.choice(context)) if context else None


def nan_old_log_prob(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the old logprob of one sampled token to NaN."""
    return _with_number(s, np.nan, "old_log_probs", s.sampled(rng))


def infinite_importance_weight(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the importance weight of one sampled token to infinity."""
    return _with_number(s, np.inf, "rollout_is_weights", s.sampled(rng))


def nan_reference_log_prob(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the reference logprob of one sampled token to NaN."""
    return _with_number(s, np.nan, "ref_log_prob", s.sampled(rng))


def positive_old_log_prob(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the old logprob of one sampled token to 0.5."""
    return _with_number(s, 0.5, "old_log_probs", s.sampled(rng))


def positive_old_log_prob_at_a_masked_token(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the old logprob of one observation token to 3.0."""
    context = s.seen_context()
    return _with_number(s, 3.0, "old_log_probs", rng.choice(context)) if context else None


def old_log_prob_of_no_model(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the old logprob of one sampled token to -1e30, which no model computes."""
    return _with_number(s, -1e30, "old_log_probs", s.sampled(rng))


def positive_reference_log_prob(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the reference logprob of one sampled token to 0.5."""
    return _with_number(s, 0.5, "ref_log_prob", s.sampled(rng))


def reference_log_prob_of_no_model(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the reference logprob of one sampled token to -1e30, which no model computes."""
    return _with_number(s, -1e30, "ref_log_prob", s.sampled(rng))


def negative_importance_weight(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the importance weight of one sampled token to -0.25."""
    return _with_number(s, -0.25, "rollout_is_weights", s.sampled(rng))


def _with_number(s: Sample, value: float, name: str, token: int) -> Corrupted:
    column = changed(np.zeros(len(s.row.response_ids), np.float32), token, value)
    return at(s, with_input(s.row, name, column), token)


def truncated_advantages(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Remove the last advantage."""
    row = with_input(s.row, "advantages", s.row.loss_inputs["advantages"][:-1])
    return at(s, row, len(s.row.response_ids) - 1)


def truncated_old_log_probs(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Remove the last old logprob."""
    row = with_input(s.row, "old_log_probs", s.row.loss_inputs["old_log_probs"][:-1])
    return at(s, row, len(s.row.response_ids) - 1)


def other_old_log_prob_in_bypass_mode(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Lower one old logprob by 0.01 in bypass mode, where the old logprobs are the engine's."""
    token = s.sampled(rng)
    old = s.row.loss_inputs["old_log_probs"]
    row = with_input(s.row, "old_log_probs", changed(old, token, old[token] - 0.01))
    return replace(at(s, row, token), bypass=True)


def lost_generations(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Remove all generations from the receipts, and mask the row as one in which nothing was sampled."""
    return Corrupted(_unsampled(s), replace(s.receipts, generations=[]))


def invalid_row_in_the_mask(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Mark the row as invalid, but leave both masks as they were."""
    token = s.spans[0][0]
    return at(replace(s, receipts=replace(s.receipts, invalid=True)), s.row, token)


def invalid_row_in_the_loss_mask(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Mark the row as invalid and clear its mask, but not its loss mask."""
    row = replace(s.row, mask=np.zeros_like(s.row.mask))
    return at(replace(s, receipts=replace(s.receipts, invalid=True)), row, s.spans[0][0])


def invalid_row_with_another_id(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Mark the row as invalid and clear its masks, but change the id of one sampled token."""
    nothing = np.zeros_like(s.row.mask)
    token = s.sampled(rng)
    row = replace(s.row, mask=nothing, loss_mask=nothing)
    row = replace(row, response_ids=changed(row.response_ids, token, row.response_ids[token] + 1), input_ids=None)
    return at(replace(s, receipts=replace(s.receipts, invalid=True)), row, token)


def _unsampled(s: Sample) -> CertificateRow:
    count = len(s.row.response_ids)
    nothing = np.zeros(count, int)
    row = rebuilt(s.row.prompt_ids, s.row.response_ids, nothing, np.zeros(count, np.float32), np.full(count, -1))
    tags = {"min_version": s.row.min_version, "max_version": s.row.max_version}
    return replace(row, **tags, uid=s.row.uid, key=s.row.key)


def twice_in_the_batch(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Repeat the row's name in the batch."""
    name = s.row.key or ""
    return Corrupted(s.row, s.receipts, keys=(name, "other_0_0", name))


def conversation_under_two_names(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Give the conversation's row a second name.

    Each of the two rows fits its own receipts, but both receipts are from the generations of one request.
    """
    receipts = replace(s.receipts, session_id=s.receipts.session_id + 1)
    key = f"{receipts.uid}_{receipts.session_id}_0"
    request_ids = {s.row.key or "": s.receipts.request_id, key: receipts.request_id}
    return Corrupted(replace(s.row, key=key), receipts, request_ids=request_ids)


def second_row_of_a_conversation(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Name the row as a second row of its conversation."""
    return Corrupted(replace(s.row, key=f"{s.receipts.uid}_{s.receipts.session_id}_1"), s.receipts)


def row_tagged_as_padding(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Tag a real row as padding, with masks of 0 and without receipts."""
    nothing = np.zeros_like(s.row.mask)
    row = replace(s.row, mask=nothing, loss_mask=nothing, logprobs=None, padding=True)
    return Corrupted(row, Receipts("", []))


def row_under_the_name_of_padding(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Tag a real row as padding, and give it the name of a padding row."""
    filling, nothing = padding_row(s.row), np.zeros_like(s.row.mask)
    row = replace(s.row, mask=nothing, loss_mask=nothing, logprobs=None, uid=filling.uid, key=filling.key, padding=True)
    return Corrupted(row, Receipts("", []))


def padding_under_the_name_of_a_row(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Give a padding row the name of a real row."""
    return _padding(s, uid=s.row.uid, key=s.row.key)


def padding_in_the_mask(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the mask of a padding row to 1."""
    return _padding(s, mask=np.ones(1, int))


def padding_in_the_loss_mask(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the loss mask of a padding row to 1."""
    return _padding(s, loss_mask=np.ones(1, int))


def padding_with_a_log_prob(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Give a padding row a logprob of -0.5."""
    return _padding(s, logprobs=np.full(1, -0.5, np.float32))


def padding_with_a_nan_advantage(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Give a padding row an advantage of NaN."""
    return _padding(s, loss_inputs={"advantages": np.full(1, np.nan)})


def padding_with_several_advantages(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Give a padding row two advantages for its one token."""
    return _padding(s, loss_inputs={"advantages": np.zeros(2)})


def _padding(s: Sample, **changes: Any) -> Corrupted:
    return Corrupted(replace(padding_row(s.row), **changes), Receipts("", []))


ROW_CORRUPTIONS = (
    infinite_advantage, nan_advantage, nan_advantage_at_a_masked_token, nan_old_log_prob, infinite_importance_weight,
    nan_reference_log_prob, positive_old_log_prob, positive_old_log_prob_at_a_masked_token, old_log_prob_of_no_model,
    positive_reference_log_prob, reference_log_prob_of_no_model, negative_importance_weight, lost_generations,
    invalid_row_in_the_mask, invalid_row_in_the_loss_mask, invalid_row_with_another_id, truncated_advantages,
    truncated_old_log_probs, other_old_log_prob_in_bypass_mode, twice_in_the_batch, second_row_of_a_conversation,
    conversation_under_two_names, row_tagged_as_padding, row_under_the_name_of_padding,
    padding_under_the_name_of_a_row, padding_in_the_mask, padding_in_the_loss_mask, padding_with_a_log_prob,
    padding_with_a_nan_advantage, padding_with_several_advantages,
)  # fmt: skip

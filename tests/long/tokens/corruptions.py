"""Faults of a training batch, each as a function that puts the fault into an honest row.

The certificate must catch all of them.

A corruption gets a sample, another sample and a random generator. It returns the faulty sample with the place that the
certificate has to point at, or None where the sample has no room for the fault (no observation, one turn only …).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tests.long.tokens.row_corruptions import ROW_CORRUPTIONS
from tests.support.samples import Corrupted, Sample, at, changed, rebuilt, spliced, with_mask

Corruption = Callable[[Sample, Sample, random.Random], Corrupted | None]


def mask_left(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Shift the mask one token to the left."""
    return with_mask(s, np.append(s.row.mask[1:], 0), s.spans[0][1] - 1)


def mask_right(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Shift the mask one token to the right."""
    return with_mask(s, np.append([0], s.row.mask[:-1]), 0)


def mask_on_observation(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the mask of one observation token to 1."""
    context = s.seen_context()
    if not context:
        return None
    token = rng.choice(context)
    return with_mask(s, changed(s.row.mask, token, 1), token)


def mask_on_everything(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the mask of every token to 1."""
    context = s.seen_context()
    return with_mask(s, np.ones_like(s.row.mask), context[0]) if context else None


def mask_off_sampled(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the mask of one sampled token to 0."""
    token = s.sampled(rng)
    return with_mask(s, changed(s.row.mask, token, 0), token)


def mask_off_everything(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the mask of every token to 0."""
    return with_mask(s, np.zeros_like(s.row.mask), 0)


def mask_fraction(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the mask of one sampled token to 0.5."""
    token = s.sampled(rng)
    return with_mask(s, changed(s.row.mask.astype(np.float32), token, 0.5), token)


def loss_mask_differs(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set one sampled token to 0 in `loss_mask` alone."""
    token = s.sampled(rng)
    return at(s, replace(s.row, loss_mask=changed(s.row.loss_mask, token, 0)), token)


def retokenized(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Make one token out of two neighbours of a turn, as when its text is encoded again."""
    places = [token for start, end in s.spans for token in range(start, end - 1)]
    if not places:
        return None
    token = rng.choice(places)
    row = spliced(s.row, token, token + 2, [s.row.response_ids[token] + 1], 1, [-0.5], s.row.max_version or 0)
    return at(s, row, token)


def sampled_id_changed(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Change the id of one sampled token."""
    token = s.sampled(rng)
    assert s.row.logprobs is not None
    assert s.row.versions is not None
    new, lp, version = s.row.response_ids[token] + 1, [s.row.logprobs[token]], s.row.versions[token]
    return at(s, spliced(s.row, token, token + 1, [new], 1, lp, version), token)


def lost_separator(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Remove the first observation token, which a template may have written as a separator."""
    context = s.seen_context()
    if not context:
        return None
    row = spliced(s.row, context[0], context[0] + 1)
    return Corrupted(row, s.receipts, turn=s.turn_at(context[0]))


def observation_changed(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Change the id of one observation token."""
    context = s.seen_context()
    if not context:
        return None
    token = rng.choice(context)
    row = spliced(s.row, token, token + 1, [s.row.response_ids[token] + 1])
    return Corrupted(row, s.receipts, turn=s.turn_at(token))


def swapped_rows(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Replace the row's content by another row's, under the same name."""
    if np.array_equal(s.row.input_ids, other.row.input_ids):  # type: ignore[arg-type]
        return None
    return Corrupted(replace(other.row, key=s.row.key, uid=s.row.uid), s.receipts)


def swapped_receipts(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Replace the row's receipts by another row's, under the same name."""
    if np.array_equal(s.row.input_ids, other.row.input_ids):  # type: ignore[arg-type]
        return None
    return Corrupted(s.row, replace(other.receipts, uid=s.receipts.uid, session_id=s.receipts.session_id))


def foreign_uid(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Change the row's uid."""
    return Corrupted(replace(s.row, uid=f"{s.row.uid}x"), s.receipts)


def foreign_session(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Change the session number in the receipts."""
    return Corrupted(s.row, replace(s.receipts, session_id=s.receipts.session_id + 1))


def stale_logprob(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Lower the logprob of one sampled token by 0.01."""
    token = s.sampled(rng)
    assert s.row.logprobs is not None
    return at(s, replace(s.row, logprobs=changed(s.row.logprobs, token, s.row.logprobs[token] - 0.01)), token)


def logprob_on_observation(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Give the last observation token that a later turn saw a logprob of -0.1."""
    context = s.seen_context()
    return at(s, replace(s.row, logprobs=changed(s.row.logprobs, context[-1], -0.1)), context[-1]) if context else None


def logprobs_shifted(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Shift the logprobs one token to the right."""
    assert s.row.logprobs is not None
    shifted = np.roll(s.row.logprobs, 1)
    return None if np.array_equal(shifted, s.row.logprobs) else Corrupted(replace(s.row, logprobs=shifted), s.receipts)


def nan_logprob(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the logprob of one sampled token to NaN."""
    token = s.sampled(rng)
    return at(s, replace(s.row, logprobs=changed(s.row.logprobs, token, np.nan)), token)


def truncated_logprobs(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Remove the last logprob."""
    assert s.row.logprobs is not None
    return at(s, replace(s.row, logprobs=s.row.logprobs[:-1]), len(s.row.response_ids) - 1)


def truncated_versions(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Remove the last weight version."""
    assert s.row.versions is not None
    return at(s, replace(s.row, versions=s.row.versions[:-1]), len(s.row.response_ids) - 1)


def wrong_version(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Raise the weight version of one sampled token by 1."""
    token = s.sampled(rng)
    assert s.row.versions is not None
    return at(s, replace(s.row, versions=changed(s.row.versions, token, s.row.versions[token] + 1)), token)


def oldest_tag(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Raise the row's oldest weight version by 1."""
    return Corrupted(replace(s.row, min_version=(s.row.min_version or 0) + 1), s.receipts)


def newest_tag(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Raise the row's newest weight version by 1."""
    return Corrupted(replace(s.row, max_version=(s.row.max_version or 0) + 1), s.receipts)


def positions_off_by_one(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Raise all position ids by 1."""
    assert s.row.position_ids is not None
    return Corrupted(replace(s.row, position_ids=s.row.position_ids + 1), s.receipts, 0, 0)


def positions_restarted(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Count the position ids from 0 again where the response begins."""
    positions = np.concatenate([np.arange(s.prompt), np.arange(len(s.row.response_ids))])
    return at(s, replace(s.row, position_ids=positions), 0)


def input_ids_differ(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Change one sampled token in `input_ids` alone."""
    token = s.sampled(rng)
    assert s.row.input_ids is not None
    here = s.prompt + token
    return at(s, replace(s.row, input_ids=changed(s.row.input_ids, here, s.row.input_ids[here] + 1)), token)


def prompt_left_truncated(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Remove the first token of the prompt."""
    return Corrupted(spliced(replace(s.row, prompt_ids=s.row.prompt_ids[1:]), 0, 0), s.receipts, turn=0)


def prompt_token_changed(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Change the id of one prompt token."""
    token = rng.randrange(s.prompt)
    prompt = changed(s.row.prompt_ids, token, s.row.prompt_ids[token] + 1)
    return Corrupted(spliced(replace(s.row, prompt_ids=prompt), 0, 0), s.receipts, turn=0)


def duplicated_turn(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Repeat a sampled turn right after itself."""
    start, end = rng.choice(s.spans)
    assert s.row.logprobs is not None
    assert s.row.versions is not None
    again = s.row.response_ids[start:end], 1, s.row.logprobs[start:end], s.row.versions[start]
    return Corrupted(spliced(s.row, end, end, *again), s.receipts)


def dropped_turn(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Remove a sampled turn."""
    turn = rng.randrange(len(s.spans))
    return Corrupted(spliced(s.row, *s.spans[turn]), s.receipts, turn=turn)


def turns_out_of_order(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Swap two neighbouring sampled turns."""
    if len(s.spans) < 2:
        return None
    turn = rng.randrange(len(s.spans) - 1)
    (start, end), (later, last) = s.spans[turn : turn + 2]
    order = np.r_[0:start, later:last, end:later, start:end, last : len(s.row.response_ids)]
    assert s.row.logprobs is not None
    assert s.row.versions is not None
    columns = (s.row.response_ids, s.row.mask, s.row.logprobs, s.row.versions)
    moved = rebuilt(s.row.prompt_ids, *(column[order] for column in columns))
    return None if np.array_equal(moved.response_ids, s.row.response_ids) else Corrupted(moved, s.receipts, turn=turn)


def padding_after_the_end(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Append three tokens of padding that are trained."""
    end = len(s.row.response_ids)
    return at(s, spliced(s.row, end, end, [0] * 3, 1), end)


def extra_sampled_token(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Append a token that looks sampled."""
    end = len(s.row.response_ids)
    return at(s, spliced(s.row, end, end, [7], 1, [-0.1], s.row.max_version or 0), end)


def response_cut(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Cut the response off within its last sampled turn, in every column."""
    start, end = s.spans[-1]
    cut = rng.randrange(start, end)
    return at(s, spliced(s.row, cut, len(s.row.response_ids)), cut)


def response_cut_mask_kept(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Cut the response off within its last sampled turn, but keep the masks."""
    cut = rng.randrange(*s.spans[-1])
    row = spliced(s.row, cut, len(s.row.response_ids))
    return at(s, replace(row, mask=s.row.mask, loss_mask=s.row.mask), cut)


def id_beyond_int32(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Add 2**32 to the id of an observation token.

    The receipts know such a token only through a digest.
    """
    context = s.seen_context()
    if not context:
        return None
    token = rng.choice(context)
    return at(s, spliced(s.row, token, token + 1, [s.row.response_ids[token] + 2**32]), token)


def negative_id(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Set the id of one prompt token to -1."""
    token = rng.randrange(s.prompt)
    row = spliced(replace(s.row, prompt_ids=changed(s.row.prompt_ids, token, -1)), 0, 0)
    return Corrupted(row, s.receipts, 0, token)


def oldest_tag_too_old(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Lower the row's oldest weight version by 1."""
    return Corrupted(replace(s.row, min_version=(s.row.min_version or 0) - 1), s.receipts)


def newest_tag_too_old(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Lower the row's newest weight version by 1."""
    return Corrupted(replace(s.row, max_version=(s.row.max_version or 0) - 1), s.receipts)


def no_tags(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Remove the row's oldest and newest weight version."""
    return Corrupted(replace(s.row, min_version=None, max_version=None), s.receipts)


def beyond_the_budget(s: Sample, other: Sample, rng: random.Random) -> Corrupted | None:
    """Lower the requested length of the last generation below its number of tokens.

    The conversation should have refused such a generation.
    """
    generations = list(s.receipts.generations)
    last = generations[-1]
    generations[-1] = replace(last, max_tokens=len(last.ids) - 1)
    return replace(at(s, s.row, s.spans[-1][0]), receipts=replace(s.receipts, generations=generations))


CORRUPTIONS: dict[str, Corruption] = {
    made.__name__: made
    for made in (
        mask_left, mask_right, mask_on_observation, mask_on_everything, mask_off_sampled, mask_off_everything,
        mask_fraction, loss_mask_differs, retokenized, sampled_id_changed, lost_separator, observation_changed,
        swapped_rows, swapped_receipts, foreign_uid, foreign_session, stale_logprob, logprob_on_observation,
        logprobs_shifted, nan_logprob, truncated_logprobs, truncated_versions, wrong_version, oldest_tag, newest_tag,
        positions_off_by_one, positions_restarted, input_ids_differ, prompt_left_truncated, prompt_token_changed,
        duplicated_turn, dropped_turn, turns_out_of_order, padding_after_the_end, extra_sampled_token, response_cut,
        response_cut_mask_kept, id_beyond_int32, negative_id, oldest_tag_too_old, newest_tag_too_old, no_tags,
        beyond_the_budget,
        *ROW_CORRUPTIONS,
    )
}  # fmt: skip

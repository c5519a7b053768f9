"""With a bound of the ages the certificate accepts exactly the mask without old tokens, and no other."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.samples import Sample
from tests.unit.certificate.test_certificate import MASK, RESPONSE, literal
from verl_multiturn.certificate.check import verify
from verl_multiturn.rollout.groups.staleness import StalenessBound, too_old

# Versions of the literal row's 8 sampled tokens: three turns of 3, 2 and 3 tokens. An unknown version is -1.
VERSIONS = st.lists(st.integers(-1, 6), min_size=8, max_size=8)
SAMPLED = [position for position, sampled in enumerate(MASK) if sampled]


def sample_with(versions: list[int]) -> Sample:
    sample = literal()
    column = np.full(len(RESPONSE), -1)
    column[SAMPLED] = versions
    parts = np.split(np.array(versions), [3, 5])
    generations = [replace(g, versions=part) for g, part in zip(sample.receipts.generations, parts, strict=True)]
    known = [version for version in versions if version >= 0] or [4]
    row = replace(sample.row, versions=column, min_version=min(known), max_version=max(known))
    return Sample(row, replace(sample.receipts, generations=generations))


def test_old_tokens_are_literally_these() -> None:
    sample = sample_with([3, 4, 5, -1, 4, 5, 5, 6])
    mask = np.array([0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1])
    row = replace(sample.row, mask=mask, loss_mask=mask)
    assert verify(row, sample.receipts, oldest=4) == []
    assert [str(found) for found in verify(row, sample.receipts, oldest=5)] == [
        "request r1 (row u_0_0), turn 0, token 4: mask is 1, by the receipts 0 (2 tokens differ)",
        "request r1 (row u_0_0), turn 0, token 4: loss_mask is 1, by the receipts 0 (2 tokens differ)",
    ]
    assert len(verify(row, sample.receipts)) == 2
    assert verify(row, sample.receipts, oldest=4, filtered=True) != []


def test_before_there_are_old_tokens_an_unknown_version_is_too_old() -> None:
    sample = sample_with([-1, 0, 0, 0, 0, 0, 0, 0])
    assert [found.token for found in verify(sample.row, sample.receipts, oldest=-3)] == [3, 3]


@given(VERSIONS, st.integers(0, 4), st.integers(1, 8), st.integers(0, 12))
def test_a_zero_too_many_or_too_few_is_a_violation(versions: list[int], eta: int, step: int, at: int) -> None:
    sample = sample_with(versions)
    mask = np.array(MASK) * ~too_old(sample.row.versions, step, StalenessBound(eta, "mask"))
    row = replace(sample.row, mask=mask, loss_mask=mask)
    oldest = step - 1 - eta
    assert verify(row, sample.receipts, oldest=oldest) == []
    wrong = mask.copy()
    wrong[at] = 1 - wrong[at]
    for changed in (replace(row, mask=wrong), replace(row, loss_mask=wrong)):
        assert [found.token for found in verify(changed, sample.receipts, oldest=oldest)] == [len(row.prompt_ids) + at]
    # Rejection sampling may take more out of the mask, but bring nothing back, and not touch `loss_mask`.
    shrunk = verify(replace(row, mask=wrong), sample.receipts, mask_may_shrink=True, oldest=oldest)
    assert len(shrunk) == wrong[at]
